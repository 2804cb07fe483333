"""Short documents in bins: results by hand, and thousands of documents in rounds, compared with one heap for all
documents."""

import heapq

import numpy as np

from sft.data.packing import cp_fill
from sft.data.packing.cp_cost import CpCost, Documents

ROOM = 1 << 40


def of_lengths(lengths: np.ndarray) -> Documents:
    """Documents for groups of one or two ranks; a token takes 2 ns on one rank, and 1 ns on each of two ranks."""
    return Documents.of(range(len(lengths)), lengths, (1, 2), rank_tokens=1000, cost=CpCost(token_ns=2.0))


def filled(
    lengths: list[int], load: list[int], left: list[int], levels: list[int], extra: int = 0
) -> tuple[list[int], list[int], list[int]]:
    loads, lefts = np.array(load), np.array(left)
    numbers = np.arange(len(lengths))
    bins = cp_fill.fill(of_lengths(np.array(lengths)), numbers, loads, lefts, np.array(levels), extra)
    return bins.tolist(), loads.tolist(), lefts.tolist()


def test_by_hand() -> None:
    assert filled([5, 4, 3, 3], [0, 4], [20, 20], [0, 0]) == ([0, 1, 0, 1], [16, 18], [12, 13])
    # A document on a group of two ranks takes half the time.  A bin whose room is too small gets a later, shorter
    # document.
    assert filled([6, 4, 2], [0, 0], [20, 20], [1, 0]) == ([0, 1, 0], [8, 8], [12, 16])
    assert filled([6, 4, 2], [0, 9], [3, 12], [0, 0]) == ([1, 1, 0], [4, 29], [1, 2])
    # If no bin has room: no bin, or with `extra` the bin with most room.
    assert filled([6, 4], [0, 9], [3, 5], [0, 0]) == ([-1, 1], [0, 17], [3, 1])
    assert filled([6, 4], [0, 9], [3, 5], [0, 0], extra=10) == ([1, 1], [0, 29], [3, 5])


def test_a_round_gives_each_bin_one_document_before_any_gets_two() -> None:
    load, left, times = np.array([9, 1, 4, 0, 5, 2]), np.array([9, 9, 9, 9, 9, 2]), np.full(6, 5)
    assert cp_fill._round(load, left, 3, times).tolist() == [3, 1, 2]


def test_rounds_are_as_even_as_a_heap_and_keep_within_room() -> None:
    random = np.random.default_rng(0)
    lengths = np.sort(np.clip(random.lognormal(3.0, 1.0, 20_000), 1, 900).astype(np.int64))[::-1]
    load, left = random.integers(0, 6_000, 700), random.integers(500, 4_000, 700)
    levels, documents = random.integers(0, 2, 700), of_lengths(lengths)
    loads, lefts = load.copy(), left.copy()
    bins = cp_fill.fill(documents, np.arange(20_000), loads, lefts, levels, 0)
    assert (lefts >= 0).all()
    assert lefts.tolist() == (left - np.bincount(bins[bins >= 0], lengths[bins >= 0], 700)).tolist()
    times = np.where(levels[bins] == 0, 2 * lengths, lengths)  # all are even, so halves are exact
    assert loads.tolist() == (load + np.bincount(bins[bins >= 0], times[bins >= 0], 700)).tolist()
    # The rounds place as much work as one heap for all documents, up to half a document per bin.
    least, room, placed = [(int(work), k) for k, work in enumerate(load)], left.tolist(), 0
    heapq.heapify(least)
    for length in lengths.tolist():
        skipped = []
        while least and room[least[0][1]] < length:
            skipped.append(heapq.heappop(least))
        if least:
            work, k = least[0]
            heapq.heapreplace(least, (work + length * (2 - int(levels[k])), k))
            room[k] -= length
            placed += length
        for item in skipped:
            heapq.heappush(least, item)
    assert abs(placed - int(lengths[bins >= 0].sum())) < 0.002 * placed


def test_rounds_level_many_documents() -> None:
    """10,000 documents of 99 to 1 tokens in 500 bins: the work of bins differs by at most the last documents of all
    bins."""
    lengths = np.sort(np.random.default_rng(1).integers(1, 100, 10_000))[::-1]
    load, left = np.arange(500), np.full(500, ROOM)
    bins = cp_fill.fill(of_lengths(lengths), np.arange(10_000), load, left, np.zeros(500, dtype=np.int64), 0)
    assert (bins >= 0).all()
    assert load.sum() == np.arange(500).sum() + 2 * lengths.sum()
    assert lengths[-500] == 6
    assert load.max() - load.min() <= 2 * 6
