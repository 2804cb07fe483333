"""Defines the grid of a step (its packs by rank of the dp x cp grid and microbatch), and predicts the step's time.

`dynamic_cp.py` makes grids, and `cp_cost.py` predicts the time of a document.  This module computes when each pack
begins and ends, the balance of the ranks, the bytes over cp, and the shares of CP sizes.  A group begins a pack when
all its ranks are ready.  With pipelines, experts or shards, `CpCost.wait_ranks` consecutive ranks wait for each other
after every microbatch.  Nothing is measured.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from sft.data.packing.balance import Slots
from sft.data.packing.cp_cost import CpCost
from sft.parallel.shapes import SampleSizes, padded


class Slot(NamedTuple):
    """One pack: the size of its group, and the ids of its samples in order; without samples, it is a pack of filler."""

    cp_size: int
    samples: tuple[int, ...]


Grid = list[list[Slot]]  # by rank of the dp x cp grid (dp_rank * cp + cp_rank), then microbatch
FILLER = Slot(1, ())


def fixed(slots: Slots, cp: int) -> Grid:
    """The grid of a fixed cp, from the packs of each data-parallel rank (`balance.assign`)."""
    return [[Slot(cp, tuple(pack)) for pack in packs] for packs in slots for _ in range(cp)]


class TimedPack(NamedTuple):
    """One pack of a grid on the ranks `rank`, ..., `rank` + `cp_size` - 1; without samples it is filler."""

    rank: int
    cp_size: int
    microbatch: int
    samples: tuple[int, ...]
    start_ns: int
    end_ns: int


def timeline(grid: Grid, lengths: SampleSizes, cost: CpCost) -> list[TimedPack]:
    """When each pack of a grid begins and ends, in order of microbatch, then rank.  A pack on several ranks occurs
    once.

    Two ranks, 10 ns a token.  Microbatch 0: a document of 3 tokens on rank 0, one of 1 token on rank 1.  Microbatch 1:
    one of 4 tokens on both ranks -> rank 0: 0 to 30 ns, rank 1: 0 to 10 ns, ranks 0 and 1: 30 to 50 ns
    """
    packs = [
        (microbatch, rank, slot)
        for microbatch, row in enumerate(zip(*grid, strict=True))
        for rank, slot in _groups(row)
    ]
    work = _work([slot for _, _, slot in packs], lengths, cost)
    ready, domain = [0] * len(grid), cost.domain(len(grid))
    timed, current = list[TimedPack](), 0
    for (microbatch, rank, (size, samples)), work_ns in zip(packs, work.tolist(), strict=True):
        if microbatch > current and domain > 1:
            starts = range(0, len(grid), domain)
            ready = [latest for first in starts for latest in [max(ready[first : first + domain])] * domain]
        current = microbatch
        start = max(ready[rank : rank + size])
        ready[rank : rank + size] = [start + work_ns] * size
        timed.append(TimedPack(rank, size, microbatch, samples, start, start + work_ns))
    return timed


def _groups(row: Sequence[Slot]) -> Iterator[tuple[int, Slot]]:
    """Yields each pack of a microbatch once, with the first rank of its group.  row: the slots of all ranks"""
    rank = 0
    while rank < len(row):
        yield rank, row[rank]
        rank += row[rank].cp_size


def _work(packs: Sequence[Slot], lengths: SampleSizes, cost: CpCost) -> np.ndarray:
    """int64 [packs]: nanoseconds that each pack takes."""
    work = np.full(len(packs), round(cost.microbatch_ns), dtype=np.int64)
    for size in {slot.cp_size for slot in packs}:
        of_size = [k for k, slot in enumerate(packs) if slot.cp_size == size]
        ids = np.fromiter(chain.from_iterable(packs[k].samples for k in of_size), dtype=np.int64)
        pack_of = np.repeat(of_size, [len(packs[k].samples) for k in of_size])
        np.add.at(work, pack_of, cost.times(lengths[ids], size))
    return work


def makespan_ns(grid: Grid, lengths: SampleSizes, cost: CpCost) -> int:
    """Nanoseconds until the last rank finishes the step."""
    return max(pack.end_ns for pack in timeline(grid, lengths, cost))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction of one step.

    makespan_ns      nanoseconds until the last rank finishes
    num_bytes        bytes over cp that all ranks of the grid receive, for one rank of tp and the mean pipeline stage
    per_step         efficiency: mean work of a rank / makespan
    per_microbatch   efficiency if all ranks waited for each other after every microbatch
    share_of_packs   share of the packs with each CP size, without packs of filler
    share_of_tokens  share of the padded tokens in packs with each CP size, without filler
    """

    makespan_ns: int
    num_bytes: int
    num_microbatches: int
    per_step: float
    per_microbatch: float
    share_of_packs: dict[int, float]
    share_of_tokens: dict[int, float]


def predict(grid: Grid, lengths: SampleSizes, cost: CpCost) -> Prediction:
    """Predicts the time, bytes, balance and CP sizes of a step.

    one rank, one microbatch with a document of 6 tokens, 10 ns a token -> 60 ns, 1.0 per step, {1: 1.0} ...
    """
    num_ranks, num_microbatches = len(grid), len(grid[0])
    work = np.zeros((num_ranks, num_microbatches), dtype=np.int64)
    samples: dict[int, list[int]] = {}
    packs, makespan = Counter[int](), 0
    for pack in timeline(grid, lengths, cost):
        work[pack.rank : pack.rank + pack.cp_size, pack.microbatch] = pack.end_ns - pack.start_ns
        makespan = max(makespan, pack.end_ns)
        if pack.samples:
            packs[pack.cp_size] += 1
            samples.setdefault(pack.cp_size, []).extend(pack.samples)
    real = {size: lengths[ids] for size, ids in samples.items()}
    mean = work.sum() / num_ranks
    return Prediction(
        makespan_ns=makespan,
        num_bytes=sum(
            int(cost.num_bytes(padded(real[size], cost.doc_multiple), cost.doc_multiple, size).sum()) for size in real
        ),
        num_microbatches=num_microbatches,
        per_step=float(mean / makespan) if makespan else 1.0,
        per_microbatch=float(mean / work.max(axis=0).sum()) if makespan else 1.0,
        share_of_packs=_shares(packs),
        share_of_tokens=_shares(Counter({size: int(padded(real[size], cost.doc_multiple).sum()) for size in real})),
    )


def _shares(counts: Counter[int]) -> dict[int, float]:
    """The share of each CP size in the sum of all counts: {2: 1, 1: 3} -> {1: 0.75, 2: 0.25}"""
    return {size: counts[size] / counts.total() for size in sorted(counts)}
