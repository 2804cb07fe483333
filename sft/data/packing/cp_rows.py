"""Places documents so that ranks which wait for each other after every microbatch also finish microbatches together.

Pipelines and experts need this: `CpCost.wait_ranks` consecutive ranks, a domain, run each microbatch together.  Groups
of more than one rank are those of `cp_ranks.py`; a group runs its packs in order of falling time, so that long packs of
a domain run in the same microbatch.  Microbatch j of a domain then takes at least the time of its longest pack.  All
microbatches that no long pack decides get the same time, so that all domains finish together:

    one domain of 4 ranks; documents of 18 and 14 on all of them, then 10 on two and 8 and 8 on two
    microbatch 0    8 8 8 8        microbatch 1    5 5 8 8

Short documents fill these times: each goes to the pack that lacks most, also beside a long document.
"""

from collections.abc import Iterator

import numpy as np

from sft.data.packing.cp_documents import Documents
from sft.data.packing.cp_ranks import BETTER, FILL, MANY, Packs, Ranks, fill, sizes_of

# Shares of a microbatch's mean time that a document may take on the smallest group that holds it.
SHARES = (2.0, 1.25, 0.75)
EXTRA_MICROBATCHES = (0, 1, 2, 4)  # that are tried beyond the least number
LACKS = 0.05  # share of a microbatch's time: long packs that lack less get no short documents, which would send bytes


def packs_of_rows(
    documents: Documents, num_ranks: int, microbatch_ns: float, multiple: int, wait_ranks: int
) -> Iterator[tuple[int, list[Packs]]]:
    """The packs of every group: (size, packs of each group in order), sizes falling; a pack of no document is filler"""
    best: _Rows | None = None
    is_many = len(documents.ids) > MANY
    least = max(1, -(-int(documents.units.sum()) // (num_ranks * documents.limit)))
    for share in SHARES:
        ranks = Ranks(documents, num_ranks)
        ranks.add_groups(sizes_of(documents, num_ranks, share / least, 0))
        rows = _Rows(ranks, microbatch_ns, multiple, wait_ranks)
        if not is_many:
            rows.add_singles()
        if best is None or rows.predicted < best.predicted * (1 - BETTER):
            best = rows
    assert best is not None
    if is_many:
        best.add_singles()
    return best.packs()


class _Rows:
    """The packs of a step by microbatch.  A cell is a pack: level (index of its size), block, row (microbatch), time in
    ns, units and documents."""

    def __init__(self, ranks: Ranks, microbatch_ns: float, multiple: int, wait_ranks: int) -> None:
        self._ranks, self._documents, self._wait = ranks, ranks.documents, wait_ranks
        self._microbatch_ns, self._multiple = microbatch_ns, multiple
        self._add_groups()
        self._choose(microbatch_ns, multiple)

    def _add_groups(self) -> None:
        documents, sizes = self._documents, self._documents.sizes
        self._first = np.zeros(self._ranks.num_ranks, dtype=np.int64)  # microbatches of groups of more than one rank
        cells = []
        self._packs: Packs = []
        for level in range(len(sizes) - 1, 0, -1):
            for block in range(len(self._ranks.blocks[level])):
                of_block = slice(block * sizes[level], (block + 1) * sizes[level])
                packs = self._ranks.packed(level, block)
                times = [int(documents.times[level][pack].sum()) for pack in packs]
                for k in sorted(range(len(packs)), key=lambda k: -times[k]):
                    row = int(self._first[of_block][0])
                    cells.append((level, block, row, times[k], int(documents.units[packs[k]].sum())))
                    self._packs.append(packs[k])
                    self._first[of_block] += 1
        self._cells = np.array(cells, dtype=np.int64).reshape(-1, 5)

    def _choose(self, microbatch_ns: float, multiple: int) -> None:
        """Chooses the number of microbatches; predicts the time of the step."""
        documents, num_ranks, singles = self._documents, self._ranks.num_ranks, self._ranks.singles
        work, units = int(documents.times[0][singles].sum()), int(documents.units[singles].sum())
        total = int(self._first.sum()) + units / (documents.limit * FILL)
        least = max(1, int(self._first.max()), int(-(-total // num_ranks)))
        self.predicted = float("inf")
        for extra in EXTRA_MICROBATCHES:
            number = -(-(least + extra) // multiple) * multiple
            step, levels = self._levels(number, work, work / max(1, units))
            if step + number * microbatch_ns < self.predicted or extra == 0:
                self.num_microbatches, self.predicted, self._times = number, step + number * microbatch_ns, levels

    def _levels(self, number: int, work: int, density: float) -> tuple[float, np.ndarray]:
        """Nanoseconds of the step, and of each microbatch of each domain, float64 [domains, number].  inf: no room"""
        longest, singles = self._longest(number), self._num_singles(number)
        capacity = self._documents.limit * FILL * density
        sizes = np.array(self._documents.sizes)[self._cells[:, 0]]
        left = (sizes * self._documents.limit - self._cells[:, 4]) * density / np.maximum(sizes, 1)

        def taken(step: float) -> float:
            times = _even(longest, step)
            lacks = times[self._domains(), self._cells[:, 2]] - self._cells[:, 3]
            return float((singles * np.minimum(times, capacity)).sum() + (sizes * np.clip(lacks, 0, left)).sum())

        low = float(longest.sum(axis=1).max())
        high = low + number * capacity
        has_capacity = taken(high) >= work
        for _ in range(20):
            step = (low + high) / 2
            low, high = (low, step) if taken(step) >= work else (step, high)
        return (high if has_capacity else float("inf")), _even(longest, high)

    def _domains(self) -> np.ndarray:
        sizes = np.array(self._documents.sizes)[self._cells[:, 0]]
        return self._cells[:, 1] * sizes // self._wait

    def _longest(self, number: int) -> np.ndarray:
        """int64 [domains, number]: time of the longest pack on more than one rank."""
        longest = np.zeros((self._ranks.num_ranks // self._wait, number), dtype=np.int64)
        np.maximum.at(longest, (self._domains(), self._cells[:, 2]), self._cells[:, 3])
        return longest

    def _num_singles(self, number: int) -> np.ndarray:
        """int64 [domains, number]: packs on one rank."""
        is_single = np.arange(number) >= self._first[:, None]
        return is_single.reshape(-1, self._wait, number).sum(axis=1)

    def add_singles(self) -> None:
        """Fills the packs with the documents of groups of one rank; with more microbatches, if they have no room."""
        documents = self._documents
        numbers = self._ranks.singles[np.argsort(-documents.times[0][self._ranks.singles], kind="stable")]
        while True:
            cells = self._all_cells()
            load = np.rint(cells[:, 3] - self._times[cells[:, 5], cells[:, 2]]).astype(np.int64)
            is_open = (cells[:, 0] == 0) | (-load > LACKS * self._times[cells[:, 5], cells[:, 2]])
            left = np.array(documents.sizes)[cells[:, 0]] * documents.limit - cells[:, 4]
            loads = load.tolist()
            bins = fill(documents, numbers, loads, np.where(is_open, left, 0).tolist(), cells[:, 0].tolist(), 0)
            if -1 not in bins:
                break
            self.num_microbatches += self._multiple
            work, units = int(documents.times[0][numbers].sum()), int(documents.units[numbers].sum())
            self._times = self._levels(self.num_microbatches, work, work / units)[1]
        self._packs = self._packs + [[] for _ in range(len(cells) - len(self._packs))]
        for number, cell in zip(numbers.tolist(), bins):
            self._packs[cell].append(number)
        self._all = cells
        late = np.zeros_like(self._times)
        np.maximum.at(late, (cells[:, 5], cells[:, 2]), np.array(loads) + self._times[cells[:, 5], cells[:, 2]])
        self.predicted = float(late.sum(axis=1).max()) + self.num_microbatches * self._microbatch_ns

    def _all_cells(self) -> np.ndarray:
        """int64 [cells, 6]: those of groups, then those of ranks; the last column is the domain."""
        rank, row = np.nonzero(np.arange(self.num_microbatches) >= self._first[:, None])
        nothing = np.zeros_like(rank)
        single = np.stack([nothing, rank, row, nothing, nothing, rank // self._wait], axis=1)
        return np.concatenate([np.column_stack([self._cells, self._domains()]), single])

    def packs(self) -> Iterator[tuple[int, list[Packs]]]:
        blocks: list[list[Packs]] = [[[] for _ in of_size] for of_size in self._ranks.blocks]
        for (level, block), pack in zip(self._all[:, :2].tolist(), self._packs):  # in order of rows
            blocks[level][block].append(sorted(pack))
        for level in reversed(range(len(blocks))):
            yield self._documents.sizes[level], blocks[level]


def _even(longest: np.ndarray, step: float) -> np.ndarray:
    """Times of microbatches that add up to `step` in each domain: all even, except those with a longer pack.

    longest [[9, 0, 1]], step 14.5 -> [[9, 2.75, 2.75]]
    """
    number = longest.shape[1]
    falling = -np.sort(-longest, axis=1)
    before = np.concatenate([np.zeros((len(longest), 1)), np.cumsum(falling, axis=1)], axis=1)[:, :-1]
    even = (step - before) / (
        number - np.arange(number)
    )  # if the first k, in falling order, are longer than the others
    chosen = np.argmax(even >= falling, axis=1)
    return np.maximum(longest, even[np.arange(len(longest)), chosen][:, None])
