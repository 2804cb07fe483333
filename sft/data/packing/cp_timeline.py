"""When each pack of a step begins and ends, by the costs of `cp_cost.py`.  Nothing is measured.

A group begins a pack when the last of its ranks is ready.  With pipelines or experts, all of `CpCost.wait_ranks`
consecutive ranks wait for each other after every microbatch.
"""

from typing import NamedTuple

import numpy as np

from sft.data.packing.cp_cost import CpCost
from sft.data.packing.dynamic_cp import Grid


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
    ready = np.zeros(len(grid), dtype=np.int64)
    packs = list[TimedPack]()
    for microbatch in range(len(grid[0])):
        rank = 0
        while rank < len(grid):
            size, samples = grid[rank][microbatch]
            of_group = slice(rank, rank + size)
            work = int(cost.times(lengths[list(samples)], doc_multiple, size).sum()) + round(cost.microbatch_ns)
            start = int(ready[of_group].max())
            ready[of_group] = start + work
            packs.append(TimedPack(rank, size, microbatch, samples, start, start + work))
            rank += size
        if cost.wait_ranks > 1:
            domain = cost.domain(len(grid))
            ready = np.repeat(ready.reshape(-1, domain).max(axis=1), domain)
    return packs
