"""Places documents on groups of ranks, so that all ranks have about equal work in a step.

The documents of the largest groups are placed first.  Within a size, the document with the most work comes first.  Each
goes to the group whose ranks have the least work so far.  Then every group splits into groups of the next smaller size,
whose ranks keep the work that they have.  At the end, documents on single ranks even out the remaining differences.

    cp 4, 8 tokens a rank; documents of 32 tokens on four ranks, 16 and 12 on two each, and 3 3 1 1 on one each

    rank 0  8 + 8 + 1        rank 1  8 + 8 + 1        rank 2  8 + 6 + 3        rank 3  8 + 6 + 3

A document takes the smallest group that holds it, because this sends the fewest bytes.  It takes a larger one if it
would need too much of the step's time there (`CHOICES`).

Each rank computes at most num_microbatches packs.  With more microbatches, work can be balanced better, but each
microbatch takes `microbatch_ns`.  To choose their number, the work of documents on single ranks is treated as a fluid
that fills all ranks to an equal level of work, as far as each rank has room (`_water_level`).
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sft.data.packing.cp_cost import Documents
from sft.data.packing.cp_fill import fill

Packs = list[list[int]]  # numbers of documents, by pack
# Pairs (share, few) that determine the size of each document's group (`sizes_of`), tried in this order.  A document
# that takes more than `share` of a rank's mean work goes to a larger group.  If a size has fewer documents than `few`
# for each of its groups, they cannot be balanced and go to the next larger size.  The first pair sends the fewest
# bytes.  A later pair replaces it only if the step becomes shorter by the share BETTER.  No further pair is tried once
# the step is within the share BETTER of the bound.
CHOICES, BETTER = ((1.0, 0), (0.5, 2), (0.25, 4)), 0.01
FILL = 0.97  # share of a rank's capacity in tokens that short documents are expected to fill
MAX_MICROBATCHES = 8  # how many numbers of microbatches are tried
# Swaps end if the largest work exceeds the mean by at most the share LEVEL, or after MAX_SWAPS.
LEVEL, MAX_SWAPS = 0.002, 40


def packs_of_groups(documents: Documents, num_ranks: int, multiple: int) -> Iterator[tuple[int, list[Packs]]]:
    """Assigns documents to groups of ranks.  Yields (size of groups, packs of each group in order), the largest size
    first.

    multiple  the number of microbatches is planned as a multiple of this
    """
    best: Ranks | None = None
    enough_ns = documents.bound_ns(num_ranks) * (1 + BETTER)
    for share, few in CHOICES:
        index = sizes_of(documents, num_ranks, share, few)
        if best is not None and documents.even_ns(index, num_ranks) >= best.predicted * (1 - BETTER):
            continue
        ranks = Ranks(documents, num_ranks)
        ranks.add_groups(index)
        ranks.swap(1)
        ranks.choose_microbatches(multiple)
        ranks.finish()
        if best is None or ranks.predicted < best.predicted * (1 - BETTER):
            best = ranks
        if best.predicted <= enough_ns:
            break
    assert best is not None
    for level in reversed(range(len(documents.sizes))):
        yield documents.sizes[level], [best.packed(level, block) for block in range(len(best.blocks[level]))]


def sizes_of(documents: Documents, num_ranks: int, share: float, few: int) -> np.ndarray:
    """int64 [n]: for each document, the index in documents.sizes of the size of its group.

    share, few: `CHOICES` describes them
    """
    index, last = documents.least.copy(), len(documents.sizes) - 1
    numbers = np.arange(len(index))
    for level, size in enumerate(documents.sizes[:-1]):
        most = documents.work(index).sum() / num_ranks * share
        index += (documents.times[index, numbers] > most) & (index < last)
        of_level = index == level
        if of_level.sum() < few * (num_ranks // size):
            index[of_level] = level + 1
    return index


@dataclass
class Ranks:
    """The ranks of the grid while documents are placed.

    blocks     blocks[level][k]: documents of group k of the size documents.sizes[level]
    load       int64 [num_ranks]: work of each rank so far, in ns
    singles    int64: documents on groups of one rank
    num_packs  int64 [num_ranks]: for each rank, the number of packs that it shares with other ranks
    predicted  predicted time of the step, in ns
    """

    documents: Documents
    num_ranks: int

    def __post_init__(self) -> None:
        sizes = self.documents.sizes
        self.blocks: list[Packs] = [[[] for _ in range(self.num_ranks // size)] for size in sizes]
        self.load = np.zeros(self.num_ranks, dtype=np.int64)
        self.num_packs = np.zeros(self.num_ranks, dtype=np.int64)
        self.num_microbatches = 0
        self.predicted = 0.0
        self._units: list[int] = self.documents.units.tolist()
        # By level, three arrays: the documents of all groups, with -1 after each group; and for each entry its group
        # and its time.
        self._others: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def add_groups(self, index: np.ndarray) -> None:
        """Places all documents whose group has more than one rank.  index: the result of `sizes_of`"""
        self.index, self.singles = index, np.flatnonzero(index == 0)
        for level in range(len(self.documents.sizes) - 1, 0, -1):
            size, times, blocks = self.documents.sizes[level], self.documents.times[level], self.blocks[level]
            numbers = self._costliest_first(np.flatnonzero(index == level), level)
            load = self.load[::size].tolist()  # all ranks of a group have the same work so far
            least = [(work, block) for block, work in enumerate(load)]
            heapq.heapify(least)
            for number, time in zip(numbers.tolist(), times[numbers].tolist()):
                work, block = least[0]
                blocks[block].append(number)
                heapq.heapreplace(least, (work + time, block))
            for work, block in least:
                load[block] = work
            self.load = np.repeat(np.array(load, dtype=np.int64), size)

    def _costliest_first(self, numbers: np.ndarray, level: int) -> np.ndarray:
        return numbers[np.argsort(-self.documents.times[level][numbers], kind="stable")]

    def finish(self) -> None:
        """Places each document that needs one rank on the rank with the least work among those with room.  Then
        predicts the time of the step."""
        numbers = self._costliest_first(self.singles, 0)
        left = ((self.num_microbatches - self.num_packs) * self.documents.limit * FILL).astype(np.int64)
        levels = np.zeros(self.num_ranks, dtype=np.int64)
        rank_of = fill(self.documents, numbers, self.load, left, levels, self.documents.limit)
        for number, rank in zip(numbers.tolist(), rank_of.tolist()):
            self.blocks[0][rank].append(number)
        self.swap(0)
        of_singles = [len(self.packed(0, rank)) for rank in range(self.num_ranks)]
        num_microbatches = int((self.num_packs + of_singles).max())
        self.predicted = int(self.load.max()) + num_microbatches * self.documents.microbatch_ns

    def swap(self, first_level: int) -> None:
        """Swaps documents of the costliest rank's groups for cheaper ones, until the work of all ranks is about even.

        first_level: index in documents.sizes; groups of smaller sizes keep their documents
        """
        total = self.documents.work(self.index).sum()
        self._others.clear()
        for _ in range(MAX_SWAPS):
            most, mean = int(self.load.max()), total / self.num_ranks
            if most <= mean * (1 + LEVEL):
                return
            swaps = [self._best_swap(level) for level in range(first_level, len(self.documents.sizes))]
            gain, level, document, block, other = max(swaps)
            if gain <= mean * LEVEL / 2:
                return
            self._swap(level, document, block, other)

    def _best_swap(self, level: int) -> tuple[int, int, int, int, int]:
        """The best swap of a document of the costliest rank's group: (gain in ns, level, document, other group,
        document that the other group gives in exchange, or -1 for none)."""
        size, times, blocks = self.documents.sizes[level], self.documents.times[level], self.blocks[level]
        first = int(self.load.argmax()) // size
        most = self.load.reshape(-1, size).max(axis=1)
        if not blocks[first]:
            return 0, level, -1, -1, -1
        if level not in self._others:
            others = np.array([number for numbers in blocks for number in [*numbers, -1]])
            of_block = np.repeat(np.arange(len(blocks)), [len(numbers) + 1 for numbers in blocks])
            self._others[level] = others, of_block, np.where(others >= 0, times[others], 0)
        others, of_block, less = self._others[level]
        moved = np.subtract.outer(times[blocks[first]], less)
        gain = np.minimum(moved, most[first] - most[of_block] - moved)
        own, other = np.unravel_index(int(gain.argmax()), gain.shape)
        return int(gain[own, other]), level, blocks[first][own], int(of_block[other]), int(others[other])

    def _swap(self, level: int, document: int, block: int, other: int) -> None:
        size, times, blocks = self.documents.sizes[level], self.documents.times[level], self.blocks[level]
        first = next(k for k, numbers in enumerate(blocks) if document in numbers)
        blocks[first].remove(document)
        blocks[block].append(document)
        moved = int(times[document])
        if other >= 0:
            blocks[block].remove(other)
            blocks[first].append(other)
            moved -= int(times[other])
            others, of_block, less = self._others[level]
            for k in (first, block):  # both groups have as many documents as before
                start = int(np.searchsorted(of_block, k))
                now = slice(start, start + len(blocks[k]))
                others[now], less[now] = blocks[k], times[blocks[k]]
        else:
            del self._others[level]
        self.load[first * size : (first + 1) * size] -= moved
        self.load[block * size : (block + 1) * size] += moved

    def choose_microbatches(self, multiple: int) -> None:
        """Chooses the number of microbatches with the shortest predicted step: a multiple of `multiple`."""
        for level in range(1, len(self.documents.sizes)):
            size = self.documents.sizes[level]
            counts = [len(self.packed(level, block)) for block in range(len(self.blocks[level]))]
            self.num_packs += np.repeat(np.array(counts, dtype=np.int64), size)
        units = int(self.documents.units[self.singles].sum())
        work = int(self.documents.times[0][self.singles].sum())
        limit = self.documents.limit * FILL
        most, total = int(self.num_packs.max()), int(self.num_packs.sum()) + units / limit
        first = max(1, most, int(-(-total // self.num_ranks)))
        first += -first % multiple
        for number in range(first, first + MAX_MICROBATCHES * multiple, multiple):
            capacity = (number - self.num_packs) * limit * (work / max(1, units))
            level_ns = max(_water_level(self.load, capacity, work), float(self.load.max()))
            predicted = level_ns + number * self.documents.microbatch_ns
            if not self.num_microbatches or predicted < self.predicted:
                self.num_microbatches, self.predicted = number, predicted

    def packed(self, level: int, block: int) -> Packs:
        """The packs of a group.  Each document, longest first, goes into the first pack with room."""
        limit, units, numbers = (
            self.documents.limit * self.documents.sizes[level],
            self._units,
            self.blocks[level][block],
        )
        if numbers and sum([units[number] for number in numbers]) <= limit:
            return [sorted(numbers)]
        packs: Packs = []
        left: list[int] = []
        for number in sorted(numbers):
            size = units[number]
            for pack, free in enumerate(left):
                if free >= size:
                    break
            else:
                pack = len(packs)
                packs.append([])
                left.append(limit)
            packs[pack].append(number)
            left[pack] -= size
        return packs


def _water_level(load: np.ndarray, capacity: np.ndarray, work: int) -> float:
    """The level of work, in ns, that ranks reach if `work` is poured over them like a fluid.

    load      int64 [ranks]: the work that each rank has already
    capacity  [ranks]: the most further work that each rank takes
    Infinite if all ranks together cannot take the work.

    load 4 0, capacity 9 9, work 6 -> 5        load 4 0, capacity 9 3, work 6 -> 7
    """
    if capacity.sum() < work:
        return float("inf")
    low, high = 0.0, float((load + capacity).max())
    for _ in range(40):
        middle = (low + high) / 2
        poured = np.minimum(np.maximum(middle - load, 0.0), capacity).sum()
        low, high = (low, middle) if poured >= work else (middle, high)
    return high
