"""Time, memory and FLOPs of the loss head, forward and backward, compared with other implementations.

    python -m tools.bench loss_head --check              2,048 tokens x 1,024 hidden x 32,768 vocabulary
    python -m tools.bench loss_head --cases 1 --tp 2     vocabulary split over two gloo ranks; counts sent bytes
    python -m tools.bench loss_head --cases 1 --device cuda --dtype bf16 --hidden 2048 --vocab 62080 --tokens 262144 \\
        --chunks 512,1024,2048,4096,8192,16384 --ways fused

A case is the fraction of tokens that are supervised.  `fused C`, `frozen C`, `chunked`, `full` and `token_statistics`
are the trainer's code; tools/bench/loss_ways.py holds the others.  `frozen C` is `fused C` with a frozen output weight.
All chunked implementations but `fused C` use the largest of --chunks.  The reference is the first row.  On several
ranks, only the trainer's code runs, and the reference is `full`.  If gradients of an implementation differ from the
reference, nothing is timed.  tools/bench/problem.py defines `extra` and `total`.  `GEMM`: FLOPs of matrix products in
units of 2 x tokens x hidden x vocabulary rows of the rank.  `bytes sent`: bytes that this rank passes to collectives.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch.distributed as dist

from tools.bench import ranks
from tools.bench.harness import Option, Subject
from tools.bench.loss_bars import bars
from tools.bench.loss_problem import DTYPES, WAYS, Sizes, make_problem
from tools.bench.problem import measure
from tools.bench.results import Column, Row

CHECKED_TOKENS = 8192  # largest number of tokens for checking gradients: with more, the baseline would not fit


def measure_on_rank(sizes: Sizes, only: Sequence[str], repeats: int, peak: bool) -> list[Row]:
    """Runs on every rank of the process group.  Returns the rows of this rank."""
    with ranks.tensor_parallel():
        problem = checked = make_problem(sizes, only)
        if sizes.tokens > CHECKED_TOKENS:
            checked = make_problem(replace(sizes, tokens=CHECKED_TOKENS), only)
        rows = list(measure(problem, checked, repeats=repeats, peak=peak))
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
    work = (sizes, options.ways, options.repeats, not options.no_peak)
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
        "no_peak": Option(False, help="do not measure memory"),
    },
    validate=validate,
    bars=bars,
    device="any",
)
