"""Time of the index arithmetic of context parallelism for one microbatch (sft/parallel/context_parallel.py).

A case is DOCUMENTS:CP.  `indices` is the time of local_indices on the slowest rank, and `inverse` that of
gathered_positions.  A rank calls both for each microbatch.  Times are medians on one core.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from sft.parallel import context_parallel
from tools.bench.clock import medians, wall
from tools.bench.harness import Option, Subject
from tools.bench.results import Bar, Column, Row

TOKENS = 1 << 20
BAR_MS = 10.0  # milliseconds of indices and inverse, for 1M tokens in 1,000 documents


def read(name: str) -> tuple[int, int]:
    num_documents, cp_size = map(int, name.split(":"))
    return num_documents, cp_size


def documents(num_tokens: int, num_documents: int, cp_size: int) -> np.ndarray:
    """cu_seqlens of documents of unequal length, each a multiple of 2 * cp_size."""
    multiple = 2 * cp_size
    total = num_tokens // multiple
    inner = np.random.default_rng(0).choice(np.arange(1, total), size=num_documents - 1, replace=False)
    return np.concatenate([[0], np.sort(inner), [total]]).astype(np.int32) * np.int32(multiple)


def measure(case: tuple[int, int], options: argparse.Namespace) -> Iterator[Row]:
    num_documents, cp_size = case
    cu_seqlens = documents(options.tokens, num_documents, cp_size)
    calls = {
        f"rank {rank}": partial(context_parallel.local_indices, cu_seqlens, cp_size, rank) for rank in {0, cp_size - 1}
    } | {"inverse": partial(context_parallel.gathered_positions, cu_seqlens, cp_size)}
    seconds = medians(calls, repeats=options.repeats, clock=wall)
    inverse = seconds.pop("inverse")
    indices = max(seconds.values())
    yield {
        "tokens": options.tokens, "documents": num_documents,
        "indices_s": indices, "inverse_s": inverse, "sum_s": indices + inverse,
    }  # fmt: skip


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    sums = [row["sum_s"] * 1e3 for row in rows if (row["tokens"], row["documents"]) == (TOKENS, 1000)]
    yield Bar(name="1M tokens in 1,000 documents, slowest cp, ms", value=max(sums, default=None), bound=BAR_MS)


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("tokens", "tokens", ","),
        Column("indices_s", "indices ms", ".2f", 1e-3),
        Column("inverse_s", "inverse ms", ".2f", 1e-3),
        Column("sum_s", "sum ms", ".2f", 1e-3),
    ],
    cases=["1000:1", "1000:2", "1000:8", "1000:32", "1:8", "65536:8"],  # the last case has the shortest documents
    tiny_cases=["1000:8", "1:8", "8192:8"],
    read=read,
    options={
        "tokens": Option(TOKENS, 1 << 17, "tokens of the pack"),
        "repeats": Option(31, 3, "timed repetitions"),
    },
    bars=bars,
)
