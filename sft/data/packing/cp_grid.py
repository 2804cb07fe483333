"""The packs of a step by rank of the dp x cp grid and microbatch, each with a CP size of its own.

Decides nothing: `dynamic_cp.py` makes grids, `cp_prediction.py` predicts their times.
"""

from typing import NamedTuple

from sft.data.packing.balance import Slots


class Slot(NamedTuple):
    """One pack: the size of its group, and its samples in order; () is a pack of filler."""

    cp_size: int
    samples: tuple[int, ...]


Grid = list[list[Slot]]  # by rank of the dp x cp grid (dp_rank * cp + cp_rank), then microbatch
FILLER = Slot(1, ())


def fixed(slots: Slots, cp: int) -> Grid:
    """The grid of a fixed cp, from the packs of each data-parallel rank (`balance.assign`)."""
    return [[Slot(cp, tuple(pack)) for pack in packs] for packs in slots for _ in range(cp)]
