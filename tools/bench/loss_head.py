"""Measures time, memory and FLOPs of the loss head, forward and backward, compared with torch's functions.

    python -m tools.bench loss_head --check              2,048 tokens x 1,024 hidden x 32,768 vocabulary
    python -m tools.bench loss_head --cases 1 --tp 2     vocabulary split over two gloo ranks; counts sent bytes
    python -m tools.bench loss_head --cases 1 --device cuda --dtype bf16 --hidden 2048 --vocab 62080 --tokens 262144 \\
        --chunks 512,1024,2048,4096,8192,16384 --ways fused

A case is the fraction of tokens that are supervised.  `fused C` is the fused loss with chunks of C tokens, and `frozen
C` the same with a frozen output weight.  `distilled C` also computes the divergence from a teacher's list of 64 tokens.
All other chunked implementations use the largest of --chunks.  The reference is the first row: torch's code, or `full`
on several ranks.  If gradients of an implementation differ from the
reference, nothing is timed.  tools/bench/loss_problem.py defines `extra` and `total`.  `GEMM` is the FLOPs of matrix
products in units of 2 x tokens x hidden x vocabulary rows of the rank.  `bytes sent` is the number of bytes that this
rank passes to collectives.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch.distributed as dist

from tools.bench import ranks
from tools.bench.harness import DONE, Bar, Column, Option, Row, Subject
from tools.bench.loss_problem import BASELINE, DTYPES, WAYS, Sizes, make_problem, measure

CHECKED_TOKENS = 8192  # gradients are checked on at most so many tokens; the baseline would not fit with more

# Bars of FLOPs apply to every size, and the bar of `extra` bytes from LARGE_BUFFER on.  Bars of time apply on a CPU in
# fp32 with CPU_SIZES, and on one H200 in bf16 with CUDA_SIZES; other rows have no bars of time.
CPU_SIZES = (2048, 1024, 32_768)  # tokens, hidden, vocabulary
CPU_RATIO = {(1.0, 256): 1.08, (1.0, 512): 1.00, (0.1, 256): 0.15, (0.1, 512): 0.15}  # (fraction, chunk): time ratio
# Time and extra bytes of distilled / those of fused at fraction 1, with CPU_SIZES and lists of 64 tokens.
CPU_DISTILLED_RATIO, DISTILLED_EXTRA = 1.15, 1.1
CPU_FROZEN_RATIO = 0.75  # time of frozen / time of fused at fraction 1; frozen has 2 of the 3 GEMMs, and the softmax
# Bytes of the logits of a chunk, from which the bar of `extra` applies.  The softmax also copies rows, 512 KiB at a
# time, which is 2% of this.
LARGE_BUFFER = 25 * 2**20
CUDA_SIZES = (262_144, 2048, 62_080)
CUDA_MS, CUDA_GIB, CUDA_CHUNK = 316.0, 3.3, 4096


def measure_on_rank(sizes: Sizes, only: Sequence[str], repeats: int) -> list[Row]:
    """Runs on every rank of the process group.  Returns the rows of this rank."""
    with ranks.tensor_parallel():
        problem = checked = make_problem(sizes, only)
        if sizes.tokens > CHECKED_TOKENS:
            checked = make_problem(replace(sizes, tokens=CHECKED_TOKENS), only)
        rows = list(measure(problem, checked, repeats=repeats))
    unit = 2 * sizes.tokens * sizes.hidden * (sizes.vocab // dist.get_world_size())
    facts = {
        "tokens": sizes.tokens, "hidden": sizes.hidden, "vocab": sizes.vocab, "fraction": sizes.fraction,
        "supervised": sizes.num_supervised, "dtype": sizes.dtype, "device": sizes.device, "tp": dist.get_world_size(),
        "unit": unit,
    }  # fmt: skip
    return [{**facts, **row, "gemm": row["flops"] / unit if "flops" in row else None} for row in rows]


def measure_case(fraction: float, options: argparse.Namespace) -> Iterator[Row]:
    sizes = Sizes(
        tokens=options.tokens, hidden=options.hidden, vocab=options.vocab, fraction=fraction, chunks=options.chunks,
        dtype=options.dtype, device=options.device.type,
    )  # fmt: skip
    work = (sizes, options.ways, options.repeats)
    if options.tp > 1:
        yield from ranks.rows_of_rank0(options.tp, measure_on_rank, *work)
        return
    with ranks.alone(options.device.type):
        yield from measure_on_rank(*work)


def read(name: str) -> float:
    if not 0.0 <= float(name) <= 1.0:
        raise ValueError(f"{name} is not a fraction between 0 and 1")
    return float(name)


def read_chunks(text: str) -> tuple[int, ...]:
    return tuple(int(chunk) for chunk in text.split(","))


def validate(options: argparse.Namespace) -> None:
    if min(options.tokens, options.hidden, options.vocab, options.repeats, *options.chunks) < 1:
        raise ValueError("--tokens, --hidden, --vocab, --chunks and --repeats must be at least 1")
    if options.vocab % options.tp:
        raise ValueError(f"--vocab {options.vocab} is not a multiple of --tp {options.tp}")
    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype {options.dtype} is not one of {', '.join(DTYPES)}")
    if options.tp > 1 and options.device == "cuda":
        raise ValueError("--tp 2 runs on the CPU: use --device cpu")
    if options.tp > 1:
        options.device = "cpu"


def extra_bar(chunk: int, row: Row) -> float | None:
    """The bound of `extra` bytes of fused in fp32: one buffer of logits plus 2%, and 32 bytes per token.

    None if the buffer is too small for a bar.
    """
    buffer = chunk * row["vocab"] / row["tp"] * 4
    return 1.02 * buffer + 32 * row["tokens"] if buffer >= LARGE_BUFFER else None


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """All bars that apply to the cases of these rows."""
    for _, block in groupby(rows, key=lambda row: (row["fraction"], row["tokens"], row["vocab"], row["dtype"])):
        ways = {row["way"]: row for row in block if row.get("status", DONE) == DONE}
        fused, frozen, distilled = (
            {int(name.split()[1]): row for name, row in ways.items() if name.startswith(f"{impl} ")}
            for impl in ("fused", "frozen", "distilled")
        )
        for chunk, row in fused.items():
            yield from _of_fused(chunk, row, ways.get(BASELINE))
        for chunk, row in frozen.items():
            yield from _of_frozen(chunk, row, fused.get(chunk))
        for chunk, row in distilled.items():
            yield from _of_distilled(chunk, row, fused.get(chunk))


def _of_fused(chunk: int, row: Row, baseline: Row | None) -> Iterator[Bar]:
    name = f"fraction {row['fraction']:g}, fused {chunk}"
    flops = 3 * row["unit"] * row["supervised"] // row["tokens"]
    yield Bar(name=f"{name}, FLOPs", value=row["flops"], bound=flops, relation="exactly")
    sizes = (row["tokens"], row["hidden"], row["vocab"])
    if (row["device"], row["dtype"]) == ("cpu", "fp32"):
        if bound := extra_bar(chunk, row):
            yield Bar(name=f"{name}, extra bytes", value=row["extra"], bound=bound)
        ratio = CPU_RATIO.get((row["fraction"], chunk))
        if sizes == CPU_SIZES and ratio and baseline and baseline.get("seconds") and row.get("seconds"):
            share = row["seconds"] / baseline["seconds"]
            yield Bar(name=f"{name}, time / time of {BASELINE}", value=share, bound=ratio)
    if (row["device"], row["dtype"], sizes, chunk, row["fraction"]) == ("cuda", "bf16", CUDA_SIZES, CUDA_CHUNK, 1.0):
        if row.get("seconds"):
            yield Bar(name=f"{name}, ms", value=row["seconds"] * 1e3, bound=CUDA_MS)
        yield Bar(name=f"{name}, GiB", value=row["total"] / 2**30, bound=CUDA_GIB)


def _of_frozen(chunk: int, row: Row, trained: Row | None) -> Iterator[Bar]:
    name = f"fraction {row['fraction']:g}, frozen {chunk}"
    flops = 2 * row["unit"] * row["supervised"] // row["tokens"]
    yield Bar(name=f"{name}, FLOPs", value=row["flops"], bound=flops, relation="exactly")
    if trained is None or (row["device"], row["dtype"]) != ("cpu", "fp32"):
        return
    if "total" in row and "total" in trained:
        weight = row["hidden"] * row["vocab"] // row["tp"] * 4
        yield Bar(name=f"{name}, total bytes", value=row["total"], bound=trained["total"] - weight)
    sizes = (row["tokens"], row["hidden"], row["vocab"])
    if sizes == CPU_SIZES and row["fraction"] == 1.0 and row.get("seconds") and trained.get("seconds"):
        share = row["seconds"] / trained["seconds"]
        yield Bar(name=f"{name}, time / time of fused {chunk}", value=share, bound=CPU_FROZEN_RATIO)


def _of_distilled(chunk: int, row: Row, plain: Row | None) -> Iterator[Bar]:
    name = f"fraction {row['fraction']:g}, distilled {chunk}"
    flops = 3 * row["unit"] * row["supervised"] // row["tokens"]
    yield Bar(name=f"{name}, FLOPs", value=row["flops"], bound=flops, relation="exactly")
    sizes = (row["tokens"], row["hidden"], row["vocab"])
    if plain is None or (row["device"], row["dtype"], row["fraction"], sizes) != ("cpu", "fp32", 1.0, CPU_SIZES):
        return
    share = row["extra"] / plain["extra"]
    yield Bar(name=f"{name}, extra bytes / those of fused {chunk}", value=share, bound=DISTILLED_EXTRA)
    if row.get("seconds") and plain.get("seconds"):
        share = row["seconds"] / plain["seconds"]
        yield Bar(name=f"{name}, time / time of fused {chunk}", value=share, bound=CPU_DISTILLED_RATIO)


SUBJECT = Subject(
    measure=measure_case,
    columns=[
        Column("supervised", "supervised", ","),
        Column("seconds", "ms", ",.1f", 1e-3),
        Column("ratio", "ratio", ".3f"),
        Column("extra", "extra MiB", ",.2f", 2**20),
        Column("total", "total MiB", ",.2f", 2**20),
        Column("gemm", "GEMM", ".3f"),
        Column("bytes_sent", "bytes sent", ","),
    ],
    cases=["1", "0.5", "0.1", "0"],
    tiny_cases=["1", "0.5", "0"],
    ways=WAYS,
    read=read,
    options={
        "tokens": Option(Sizes.tokens, 24, "number of tokens"),
        "hidden": Option(Sizes.hidden, 8, "hidden size"),
        "vocab": Option(Sizes.vocab, 50, "size of the vocabulary"),
        "chunks": Option("256,512", "5,9", "chunk sizes of fused", read=read_chunks),
        "dtype": Option(Sizes.dtype, help="fp32 or bf16"),
        "tp": Option(1, help="number of ranks; more than 1 only on a CPU"),
        "repeats": Option(5, 1, "timed repetitions"),
    },
    validate=validate,
    bars=bars,
    device="any",
)
