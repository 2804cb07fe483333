"""Predicts a step by its grid of packs: time, balance, bytes over cp, shares of cp sizes.  Nothing is measured.

`cp_timeline.py` decides when each pack begins and ends.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sft.data.packing.cp_cost import CpCost
from sft.data.packing.cp_documents import Documents
from sft.data.packing.cp_grid import Grid
from sft.data.packing.cp_timeline import timeline
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
    work = np.zeros((num_ranks, num_microbatches), dtype=np.int64)
    samples: dict[int, list[int]] = {}
    packs, makespan = Counter[int](), 0
    for pack in timeline(grid, lengths, doc_multiple=doc_multiple, cost=cost):
        work[pack.rank : pack.rank + pack.cp_size, pack.microbatch] = pack.end_ns - pack.start_ns
        makespan = max(makespan, pack.end_ns)
        if pack.samples:
            packs[pack.cp_size] += 1
            samples.setdefault(pack.cp_size, []).extend(pack.samples)
    real = {size: lengths[ids] for size, ids in samples.items()}
    mean = work.sum() / num_ranks
    return Prediction(
        makespan_ns=makespan,
        num_bytes=sum(int(cost.num_bytes(real[size], doc_multiple, size).sum()) for size in real),
        num_microbatches=num_microbatches,
        per_step=float(mean / makespan) if makespan else 1.0,
        per_microbatch=float(mean / work.max(axis=0).sum()) if makespan else 1.0,
        share_of_packs=_shares(packs),
        share_of_tokens=_shares(Counter({size: int(aligned(real[size], doc_multiple).sum()) for size in real})),
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
    """Nanoseconds that no assignment goes below (`Documents.bound_ns`)."""
    documents = Documents.of(
        samples, lengths, cp_sizes(cp), rank_tokens=rank_tokens, doc_multiple=doc_multiple, cost=cost
    )
    return documents.bound_ns(num_ranks, cost.microbatch_ns)
