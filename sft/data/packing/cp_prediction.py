"""Predicts a step by its grid of packs: time, balance, bytes over cp, shares of cp sizes.  Nothing is measured.

A group begins a pack when the last of its ranks is ready.  With pipelines or experts, all of `CpCost.wait_ranks`
consecutive ranks wait for each other after every microbatch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sft.data.packing.cp_cost import CpCost
from sft.data.packing.cp_documents import Documents
from sft.data.packing.dynamic_cp import Grid
from sft.parallel.alignment import aligned
from sft.parallel.cp_group import cp_sizes


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step.

    makespan_ns      time of the slowest rank, with its waits
    num_bytes        bytes over cp that all ranks together receive (of one rank of tp, and of one pipeline stage)
    per_step         mean work of a rank / makespan
    per_microbatch   the same ratio if all ranks waited for each other after every microbatch
    share_of_packs   by cp size; packs of filler do not count
    share_of_tokens  by cp size
    """

    makespan_ns: int
    num_bytes: int
    num_microbatches: int
    per_step: float
    per_microbatch: float
    share_of_packs: dict[int, float]
    share_of_tokens: dict[int, float]


def predict(grid: Grid, lengths: np.ndarray, *, doc_multiple: int, cost: CpCost) -> Prediction:
    """One rank, one microbatch with a document of 6 tokens, 10 ns a token -> 60 ns, 1.0 per step, {1: 1.0} ..."""
    num_ranks, num_microbatches = len(grid), len(grid[0])
    ready = np.zeros(num_ranks, dtype=np.int64)
    work = np.zeros((num_ranks, num_microbatches), dtype=np.int64)
    num_bytes, packs, tokens = 0, Counter[int](), Counter[int]()
    for microbatch in range(num_microbatches):
        rank = 0
        while rank < num_ranks:
            size, samples = grid[rank][microbatch]
            of_group = slice(rank, rank + size)
            real = lengths[list(samples)]
            work[of_group, microbatch] = cost.times(real, doc_multiple, size).sum() + round(cost.microbatch_ns)
            ready[of_group] = ready[of_group].max() + work[rank, microbatch]
            if samples:
                packs[size] += 1
                tokens[size] += int(aligned(real, doc_multiple).sum())
                num_bytes += int(cost.num_bytes(real, doc_multiple, size).sum())
            rank += size
        if cost.wait_ranks > 1:
            domain = cost.domain(num_ranks)
            ready = np.repeat(ready.reshape(-1, domain).max(axis=1), domain)
    mean, makespan = work.sum() / num_ranks, int(ready.max())
    return Prediction(
        makespan_ns=makespan,
        num_bytes=num_bytes,
        num_microbatches=num_microbatches,
        per_step=float(mean / makespan) if makespan else 1.0,
        per_microbatch=float(mean / work.max(axis=0).sum()) if makespan else 1.0,
        share_of_packs=_shares(packs),
        share_of_tokens=_shares(tokens),
    )


def _shares(counts: Counter[int]) -> dict[int, float]:
    """{2: 1, 1: 3} -> {1: 0.75, 2: 0.25}"""
    return {size: counts[size] / counts.total() for size in sorted(counts)}


def bound(
    samples: Sequence[int],
    lengths: np.ndarray,
    *,
    num_ranks: int,
    cp: int,
    rank_tokens: int,
    doc_multiple: int,
    cost: CpCost,
) -> int:
    """Nanoseconds that no assignment goes below: the work of all documents, each on the smallest group that holds it,
    shared evenly by all ranks; or the longest document on cp ranks.  Either runs at least one microbatch, and as many
    as the tokens need."""
    documents = Documents.of(
        samples, lengths, cp_sizes(cp), rank_tokens=rank_tokens, doc_multiple=doc_multiple, cost=cost
    )
    if len(documents.ids) == 0:
        return round(cost.microbatch_ns)
    num_microbatches = -(-int(documents.units.sum()) // (num_ranks * documents.limit))
    work = -(-int(documents.work(documents.least).sum()) // num_ranks)
    return max(work, int(documents.times[-1].max())) + round(num_microbatches * cost.microbatch_ns)
