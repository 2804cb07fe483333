"""When each pack of a step begins and ends, by the costs of `cp_cost.py`.  Nothing is measured.

A group begins a pack when the last of its ranks is ready.  With pipelines or experts, all of `CpCost.wait_ranks`
consecutive ranks wait for each other after every microbatch.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sft.data.packing.cp_cost import CpCost
from sft.data.packing.cp_grid import Grid, Slot


class TimedPack(NamedTuple):
    """One pack of a grid on the ranks `rank`, ..., `rank` + `cp_size` - 1; without samples it is filler."""

    rank: int
    cp_size: int
    microbatch: int
    samples: tuple[int, ...]
    start_ns: int
    end_ns: int


def timeline(grid: Grid, lengths: np.ndarray, *, doc_multiple: int, cost: CpCost) -> list[TimedPack]:
    """Each pack once, microbatch by microbatch and in each by rank.

    Two ranks, 10 ns a token, cp sizes 1 and 1, then 2, documents of 3 and 1 tokens, then 4
    -> rank 0: 0 to 30 ns, rank 1: 0 to 10 ns, ranks 0 and 1: 30 to 50 ns
    """
    packs = [
        (microbatch, rank, slot)
        for microbatch, row in enumerate(zip(*grid, strict=True))
        for rank, slot in _groups(row)
    ]
    work = _work([slot for _, _, slot in packs], lengths, doc_multiple, cost)
    ready, domain = [0] * len(grid), cost.domain(len(grid)) if cost.wait_ranks > 1 else 1
    timed, current = list[TimedPack](), 0
    for (microbatch, rank, (size, samples)), work_ns in zip(packs, work.tolist(), strict=True):
        if microbatch > current and domain > 1:
            ready = [max(ready[rank - rank % domain :][:domain]) for rank in range(len(grid))]
        current = microbatch
        start = max(ready[rank : rank + size])
        ready[rank : rank + size] = [start + work_ns] * size
        timed.append(TimedPack(rank, size, microbatch, samples, start, start + work_ns))
    return timed


def makespan_ns(grid: Grid, lengths: np.ndarray, *, doc_multiple: int, cost: CpCost) -> int:
    """Time of the slowest rank, with its waits."""
    return max(pack.end_ns for pack in timeline(grid, lengths, doc_multiple=doc_multiple, cost=cost))


def _groups(row: Sequence[Slot]) -> Iterator[tuple[int, Slot]]:
    """The packs of a microbatch once, each with the first rank of its group."""
    rank = 0
    while rank < len(row):
        yield rank, row[rank]
        rank += row[rank].cp_size


def _work(packs: Sequence[Slot], lengths: np.ndarray, doc_multiple: int, cost: CpCost) -> np.ndarray:
    """int64 [packs]: nanoseconds of each pack."""
    work = np.full(len(packs), round(cost.microbatch_ns), dtype=np.int64)
    for size in {slot.cp_size for slot in packs}:
        of_size = [k for k, slot in enumerate(packs) if slot.cp_size == size]
        ids = np.array([i for k in of_size for i in packs[k].samples], dtype=np.int64)
        pack_of = np.repeat(of_size, [len(packs[k].samples) for k in of_size])
        np.add.at(work, pack_of, cost.times(lengths[ids], doc_multiple, size))
    return work
