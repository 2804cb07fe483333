"""Exchanges of short documents between packs of a row: by hand, and against all assignments."""

from itertools import product

import numpy as np
import pytest

from sft.data.packing.cp_cost import CpCost, Documents
from sft.data.packing.cp_swaps import FilledPacks, relieve_rows

NEAR_BEST = 1.06  # exchanges of two documents do not find every better assignment; the worst of these takes 1.05


def exchanged(
    lengths: list[int], bins: list[int], loads: list[int], rooms: list[int], row: list[int], rows: int
) -> tuple[list[int], FilledPacks]:
    """The pack of each document.  A token takes 1 ns; loads, rooms: of each pack without these documents"""
    documents = Documents.of(range(len(lengths)), np.array(lengths), (1,), rank_tokens=1000, cost=CpCost(token_ns=1.0))
    own = np.bincount(bins, lengths, len(loads)).astype(np.int64)
    packs = FilledPacks(
        row=np.array(row), level=np.zeros(len(row), dtype=np.int64), load=loads + own, left=np.array(rooms) - own
    )
    return relieve_rows(documents, packs, np.arange(len(lengths)), np.array(bins), rows).tolist(), packs


def test_by_hand() -> None:
    # 9 + 3 and 4 + 2: with room for 7 tokens in the second pack, 3 and 2 change places; with more, 3 moves there.
    assert exchanged([9, 4, 3, 2], [0, 1, 0, 1], [0, 0], [20, 7], [0, 0], 1)[0] == [0, 1, 1, 0]
    assert exchanged([9, 4, 3, 2], [0, 1, 0, 1], [0, 0], [20, 9], [0, 0], 1)[0] == [0, 1, 1, 1]
    # A document moves into a pack that has room, and not into one without.
    found, packs = exchanged([5, 4], [0, 0], [0, 0, 0], [9, 3, 9], [0, 0, 0], 1)
    assert found == [2, 0] and packs.load.tolist() == [4, 0, 5] and packs.left.tolist() == [5, 3, 4]
    # Not into a pack of another row, and not if a row is as slow without short documents.
    assert exchanged([5, 4], [0, 0], [0, 0], [9, 9], [0, 1], 2)[0] == [0, 0]
    assert exchanged([5, 4], [1, 1], [20, 0, 0], [9, 9, 9], [0, 0, 0], 1)[0] == [1, 1]


@pytest.mark.parametrize("seed", range(8))
def test_near_the_best_assignment_of_a_row(seed: int) -> None:
    """Seven documents in three packs, all at first in packs by turns, against all 3^7 assignments within room."""
    random = np.random.default_rng(seed)
    lengths = sorted(random.integers(3, 30, 7).tolist(), reverse=True)
    loads, rooms, bins = random.integers(0, 20, 3).tolist(), random.integers(80, 95, 3).tolist(), [0, 1, 2, 0, 1, 2, 0]
    found, packs = exchanged(lengths, bins, loads, rooms, [0, 0, 0], 1)
    used = np.bincount(found, lengths, 3)
    assert (packs.load == loads + used).all() and (packs.left == rooms - used).all() and (packs.left >= 0).all()
    best = min(
        max(loads + np.bincount(chosen, lengths, 3))
        for chosen in product(range(3), repeat=7)
        if (np.bincount(chosen, lengths, 3) <= rooms).all()
    )
    assert packs.load.max() <= NEAR_BEST * best
