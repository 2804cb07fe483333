"""Ways to compute one loss: each is counted once, its gradients are compared, and only then all are timed in turns.

extra   most bytes alive at once that are neither input nor what ends as a gradient.  On a CPU counted at every
        operation (tools/bench/counter.py), on CUDA the allocator's peak less inputs and gradients
total   the same with inputs and gradients
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tools.bench.clock import check_close, medians, wall_on
from tools.bench.counter import Counter
from tools.bench.results import DONE, Row

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of a gradient's norm
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Ways to one loss, and the tensors it depends on.  The first way is what the others are compared with."""

    ways: dict[str, Callable[[], Tensor]]
    leaves: tuple[Tensor, ...]  # want gradients
    constants: tuple[Tensor, ...]

    def backward(self, name: str) -> None:
        self.clear()
        self.ways[name]().backward()

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    @property
    def gradients(self) -> dict[str, Tensor]:
        return {f"gradient {i}": leaf.grad for i, leaf in enumerate(self.leaves) if leaf.grad is not None}

    @property
    def device(self) -> torch.device:
        return self.leaves[0].device


def measure(problem: Problem, checked: Problem, *, repeats: int, peak: bool = True) -> Iterator[Row]:
    """A row for every way of `problem`, once its gradients of `checked` (the same, or smaller) are right."""
    reference = next(iter(checked.ways))
    checked.backward(reference)
    expected = list(checked.gradients.values())
    counts: dict[str, Row] = {}
    for name in problem.ways:
        counts[name] = count(problem, name, peak=peak)
        if checked is not problem:
            checked.backward(name)
        if checked is not problem or counts[name]["status"] == DONE:
            check_close(name, checked.gradients, expected, TOLERANCE[expected[0].dtype])
    problem.clear()
    checked.clear()
    del expected
    calls = {name: partial(problem.backward, name) for name, row in counts.items() if row["status"] == DONE}
    seconds = medians(calls, repeats=repeats, clock=wall_on(problem.device))
    for name, row in counts.items():
        ratio = seconds[name] / seconds[reference] if name in seconds and reference in seconds else None
        yield {"way": name, **row, "seconds": seconds.get(name), "ratio": ratio}


def count(problem: Problem, name: str, *, peak: bool = True) -> Row:
    """One run; its gradients are left in the leaves."""
    problem.clear()
    inputs = (*problem.leaves, *problem.constants)
    on_cuda = problem.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(problem.device)
        before = torch.cuda.memory_allocated(problem.device)
    with catch_out_of_memory() as errors, Counter(storages=peak and not on_cuda) as counter:
        problem.backward(name)
    if errors:
        return {"status": OUT_OF_MEMORY}
    bytes_sent = counter.bytes_sent if dist.get_world_size() > 1 else 0  # a rank alone sends to nobody
    row: Row = {"status": DONE, "flops": counter.flops, "bytes_sent": bytes_sent}
    if not peak:
        return row
    gradients = problem.gradients.values()
    if on_cuda:
        new = torch.cuda.max_memory_allocated(problem.device) - before
        row["extra"] = max(0, new - sum(x.nbytes for x in gradients))
        row["total"] = new + sum(x.nbytes for x in inputs)
    else:
        row["extra"] = counter.peak_bytes(beyond=[*inputs, *gradients])
        row["total"] = counter.peak_bytes(beyond=inputs) + sum(x.nbytes for x in inputs)
    return row


@contextmanager
def catch_out_of_memory() -> Iterator[list[str]]:
    """The list is empty afterwards if there was enough of it."""
    errors: list[str] = []
    try:
        yield errors
    except torch.OutOfMemoryError as error:
        errors.append(str(error))
    if errors:
        torch.cuda.empty_cache()
