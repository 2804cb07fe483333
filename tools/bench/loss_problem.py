"""Makes inputs of the loss head.  Counts FLOPs and bytes, checks gradients and measures times of its implementations.

extra   peak bytes without inputs and final gradients.  On a CPU, tools/bench/counter.py counts them at every operation.
        On CUDA, it is the allocator's peak minus inputs and gradients
total   peak bytes with inputs and gradients
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sft.config import LossConfig
from sft.mcore.loss import Targets, VocabShard, lm_loss
from sft.mcore.loss.teacher import Teacher
from tools.bench.clock import catch_out_of_memory, check_close, medians, wall_on
from tools.bench.counter import Counter
from tools.bench.harness import DONE, Row

BASELINE = "F.linear + F.cross_entropy"
WAYS = ("fused", "distilled", "frozen", "chunked", "full", BASELINE)
IGNORED = -100  # label of a token that is not supervised
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # norm of the difference / norm of the gradient


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the inputs.

    vocab: rows of the output weight over all ranks; chunks: chunk sizes of fused, in tokens; teacher: tokens of a
    teacher's list
    """

    tokens: int = 2048
    hidden: int = 1024
    vocab: int = 32_768
    fraction: float = 1.0
    chunks: tuple[int, ...] = (256, 512)
    teacher: int = 64
    dtype: str = "fp32"
    device: str = "cpu"

    @property
    def num_supervised(self) -> int:
        return round(self.fraction * self.tokens)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Implementations of one loss, and their inputs.  All implementations are compared with the first one."""

    ways: dict[str, Callable[[], Tensor]]
    leaves: tuple[Tensor, ...]  # inputs that require gradients
    constants: tuple[Tensor, ...]
    num_gradients: Mapping[str, int]  # implementation -> n, if only the first n leaves get gradients

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


def make_problem(sizes: Sizes, only: Sequence[str] = WAYS) -> Problem:
    """Random inputs whose logits have about unit variance.  Ranks differ only in their part of the vocabulary."""
    group = dist.group.WORLD
    assert group is not None
    device, dtype = torch.device(sizes.device), DTYPES[sizes.dtype]
    generator = torch.Generator(device).manual_seed(0)
    t, h, v = sizes.tokens, sizes.hidden, sizes.vocab
    hidden = torch.randn(t, 1, h, dtype=dtype, device=device, generator=generator).requires_grad_()
    whole = torch.randn(v, h, dtype=dtype, device=device, generator=generator).mul_(h**-0.5)
    weight = (whole if group.size() == 1 else whole.chunk(group.size())[group.rank()].clone()).requires_grad_()
    order = torch.randperm(t, device=device, generator=generator)
    rows = order[: sizes.num_supervised].sort().values
    labels = torch.randint(v, (len(rows),), device=device, generator=generator)
    all_labels = torch.full((t,), IGNORED, device=device).index_copy_(0, rows, labels)
    targets = Targets(rows=rows, labels=labels, weights=torch.ones(len(rows), device=device))
    taught = replace(targets, teacher=make_teacher(sizes, device))
    shard = VocabShard.of(weight, v, group, sequence_parallel=False)
    frozen = replace(shard, weight=weight.detach())
    largest = max(sizes.chunks)

    def plain() -> Tensor:
        logits = F.linear(hidden.flatten(0, 1), weight)
        return F.cross_entropy(logits.float(), all_labels, reduction="sum", ignore_index=IGNORED)

    def ours(loss: LossConfig, of: VocabShard = shard, to: Targets = targets) -> Tensor:
        return lm_loss(hidden, of, to, loss)[0]

    ways: dict[str, Callable[[], Tensor]] = {
        BASELINE: plain,
        **{f"fused {chunk}": partial(ours, LossConfig(impl="fused", chunk_size=chunk)) for chunk in sizes.chunks},
        f"distilled {largest}": partial(ours, LossConfig(impl="fused", chunk_size=largest), to=taught),
        f"frozen {largest}": partial(ours, LossConfig(impl="fused", chunk_size=largest), frozen),
        "chunked": partial(ours, LossConfig(impl="chunked", chunk_size=largest)),
        "full": partial(ours, LossConfig(impl="full")),
    }
    if group.size() > 1:  # torch's functions cannot split the vocabulary over ranks
        del ways[BASELINE]
        ways = {"full": ways.pop("full")} | ways
    reference = next(iter(ways))
    chosen = {
        name: way for name, way in ways.items() if name == reference or name.split(" ")[0] in only or name in only
    }
    return Problem(
        ways=chosen,
        leaves=(hidden, weight),
        constants=(all_labels, targets.rows, targets.labels, targets.weights, *(taught.teacher or ())),
        num_gradients={f"frozen {largest}": 1},
    )


def make_teacher(sizes: Sizes, device: torch.device) -> Teacher:
    """Random lists for all supervised tokens.  Their weight in the objective is 0, which changes no time, and leaves
    the gradients as they are without a teacher."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (sizes.num_supervised, min(sizes.teacher, sizes.vocab))
    # different ids in a row: a random first one, and then every third id
    first = torch.randint(sizes.vocab, (shape[0], 1), device=device, generator=generator)
    step = max(1, min(3, sizes.vocab // shape[1]))
    ids = (first + step * torch.arange(shape[1], device=device)) % sizes.vocab
    logprobs = torch.randn(shape[0], shape[1] + 1, device=device, generator=generator).log_softmax(-1)[:, :-1]
    logprobs = logprobs.sort(dim=-1, descending=True).values.contiguous()
    return Teacher(ids.int(), logprobs, torch.zeros(shape[0], device=device))


def measure(problem: Problem, checked: Problem, *, repeats: int) -> Iterator[Row]:
    """Yields a row for every implementation in `problem`.

    checked: the same problem or a smaller one, on which the gradients are compared
    """
    reference = next(iter(checked.ways))
    checked.backward(reference)
    expected = list(checked.gradients.values())
    counts: dict[str, Row] = {}
    for name in problem.ways:
        counts[name] = count(problem, name)
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


def count(problem: Problem, name: str) -> Row:
    """Counts FLOPs and bytes of one forward and backward.  The gradients stay in the leaves."""
    problem.clear()
    inputs = (*problem.leaves, *problem.constants)
    on_cuda = problem.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(problem.device)
        before = torch.cuda.memory_allocated(problem.device)
    with catch_out_of_memory() as errors, FlopCounterMode(display=False) as flops, Counter() as counter:
        problem.backward(name)
    if errors:
        return {"status": "out of memory"}
    bytes_sent = counter.bytes_sent if dist.get_world_size() > 1 else 0  # a single rank sends nothing
    row: Row = {"status": DONE, "flops": flops.get_total_flops(), "bytes_sent": bytes_sent}
    gradients = problem.gradients.values()
    if on_cuda:
        new = torch.cuda.max_memory_allocated(problem.device) - before
        row["extra"] = max(0, new - sum(x.nbytes for x in gradients))
        row["total"] = new + sum(x.nbytes for x in inputs)
    else:
        row["extra"] = counter.peak_bytes(beyond=[*inputs, *gradients])
        row["total"] = counter.peak_bytes(beyond=inputs) + sum(x.nbytes for x in inputs)
    return row
