"""Time, memory and arithmetic of the loss head, forward and backward, beside the ways it could be done instead.

    python tools/bench_loss_head.py                          2,048 tokens x 1,024 hidden x 32,768 vocabulary
    python tools/bench_loss_head.py --fraction 1,0.5,0.1,0   one block of the table per supervised fraction
    python tools/bench_loss_head.py --check                  those fractions, and exit 1 when a bar is missed
    python tools/bench_loss_head.py --tp 2                   the vocabulary over two gloo ranks: what is sent
    python tools/bench_loss_head.py --device cuda --dtype bf16 --hidden 2048 --vocab 62080 --tokens 262144 --sweep
    python tools/bench_loss_head.py --grid                   log-probs from given logits, up to 128K x 128K, on CUDA

Rows: `fused C`, `chunked`, `full` and `token_statistics` are sft's; the others are written here as a user, or another
trainer, would.  Rows that go in chunks take the largest of --chunks.  Over several ranks only sft's run, and `full`
is what they are compared with.

A row whose gradients are not those of the first row is refused: nothing is timed then.  Times are medians; in each
repetition every row runs once.

    extra   most bytes alive at once that are neither input nor what ends as a gradient.  On a CPU counted at every
            operation torch dispatches, so not what a kernel takes for itself; on CUDA the allocator's peak less
            inputs and gradients.
    total   the same with inputs and gradients.
    GEMM    FLOPs of matrix products, in units of 2 x tokens x hidden x vocabulary rows of the rank.
    sent    bytes this rank puts into collectives.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sft.config import LossConfig
from sft.mcore.loss import Targets, VocabShard, chunked, lm_loss, token_statistics
from sft.mcore.process_groups import parallel_state

BASELINE = "F.linear + F.cross_entropy"
CONCATENATE = "chunk list + concatenate"
RECOMPUTE = "recompute in backward"
ROWS = ["fused", "chunked", "full", "token_statistics", BASELINE, CONCATENATE, RECOMPUTE]
IGNORED = -100

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of a gradient's norm
CHECKED_TOKENS = 8192  # gradients of more are checked on that many: the baseline would not fit
EVERY_FRACTION = [1.0, 0.5, 0.1, 0.0]
SWEEP = [512, 1024, 2048, 4096, 8192, 16384]
GRID_VOCABS = [32_000, 64_000, 128_000]
GRID_TOKENS = [1 << 15, 1 << 16, 1 << 17]
GRID_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Shape:
    tokens: int = 2048
    hidden: int = 1024
    vocab: int = 32_768


# The bars of --check.  Times hold on a CPU in fp32 at the default shape, or on one H200 in bf16 at CUDA_SHAPE.
CPU_SHAPE = Shape()
CPU_RATIO = {(1.0, 256): 1.08, (1.0, 512): 1.00, (0.1, 256): 0.15, (0.1, 512): 0.15}  # (fraction, chunk)
CUDA_SHAPE = Shape(tokens=262_144, hidden=2048, vocab=62_080)
CUDA_MS, CUDA_GIB, CUDA_CHUNK = 316.0, 3.3, 4096


def extra_bar(chunk: int, shape: Shape, tp: int = 1) -> float:
    """Bytes of `extra` for fused in fp32: one buffer of scores and 2% of it, and a few numbers a token."""
    return 1.02 * chunk * shape.vocab / tp * 4 + 32 * shape.tokens


# --- counting ------------------------------------------------------------------------------------------------

_aten, _c10d = torch.ops.aten, torch.ops.c10d
_FIRST_FACTOR = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}  # operation -> which argument
_GIVEN = {_c10d.allreduce_: 0, _c10d._allgather_base_: 1, _c10d._reduce_scatter_base_: 1}


@dataclass(kw_only=True)
class _Life:
    """Of one storage: alive at the operations `born` to `died` - 1."""

    reference: StorageWeakRef
    num_bytes: int
    born: int
    died: int = sys.maxsize


class Counter(TorchDispatchMode):
    """What passes torch's dispatcher while this mode is on, backward included."""

    def __init__(self, *, storages: bool = True) -> None:
        super().__init__()
        self.flops = 0
        self.bytes_sent = 0
        self._storages = storages
        self._clock = 0  # operations so far
        self._alive: dict[int, _Life] = {}  # by the storage's address, which its weak reference keeps from reuse
        self._dead: list[_Life] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._clock += 1
        self._bury()
        result = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        if operation in _FIRST_FACTOR:
            a, b = args[_FIRST_FACTOR[operation] :][:2]
            self.flops += 2 * a.numel() * b.shape[-1]
        if func.namespace == "c10d" and dist.get_world_size() > 1:
            self.bytes_sent += sum(x.nbytes for x in tree_leaves(args[_GIVEN[operation]]))
        if self._storages:
            self._see(x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor))
        return result

    def peak_bytes(self, *, beyond: Iterable[Tensor] = ()) -> int:
        """Most bytes alive after any one operation, without the storages of those tensors, which must be alive."""
        self._clock += 1
        self._bury()
        left_out = {x.untyped_storage()._cdata for x in beyond}
        lives = [life for address, life in self._alive.items() if address not in left_out] + self._dead
        changes = [(life.born, life.num_bytes) for life in lives] + [(life.died, -life.num_bytes) for life in lives]
        most = alive = 0
        for _, change in sorted(changes):  # of the same moment, what is freed comes first
            alive += change
            most = max(most, alive)
        return most

    def _see(self, tensors: Iterator[Tensor]) -> None:
        for x in tensors:
            storage = x.untyped_storage()
            life = self._alive.get(storage._cdata)
            if life is not None and life.num_bytes == storage.nbytes():
                continue
            if life is not None:  # resized
                self._end(storage._cdata)
            reference = StorageWeakRef(storage)
            self._alive[reference.cdata] = _Life(reference=reference, num_bytes=storage.nbytes(), born=self._clock)

    def _bury(self) -> None:
        for address in [address for address, life in self._alive.items() if life.reference.expired()]:
            self._end(address)

    def _end(self, address: int) -> None:
        life = self._alive.pop(address)
        life.died = self._clock
        self._dead.append(life)


# --- what others do ------------------------------------------------------------------------------------------


def baseline(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden.flatten(0, 1), weight)
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORED)


def negative_sum(logprobs: Tensor, labels: Tensor) -> Tensor:
    return -(logprobs * (labels != IGNORED)).sum()


def concatenate(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    logits = F.linear(hidden.flatten(0, 1), weight)
    return negative_sum(concatenated_logprobs(logits, labels, chunk), labels)


def concatenated_logprobs(logits: Tensor, labels: Tensor, chunk: int) -> Tensor:
    logprobs: Tensor = _Concatenated.apply(logits, labels.clamp(min=0), chunk)
    return logprobs


class _Concatenated(torch.autograd.Function):
    """Log-probs of given logits in chunks kept in lists, as SkyRL PR #1610 has it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunk: int) -> Tensor:
        pieces = []
        for scores, label in zip(logits.split(chunk), labels.split(chunk)):
            pieces.append(torch.log_softmax(scores.float(), -1).gather(1, label[:, None]).squeeze(1))
        ctx.save_for_backward(logits, labels)
        ctx.chunk = chunk
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        pieces = []
        for scores, label, slope in zip(*(x.split(ctx.chunk) for x in (logits, labels, upstream))):
            softmax = torch.softmax(scores.float(), -1)
            one_hot = F.one_hot(label, logits.shape[1])  # int64
            pieces.append(one_hot.float().sub_(softmax).mul_(slope[:, None]))
        return torch.cat(pieces), None, None  # fp32: autograd casts it


def recompute(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    logprobs = _Recomputed.apply(hidden.flatten(0, 1), weight, labels.clamp(min=0), chunk)
    return negative_sum(logprobs, labels)


class _Recomputed(torch.autograd.Function):
    """Log-probs from hidden states, logits taken a second time in backward, as SkyRL PR #1841 has it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        logprobs = torch.empty(len(labels), device=hidden.device)
        for h, label, out in zip(*(x.split(chunk) for x in (hidden, labels, logprobs))):
            scores = (h @ weight.t()).float()
            out.copy_(scores.gather(1, label[:, None]).squeeze(1) - torch.logsumexp(scores, -1))
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk = chunk
        return logprobs

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        parts = zip(*(x.split(ctx.chunk) for x in (hidden, labels, upstream, dhidden)))
        for h, label, slope, dh in parts:
            scores = (h @ weight.t()).float()
            dscores = torch.softmax(scores, -1).mul_(-slope[:, None])
            dscores.scatter_add_(1, label[:, None], slope[:, None])
            narrow = dscores.to(weight.dtype)
            torch.mm(narrow, weight, out=dh)
            dweight += (narrow.t() @ h).float()
        return dhidden, dweight.to(weight.dtype), None, None


# --- problems: the same inputs for every row -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Ways to one loss, and the tensors it depends on.  The first row is the one the others are compared with."""

    rows: dict[str, Callable[[], Tensor]]
    leaves: tuple[Tensor, ...]  # want gradients
    constants: tuple[Tensor, ...]

    def backward(self, name: str) -> None:
        for leaf in self.leaves:
            leaf.grad = None
        self.rows[name]().backward()

    @property
    def gradients(self) -> list[Tensor]:
        return [leaf.grad for leaf in self.leaves if leaf.grad is not None]


def loss_head(
    shape: Shape,
    *,
    fraction: float,
    chunks: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    only: Sequence[str] = ROWS,
) -> Problem:
    """Hidden states and weight in; scores of about unit variance.  On every rank the same but for its vocabulary."""
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator(device).manual_seed(0)
    t, h, v = shape.tokens, shape.hidden, shape.vocab
    hidden = torch.randn(t, 1, h, dtype=dtype, device=device, generator=generator).requires_grad_()
    whole = torch.randn(v, h, dtype=dtype, device=device, generator=generator).mul_(h**-0.5)
    weight = (whole if group.size() == 1 else whole.chunk(group.size())[group.rank()].clone()).requires_grad_()
    order = torch.randperm(t, device=device, generator=generator)
    rows = order[: num_supervised(shape, fraction)].sort().values
    chosen = torch.randint(v, (len(rows),), device=device, generator=generator)
    labels = torch.full((t,), IGNORED, device=device).index_copy_(0, rows, chosen)
    targets = Targets(rows=rows, labels=chosen, weights=torch.ones(len(rows), device=device))
    shard = VocabShard.of(weight, v, group, sequence_parallel=False)
    largest = max(chunks)

    def ours(loss: LossConfig) -> Tensor:
        return lm_loss(hidden, shard, targets, loss).objective

    def statistics() -> Tensor:
        return -token_statistics(hidden, shard, targets, LossConfig(impl="fused", chunk_size=largest)).logprob.sum()

    full = {"full": partial(ours, LossConfig(impl="full"))}
    mine: dict[str, Callable[[], Tensor]] = {
        **{f"fused {c}": partial(ours, LossConfig(impl="fused", chunk_size=c)) for c in chunks},
        "chunked": partial(ours, LossConfig(impl="chunked", chunk_size=largest)),
        "token_statistics": statistics,
    }
    if group.size() > 1:
        every = full | mine
    else:
        every = {
            BASELINE: partial(baseline, hidden, weight, labels),
            **mine,
            **full,
            CONCATENATE: partial(concatenate, hidden, weight, labels, largest),
            RECOMPUTE: partial(recompute, hidden, weight, labels, largest),
        }
    reference = next(iter(every))
    return Problem(
        rows={name: loss for name, loss in every.items() if name == reference or kind(name) in only},
        leaves=(hidden, weight),
        constants=(labels, targets.rows, targets.labels, targets.weights),
    )


def given_logits(vocab: int, tokens: int, *, chunk: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """Logits in, the sum of the labels' log-probs out."""
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=dtype, device=device).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=generator, device=device)
    rows, weights = torch.arange(tokens, device=device), torch.ones(tokens, device=device)
    targets = Targets(rows=rows, labels=labels, weights=weights)
    shard = VocabShard.of(logits.new_empty((vocab, 0)), vocab, group, sequence_parallel=False)
    loss = LossConfig(impl="chunked", chunk_size=chunk)

    def unchunked() -> Tensor:
        return torch.log_softmax(logits.float(), -1).gather(1, labels[:, None]).sum()

    return Problem(
        rows={
            "log_softmax, gather": unchunked,
            f"chunked {chunk}": lambda: chunked.row_statistics(logits, shard, targets, loss).logprob.sum(),
            CONCATENATE: lambda: concatenated_logprobs(logits, labels, chunk).sum(),
        },
        leaves=(logits,),
        constants=(rows, labels, weights),
    )


def num_supervised(shape: Shape, fraction: float) -> int:
    return round(fraction * shape.tokens)


def kind(name: str) -> str:
    """fused 512 -> fused"""
    return "fused" if name.startswith("fused ") else name


# --- measuring -----------------------------------------------------------------------------------------------


class WrongGradient(Exception):
    """A row that must not be timed."""


@dataclass(kw_only=True)
class Result:
    """Of one row; None where it was not measured, or did not fit."""

    ms: float | None = None
    extra: int | None = None
    total: int | None = None
    flops: int = 0
    bytes_sent: int = 0
    fits: bool = True


def measure(problem: Problem, checked: Problem, *, repeats: int, peak: bool = True) -> dict[str, Result]:
    """Every row of `problem`, once its gradients of `checked` (the same problem, or a smaller one) are right."""
    reference = next(iter(checked.rows))
    checked.backward(reference)
    expected = checked.gradients
    results = {}
    for name in problem.rows:
        results[name] = count(problem, name, peak=peak)
        if checked is not problem:
            checked.backward(name)
        if checked is not problem or results[name].fits:
            check_gradients(name, checked.gradients, expected)
    for leaf in (*problem.leaves, *checked.leaves):
        leaf.grad = None
    del expected
    fitting = [name for name, result in results.items() if result.fits]
    times = time_all(problem, fitting, repeats)
    for name in fitting:
        results[name].ms = times[name]
    return results


def count(problem: Problem, name: str, *, peak: bool = True) -> Result:
    """One run; its gradients are left in the leaves."""
    inputs = (*problem.leaves, *problem.constants)
    for leaf in problem.leaves:
        leaf.grad = None
    device = inputs[0].device
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with out_of_memory() as failed, Counter(storages=peak and not on_cuda) as counter:
        problem.backward(name)
    result = Result(flops=counter.flops, bytes_sent=counter.bytes_sent, fits=not failed)
    if not peak or failed:
        return result
    gradients = problem.gradients
    if on_cuda:
        new = torch.cuda.max_memory_allocated(device) - before
        result.extra = max(0, new - sum(x.nbytes for x in gradients))
        result.total = new + sum(x.nbytes for x in inputs)
    else:
        result.extra = counter.peak_bytes(beyond=[*inputs, *gradients])
        result.total = counter.peak_bytes(beyond=inputs) + sum(x.nbytes for x in inputs)
    return result


@contextmanager
def out_of_memory() -> Iterator[list[str]]:
    """The list is empty afterwards if there was enough of it."""
    failed: list[str] = []
    try:
        yield failed
    except torch.OutOfMemoryError as error:
        failed.append(str(error))
    if failed:
        torch.cuda.empty_cache()


def check_gradients(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """WrongGradient where one is further than TOLERANCE from what is expected, by its norm."""
    if len(found) != len(expected):
        raise WrongGradient(f"{name}: {len(found)} of {len(expected)} gradients")
    for mine, theirs in zip(found, expected):
        away, norm = float((mine.float() - theirs.float()).norm()), float(theirs.float().norm())
        if not away <= TOLERANCE[theirs.dtype] * norm:
            raise WrongGradient(f"{name}: a gradient of norm {norm:.4g} is off by {away:.4g}; nothing was timed.")


def time_all(problem: Problem, names: Sequence[str], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turns after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repeats + 1):
        for name in names:
            synchronize(problem)
            start = time.perf_counter()
            problem.backward(name)
            synchronize(problem)
            if repetition:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: median(taken) for name, taken in times.items()}


def synchronize(problem: Problem) -> None:
    if problem.leaves[0].is_cuda:
        torch.cuda.synchronize()


# --- bars ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Block:
    """Results at one supervised fraction."""

    shape: Shape
    fraction: float
    dtype: torch.dtype
    device_type: str
    tp: int
    results: dict[str, Result]

    @property
    def unit(self) -> int:
        """FLOPs of one product of every token with this rank's vocabulary."""
        return 2 * self.shape.tokens * self.shape.hidden * (self.shape.vocab // self.tp)


def bars(block: Block) -> Iterator[tuple[str, bool]]:
    """Each bar that applies to this block, in words with what was found, and whether it is met."""
    results, fraction = block.results, block.fraction
    rows = num_supervised(block.shape, fraction)
    fused = {int(name.split()[1]): result for name, result in results.items() if kind(name) == "fused"}
    at = f"fraction {fraction:g}"
    for chunk, result in fused.items():
        row = f"{at}, fused {chunk}"
        wanted = 3 * block.unit * rows // block.shape.tokens
        yield f"{row}: {result.flops:,} FLOPs (exactly {wanted:,})", result.flops == wanted
        on_cpu = block.device_type == "cpu" and block.dtype == torch.float32
        if on_cpu and result.extra is not None:
            most = extra_bar(chunk, block.shape, block.tp)
            yield f"{row}: {result.extra:,} bytes extra (at most {most:,.0f})", result.extra <= most
        ratio = CPU_RATIO.get((fraction, chunk))
        reference = results.get(BASELINE)
        if on_cpu and block.shape == CPU_SHAPE and ratio and reference and reference.ms and result.ms:
            found = result.ms / reference.ms
            yield f"{row}: {found:.3f} of the time of {BASELINE} (at most {ratio:g})", found <= ratio
        on_gpu = block.device_type == "cuda" and block.dtype == torch.bfloat16
        if on_gpu and block.shape == CUDA_SHAPE and chunk == CUDA_CHUNK and fraction == 1.0:
            if result.ms is not None:
                yield f"{row}: {result.ms:.1f} ms (at most {CUDA_MS:g})", result.ms <= CUDA_MS
            if result.total is not None:
                gib = result.total / 2**30
                yield f"{row}: {gib:.2f} GiB (at most {CUDA_GIB:g})", gib <= CUDA_GIB
    if not fused:
        return
    most_fused = fused[max(fused)]
    if (other := results.get(RECOMPUTE)) and other.fits:
        wanted = 4 * block.unit
        yield f"{at}, {RECOMPUTE}: {other.flops:,} FLOPs (exactly {wanted:,})", other.flops == wanted
    if (other := results.get(CONCATENATE)) and other.extra is not None and most_fused.extra is not None:
        words = f"{at}, {CONCATENATE}: {other.extra:,} bytes extra (more than fused, {most_fused.extra:,})"
        yield words, other.extra > most_fused.extra


# --- the tables ----------------------------------------------------------------------------------------------


def print_block(block: Block) -> None:
    tokens = block.shape.tokens
    rows = num_supervised(block.shape, block.fraction)
    reference = next(iter(block.results.values()))
    print(f"\nsupervised {rows:,} of {tokens:,}")
    print(f"{'':<28}{'ms':>10}{'ratio':>8}{'extra MiB':>12}{'total MiB':>12}{'GEMM':>8}{'sent bytes':>14}")
    for name, result in block.results.items():
        if not result.fits:
            print(f"{name:<28}{'out of memory':>18}")
            continue
        ms = "-" if result.ms is None else f"{result.ms:.1f}"
        ratio = "-" if not (result.ms and reference.ms) else f"{result.ms / reference.ms:.3f}"
        print(
            f"{name:<28}{ms:>10}{ratio:>8}{mib(result.extra):>12}{mib(result.total):>12}"
            f"{result.flops / block.unit:>8.3f}{result.bytes_sent:>14,}",
            flush=True,
        )


def mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.2f}"


def print_grid(
    vocabs: Sequence[int], tokens: Sequence[int], *, chunk: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> None:
    """Total milliseconds and MiB of every cell, as in the table of SkyRL PR #1610."""
    make = partial(given_logits, chunk=chunk, dtype=dtype, device=device)
    print(f"\n{'vocabulary':>10}{'tokens':>9}  {'':<28}{'ms':>10}{'MiB':>12}")
    for vocab in vocabs:
        for t in tokens:
            results: dict[str, Result] = {}
            with out_of_memory() as failed:
                checked = make(vocab, min(t, 2 * chunk + 1))
                results = measure(make(vocab, t), checked, repeats=repeats)
            if failed:
                print(f"{vocab:>10,}{t:>9,}  out of memory", flush=True)
            for name, result in results.items():
                found = f"{result.ms:>10.1f}{mib(result.total):>12}" if result.ms is not None else "  out of memory"
                print(f"{vocab:>10,}{t:>9,}  {name:<28}{found}", flush=True)


# --- the command line ----------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, default=CPU_SHAPE.tokens)
    parser.add_argument("--hidden", type=positive, default=CPU_SHAPE.hidden)
    parser.add_argument("--vocab", type=positive, default=CPU_SHAPE.vocab)
    parser.add_argument("--chunks", type=list_of(positive), default=[256, 512], help="of fused, like 256,512")
    parser.add_argument("--fraction", type=list_of(fraction), help="of tokens that are supervised, like 1,0.1")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--tp", type=int, choices=[1, 2], default=1, help="ranks; 2 on the CPU only")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--only", type=list_of(row), default=ROWS, help=f"some of: {', '.join(ROWS)}")
    parser.add_argument("--no-peak", action="store_true", help="do not count memory")
    parser.add_argument("--sweep", action="store_true", help=f"--only fused --chunks {','.join(map(str, SWEEP))}")
    parser.add_argument("--grid", action="store_true", help="log-probs from given bf16 logits; needs CUDA")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed, and say which")
    options = parser.parse_args(argv)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() and options.tp == 1 else "cpu"
    if options.fraction is None:
        options.fraction = EVERY_FRACTION if options.check else [1.0]
    if options.sweep:
        options.chunks, options.only = SWEEP, ["fused"]
    if options.device == "cuda" and options.tp > 1:
        parser.error("--tp 2 runs on the CPU: use --device cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: use --device cpu")
    if options.grid and options.device != "cuda":
        parser.error("--grid needs tens of GiB on a CUDA device")
    if options.vocab % options.tp:
        parser.error(f"--vocab {options.vocab} is not a multiple of --tp {options.tp}")
    return options


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def fraction(text: str) -> float:
    if not 0.0 <= float(text) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not within 0 and 1")
    return float(text)


def row(text: str) -> str:
    """A row by the start of its name."""
    found = [name for name in ROWS if name.lower().startswith(text.lower())]
    if len(found) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is the start of {found or 'none'} of: {', '.join(ROWS)}")
    return found[0]


def list_of(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def items(text: str) -> list[Any]:
        return [item(part.strip()) for part in text.split(",")]

    return items


def bench(options: argparse.Namespace) -> int:
    """On this rank; rank 0 prints."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    shape = Shape(tokens=options.tokens, hidden=options.hidden, vocab=options.vocab)
    speaks = dist.get_rank() == 0
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    if options.grid:
        print(f"{hardware}, torch {torch.__version__}, bf16, median of {options.repeats}")
        print_grid(
            GRID_VOCABS, GRID_TOKENS, chunk=GRID_CHUNK, dtype=torch.bfloat16, device=device, repeats=options.repeats
        )
        return 0
    if speaks:
        print(
            f"{hardware}, torch {torch.__version__}, {options.dtype}, {shape.tokens:,} tokens, {shape.hidden:,} hidden,"
            f" {shape.vocab:,} vocabulary, tp {options.tp}, median of {options.repeats}",
            flush=True,
        )
    outcomes: list[tuple[str, bool]] = []
    for part in options.fraction:
        settings = dict(fraction=part, chunks=options.chunks, dtype=dtype, device=device, only=options.only)
        problem = checked = loss_head(shape, **settings)
        if shape.tokens > CHECKED_TOKENS:
            fewer = Shape(tokens=CHECKED_TOKENS, hidden=shape.hidden, vocab=shape.vocab)
            checked = loss_head(fewer, **settings)
        results = measure(problem, checked, repeats=options.repeats, peak=not options.no_peak)
        block = Block(shape=shape, fraction=part, dtype=dtype, device_type=device.type, tp=options.tp, results=results)
        outcomes += bars(block)
        if speaks:
            print_block(block)
    if not options.check or not speaks:
        return 0
    missed = [words for words, met in outcomes if not met]
    print(f"\nbench_loss_head: {len(outcomes) - len(missed)} of {len(outcomes)} bars met")
    for words in missed:
        print(f"MISSED  {words}")
    return 1 if missed or not outcomes else 0


@contextmanager
def world(device_type: str, rank: int, size: int, meeting: str | None = None) -> Iterator[None]:
    """The process group, and core's own idea of it, which `full` looks up.  `meeting` is a file all ranks know."""
    store = dist.FileStore(meeting, size) if meeting else dist.HashStore()
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def on_rank(rank: int, options: argparse.Namespace, meeting: str | None = None) -> int:
    with world(options.device, rank, options.tp, meeting):
        try:
            return bench(options)
        except WrongGradient as error:
            print(f"bench_loss_head: {error}", file=sys.stderr, flush=True)
            if options.tp > 1:
                os._exit(2)  # the others may be waiting in a collective
            return 2


def spawned(rank: int, options: argparse.Namespace, meeting: str) -> None:
    sys.exit(on_rank(rank, options, meeting))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.tp == 1:
        return on_rank(0, options)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(spawned, (options, os.path.join(folder, "meeting")), nprocs=options.tp)
        except mp.ProcessExitedException as ended:
            return ended.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
