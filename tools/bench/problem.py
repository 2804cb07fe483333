"""Compares ways to compute one loss: counts FLOPs and bytes of each, checks its gradients, then times all in turns.

extra   peak bytes without inputs and final gradients.  On a CPU, tools/bench/counter.py counts them at every operation;
        on CUDA, they are the allocator's peak minus inputs and gradients
total   peak bytes with inputs and gradients
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tools.bench.clock import check_close, medians, wall_on
from tools.bench.counter import Counter
from tools.bench.results import DONE, Row

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # share of a gradient's norm
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Ways to compute one loss, and the inputs of the loss.  The first way is the reference of the others."""

    ways: dict[str, Callable[[], Tensor]]
    leaves: tuple[Tensor, ...]  # inputs that require gradients
    constants: tuple[Tensor, ...]
    num_gradients: Mapping[str, int] = field(default_factory=dict)  # of ways that have them of the first leaves only

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
    """Yields a row for every way of `problem`.  Checks gradients on `checked`: the same problem, or a smaller one."""
    reference = next(iter(checked.ways))
    checked.backward(reference)
    expected = list(checked.gradients.values())
    counts: dict[str, Row] = {}
    for name in problem.ways:
        counts[name] = count(problem, name, peak=peak)
        if checked is not problem:
            checked.backward(name)
        if checked is not problem or counts[name]["status"] == DONE:
            num_gradients = checked.num_gradients.get(name, len(expected))
            check_close(name, checked.gradients, expected[:num_gradients], TOLERANCE[expected[0].dtype])
    problem.clear()
    checked.clear()
    del expected
    calls = {name: partial(problem.backward, name) for name, row in counts.items() if row["status"] == DONE}
    seconds = medians(calls, repeats=repeats, clock=wall_on(problem.device))
    for name, row in counts.items():
        ratio = seconds[name] / seconds[reference] if name in seconds and reference in seconds else None
        yield {"way": name, **row, "seconds": seconds.get(name), "ratio": ratio}


def count(problem: Problem, name: str, *, peak: bool = True) -> Row:
    """Counts FLOPs and bytes of one run.  Leaves the gradients in the leaves."""
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
    bytes_sent = counter.bytes_sent if dist.get_world_size() > 1 else 0  # a single rank sends nothing
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
    """Catches out-of-memory errors of the body; the list holds the message of a caught error."""
    errors: list[str] = []
    try:
        yield errors
    except torch.OutOfMemoryError as error:
        errors.append(str(error))
    if errors:
        torch.cuda.empty_cache()
