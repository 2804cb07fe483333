"""Assigns the samples of a global batch to the ranks of the dp x cp grid, with a CP size for each pack.

A pack of size s is on a group of s consecutive ranks (`sft/parallel/cp_group.py`) and holds at most s * rank_tokens
padded tokens.  All ranks have the same number of microbatches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sft.data.packing.cp_cost import CpCost
from sft.parallel.alignment import aligned
from sft.parallel.cp_group import cp_sizes


class Slot(NamedTuple):
    """A pack on each rank of its group.  samples: ids in the order of the pack; (): the pack is filler"""

    cp_size: int
    samples: tuple[int, ...]


Grid = list[list[Slot]]  # by rank of the dp x cp grid (dp_rank * cp + cp_rank) and microbatch


def assign(
    samples: Sequence[int],
    lengths: np.ndarray,
    *,
    dp: int,
    cp: int,
    rank_tokens: int,
    doc_multiple: int,
    cost: CpCost,
    microbatch_multiple: int = 1,
) -> Grid:
    """First fit by falling length: each sample goes to the smallest group that holds it.

    lengths: int64 of all samples of the data; rank_tokens: capacity of a rank in a microbatch
    microbatch_multiple: the number of microbatches is a multiple of this
    """
    packs: list[tuple[int, list[int]]] = []  # CP size, samples
    free: list[int] = []
    for i in sorted(samples, key=lambda i: (-int(lengths[i]), i)):
        tokens = int(aligned(int(lengths[i]), doc_multiple))
        size = next(size for size in cp_sizes(cp) if tokens <= size * rank_tokens)
        fitting = (k for k, (cp_size, _) in enumerate(packs) if cp_size == size and tokens <= free[k])
        k = next(fitting, len(packs))
        if k == len(packs):
            packs.append((size, []))
            free.append(size * rank_tokens)
        packs[k][1].append(i)
        free[k] -= tokens
    microbatches: list[list[Slot | None]] = []
    for size, ids in packs:
        first, slots = _free_group(microbatches, size, dp * cp)
        slots[first : first + size] = [Slot(size, tuple(ids))] * size
    while not microbatches or len(microbatches) % microbatch_multiple:
        microbatches.append([None] * (dp * cp))
    return [[slots[rank] or Slot(1, ()) for slots in microbatches] for rank in range(dp * cp)]


def _free_group(microbatches: list[list[Slot | None]], size: int, ranks: int) -> tuple[int, list[Slot | None]]:
    """The first free group of this size, in a new microbatch if none is free."""
    for slots in microbatches:
        for first in range(0, ranks, size):
            if not any(slots[first : first + size]):
                return first, slots
    microbatches.append([None] * ranks)
    return 0, microbatches[-1]
