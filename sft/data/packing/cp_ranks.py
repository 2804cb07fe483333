"""Places documents on groups of ranks, so that all ranks have the same work in a step.

Large groups are placed first.  Each document goes to the group whose ranks have the least work so far, the document
with the most work first; then every group splits into the groups of the next smaller size, which inherit its work.  At
the end, documents of one rank even out what is left.

    32 tokens on four ranks, 16 and 12 on two each, and 4 2 2 2 on one; cp 4, 8 tokens a rank

    rank 0  8 + 8 + 2        rank 1  8 + 8 + 2        rank 2  8 + 6 + 4        rank 3  8 + 6 + 2

A document takes the smallest group that holds it, which sends the fewest bytes, unless it would take longer there than
the whole step should take.

Each rank computes at most num_microbatches packs.  More microbatches leave more room to balance, but each takes
`microbatch_ns`.  A fluid takes the place of the short documents to choose the number: it rises in the ranks to an equal
level, as far as each has room.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sft.data.packing.cp_documents import Documents

Packs = list[list[int]]  # numbers of documents, by pack
# A document may take these shares of the mean work of a rank on the smallest group that holds it.  Smaller shares give
# groups that are easier to balance, but send more bytes; they are chosen if the step becomes shorter by BETTER.
SHARES, BETTER = (1.0, 0.5, 0.25), 0.005
FILL = 0.97  # share of a rank's tokens that short documents are expected to fill
MAX_MICROBATCHES = 8  # numbers of microbatches that are tried
LEVEL = 0.002  # groups are not balanced further if the largest work of a rank is within this share of the mean
MAX_SWAPS, NUM_PARTNERS = 200, 8  # swaps of a batch, and groups that the costliest group tries to swap with


def packs_of_groups(
    documents: Documents, num_ranks: int, microbatch_ns: float, multiple: int
) -> Iterator[tuple[int, list[Packs]]]:
    """The packs of every group: (size, packs of each group in order), sizes falling."""
    grouped: _Ranks | None = None
    for share in SHARES:
        ranks = _Ranks(documents, num_ranks)
        ranks.add_groups(_sizes(documents, num_ranks, share))
        ranks.choose_microbatches(microbatch_ns, multiple)
        if grouped is None or ranks.predicted < grouped.predicted * (1 - BETTER):
            grouped = ranks
    assert grouped is not None
    grouped.add_singles()
    for index in reversed(range(len(documents.sizes))):
        yield documents.sizes[index], [grouped.packed(index, block) for block in range(len(grouped.blocks[index]))]


def _sizes(documents: Documents, num_ranks: int, share: float) -> np.ndarray:
    """int64 [n]: index of the size of each document's group."""
    index = documents.least.copy()
    numbers = np.arange(len(index))
    for _ in documents.sizes[1:]:
        most = documents.work(index).sum() / num_ranks * share
        index += (documents.times[index, numbers] > most) & (index < len(documents.sizes) - 1)
    return index


@dataclass
class _Ranks:
    """The ranks of the grid while documents are placed.

    blocks     documents of each group, by index of its size
    load       int64 [num_ranks]: nanoseconds
    num_packs  int64 [num_ranks]: packs on groups of more than one rank
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

    def add_groups(self, index: np.ndarray) -> None:
        """Places all documents on groups of more than one rank.  index: of the size of each document's group"""
        self._singles = np.flatnonzero(index == 0)
        for level in range(len(self.documents.sizes) - 1, 0, -1):
            size = self.documents.sizes[level]
            numbers = self._costliest_first(np.flatnonzero(index == level), level)
            load = self.load[::size].tolist()  # ranks of a group have run the same packs so far
            self._add(numbers, level, load)
            self.load = np.repeat(np.array(load, dtype=np.int64), size)

    def _costliest_first(self, numbers: np.ndarray, level: int) -> np.ndarray:
        return numbers[np.argsort(-self.documents.times[level][numbers], kind="stable")]

    def _add(self, numbers: np.ndarray, level: int, load: list[int]) -> None:
        """Each document to the group with the least work."""
        least = [(work, block) for block, work in enumerate(load)]
        heapq.heapify(least)
        blocks = self.blocks[level]
        for number, time in zip(numbers.tolist(), self.documents.times[level][numbers].tolist()):
            work, block = least[0]
            blocks[block].append(number)
            heapq.heapreplace(least, (work + time, block))
        for work, block in least:
            load[block] = work

    def choose_microbatches(self, microbatch_ns: float, multiple: int) -> None:
        """Chooses the number of microbatches, and predicts the time of the step with it."""
        for level in range(1, len(self.documents.sizes)):
            size = self.documents.sizes[level]
            counts = [len(self.packed(level, block)) for block in range(len(self.blocks[level]))]
            self.num_packs += np.repeat(np.array(counts, dtype=np.int64), size)
        units = int(self.documents.units[self._singles].sum())
        work = int(self.documents.times[0][self._singles].sum())
        limit = self.documents.limit * FILL
        most, total = int(self.num_packs.max()), int(self.num_packs.sum()) + units / limit
        first = max(1, most, int(-(-total // self.num_ranks)))
        first += -first % multiple
        for number in range(first, first + MAX_MICROBATCHES * multiple, multiple):
            capacity = (number - self.num_packs) * limit * (work / max(1, units))
            level_ns = max(_water_level(self.load, capacity, work), float(self.load.max()))
            predicted = level_ns + number * microbatch_ns
            if not self.num_microbatches or predicted < self.predicted:
                self.num_microbatches, self.predicted = number, predicted

    def add_singles(self) -> None:
        """Places the documents of groups of one rank: each on the rank with the least work of those with room."""
        numbers = self._costliest_first(self._singles, 0)
        units, times = self.documents.units[numbers].tolist(), self.documents.times[0][numbers].tolist()
        left = ((self.num_microbatches - self.num_packs) * self.documents.limit * FILL).astype(np.int64).tolist()
        least = [(work, rank) for rank, work in enumerate(self.load.tolist())]
        heapq.heapify(least)
        full: list[tuple[int, int, int]] = []  # (-left, rank, work) of ranks that had no room
        blocks = self.blocks[0]
        for number, size, time in zip(numbers.tolist(), units, times):
            while full and -full[0][0] >= size:
                _, rank, work = heapq.heappop(full)
                heapq.heappush(least, (work, rank))
            while least and left[least[0][1]] < size:
                work, rank = heapq.heappop(least)
                heapq.heappush(full, (-left[rank], rank, work))
            if not least:  # no rank has room: the one with the most takes a further pack
                _, rank, work = heapq.heappop(full)
                left[rank] += self.documents.limit
                heapq.heappush(least, (work, rank))
            work, rank = least[0]
            heapq.heapreplace(least, (work + time, rank))
            blocks[rank].append(number)
            left[rank] -= size
        for work, rank in [*least, *((work, rank) for _, rank, work in full)]:
            self.load[rank] = work

    def packed(self, level: int, block: int) -> Packs:
        """The packs of a group: each document, longest first, into the first pack with room."""
        limit, units = self.documents.limit * self.documents.sizes[level], self.documents.units
        packs: Packs = []
        left: list[int] = []
        for number in sorted(self.blocks[level][block]):
            size = int(units[number])
            pack = next((k for k, free in enumerate(left) if free >= size), len(packs))
            if pack == len(packs):
                packs.append([])
                left.append(limit)
            packs[pack].append(number)
            left[pack] -= size
        return packs


def _water_level(load: np.ndarray, capacity: np.ndarray, work: int) -> float:
    """The level to which `work` rises in ranks with this load, each of which takes at most its capacity.

    load 4 0, capacity 9 9, work 6 -> 5        capacity 9 3 -> 7
    """
    if capacity.sum() < work:
        return float("inf")
    low, high = 0.0, float((load + capacity).max())
    for _ in range(40):
        middle = (low + high) / 2
        poured = np.minimum(np.maximum(middle - load, 0.0), capacity).sum()
        low, high = (low, middle) if poured >= work else (middle, high)
    return high
