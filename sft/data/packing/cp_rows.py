"""Places documents so that ranks that wait for each other after every microbatch also finish each microbatch together.

With pipelines and experts, `CpCost.wait_ranks` consecutive ranks (a domain) wait for each other after every microbatch.
A row is one microbatch of one domain.  A row takes as long as its slowest pack.

Long documents are placed first, in order of falling length, as on shelves (first fit, Coffman et al. 1980).  The first
document of a row decides the time of the row, which is at least the mean time of a microbatch.  Each document goes to
the first row with room, on the smallest group on which it takes no longer than the row.  So documents of similar length
share a row:

    one domain of 4 ranks, each of 10 tokens; documents of 18 14 10 8 8: tokens of each rank, - for no document
    microbatch 0    10 8 8 -        microbatch 1    9 9 7 7

Short documents come last.  Every row gets a target time, so that all domains finish together: the time of its longest
pack, or an even share of the remaining time.  Each short document goes to the pack that is furthest below its row's
target; this pack may hold a long document.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sft.data.packing.cp_cost import Documents
from sft.data.packing.cp_fill import fill
from sft.data.packing.cp_ranks import FILL, sizes_of

# Choices of (a) the share of a microbatch's mean time that a document may take on the smallest group that holds it,
# (b) microbatches beyond the least number, (c) the share of a microbatch's mean time below which a document is short.
CHOICES = ((2.0, 0, 0.2), (0.75, 1, 0.2), (0.75, 2, 0.5), (1.25, 4, 0.2), (0.5, 4, 0.2))
# Limits of the time.  At most this many documents on single ranks are long.  Each choice spends its number of long
# documents, plus an eighth of all documents; no further choice is tried once the choices have spent MAX_LONG.
MAX_LONG = 1200
LACKS = 0.05  # packs on several ranks that lack less than this share of the target get no short documents: saves bytes
NONE = 1 << 40  # stands for no row; greater than the number of any row


class Placed(NamedTuple):
    """A pack of documents (their numbers) on the ranks `rank`, ..., `rank` + `cp_size` - 1."""

    cp_size: int
    rank: int
    microbatch: int
    documents: list[int]


def packs_of_rows(documents: Documents, num_ranks: int, multiple: int, wait_ranks: int) -> list[Placed]:
    """All packs that hold a document, from the choice with the shortest step.

    multiple  the number of microbatches is planned as a multiple of this
    """
    plans, spent = [], 0
    least = max(1, -(-int(documents.units.sum()) // (num_ranks * documents.limit)))
    for share, extra, short in CHOICES:
        index = sizes_of(documents, num_ranks, share / least, 0)
        number = -(-(least + extra) // multiple) * multiple
        mean_ns = float(documents.work(index).sum()) / num_ranks / number
        shelves = _Shelves(documents, wait_ranks)
        short_ns = max(short * mean_ns, float(documents.times[0][MAX_LONG:].max(initial=0)))
        is_long = (index > 0) | (documents.times[0] > short_ns)
        for document in np.flatnonzero(is_long).tolist():
            shelves.add(document, int(index[document]), mean_ns)
        plans.append(_filled(shelves, np.flatnonzero(~is_long), num_ranks // wait_ranks, number, multiple))
        spent += int(is_long.sum()) + len(documents.ids) // 8
        if spent >= MAX_LONG:
            break
    return min(plans, key=lambda plan: plan.step_ns + plan.num_microbatches * documents.microbatch_ns).packs()


class _Shelves:
    """Rows of packs of long documents.  width: number of ranks of a domain

    height, free         for each row: its time in ns, and its number of ranks without a pack
    levels, rows, packs  for each pack: the index in documents.sizes of its group's size, its row, its documents
    left                 for each pack: the units that still fit
    """

    def __init__(self, documents: Documents, width: int) -> None:
        self.documents, self.width = documents, width
        self.height: list[float] = []
        self.free: list[int] = []
        self._open: list[int] = []  # rows with free ranks
        self.packs: list[list[int]] = []
        most = len(documents.ids)
        self._levels, self._rows = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.int64)
        self._ns, self._units = np.zeros(most), np.zeros(most, dtype=np.int64)  # time and units left in each pack

    levels = property(lambda self: self._levels[: len(self.packs)])
    rows = property(lambda self: self._rows[: len(self.packs)])
    left = property(lambda self: self._units[: len(self.packs)])

    def add(self, document: int, level: int, mean_ns: float) -> None:
        """Adds a document to the first row that has a pack with room or enough free ranks.  Otherwise begins a new row
        with a group of this level, whose time is at least mean_ns."""
        times, units = self.documents.times[:, document], int(self.documents.units[document])
        row, of_row = self._row(times.tolist(), int(self.documents.least[document]))
        if self.packs:
            fits = (self.left >= units) & (self._ns[: len(self.packs)] >= times[self.levels])
            rows = np.where(fits, self.rows, NONE)
            pack = int(rows.argmin())
            if rows[pack] < row:
                self.packs[pack].append(document)
                self._ns[pack] -= times[self._levels[pack]]
                self._units[pack] -= units
                return
        if row == NONE:
            row, of_row = len(self.height), level
            self.height.append(max(float(times[level]), mean_ns))
            self.free.append(self.width)
            self._open.append(row)
        k, size = len(self.packs), self.documents.sizes[of_row]
        self.packs.append([document])
        self._levels[k], self._rows[k] = of_row, row
        self._ns[k], self._units[k] = self.height[row] - times[of_row], size * self.documents.limit - units
        self.free[row] -= size
        if not self.free[row]:
            self._open.remove(row)

    def _row(self, times: list[int], least: int) -> tuple[int, int]:
        """The first row with enough free ranks for a document, and the level of the smallest group that takes no longer
        than the row.  NONE and -1 if there is no such row."""
        for row in self._open:
            if self.free[row] >= self.documents.sizes[least]:
                height, level = self.height[row], least
                while level < len(times) and times[level] > height:
                    level += 1
                if level < len(times) and self.documents.sizes[level] <= self.free[row]:
                    return row, level
        return NONE, -1


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The packs of all domains.  For each pack: numbers of its documents, size of its group, domain, and microbatch.

    step_ns  predicted time of the step, without `microbatch_ns`
    """

    step_ns: float
    num_microbatches: int
    wait_ranks: int
    numbers: list[list[int]]
    sizes: list[int]
    domains: list[int]
    microbatches: list[int]

    def packs(self) -> list[Placed]:
        """The packs with their ranks.  Large groups come first in a row, so each begins at a multiple of its size."""
        next_rank: dict[tuple[int, int], int] = {}
        placed = []
        for k in sorted(range(len(self.numbers)), key=lambda k: -self.sizes[k]):
            row = self.domains[k], self.microbatches[k]
            rank = next_rank.get(row, self.domains[k] * self.wait_ranks)
            if self.numbers[k]:
                placed.append(Placed(self.sizes[k], rank, self.microbatches[k], sorted(self.numbers[k])))
                next_rank[row] = rank + self.sizes[k]
        return placed


def _filled(shelves: _Shelves, short: np.ndarray, num_domains: int, number: int, multiple: int) -> _Plan:
    """Assigns the rows to domains, and places the short documents.  Adds microbatches until all have room."""
    documents, levels, width = shelves.documents, shelves.levels, shelves.width
    sizes = np.array(documents.sizes)
    short = short[np.argsort(-documents.times[0][short], kind="stable")]
    work = int(documents.times[0][short].sum())
    density = work / max(1, int(documents.units[short].sum()))
    times = np.array([documents.times[k][pack].sum() for k, pack in zip(levels, shelves.packs)], dtype=np.int64)
    number = max(number, -(-len(shelves.height) // num_domains))
    number += -number % multiple
    while True:
        rows = number * num_domains
        longest, free = np.zeros(rows, dtype=np.int64), np.full(rows, width)
        np.maximum.at(longest, shelves.rows, times)
        free[: len(shelves.free)] = shelves.free
        domain, microbatch = _of_rows(longest, num_domains, number)
        of_domain = np.zeros((num_domains, number), dtype=np.int64)
        of_domain[domain, microbatch] = longest
        row = np.concatenate([shelves.rows, np.repeat(np.arange(rows), free)])
        alone = np.zeros(len(row) - len(times), dtype=np.int64)  # packs of one rank
        level, time = np.concatenate([levels, alone]), np.concatenate([times, alone])
        left = np.concatenate([shelves.left, alone + documents.limit])

        def targets(step: float) -> np.ndarray:
            return _even(of_domain, step)[domain, microbatch][row]

        def taken(step: float) -> float:
            return float((np.clip(targets(step) - time, 0, left * density * FILL / sizes[level]) * sizes[level]).sum())

        low = float(of_domain.sum(axis=1).max())
        high = low + number * documents.limit * density
        if taken(high) >= work:
            for _ in range(20):
                step = (low + high) / 2
                low, high = (low, step) if taken(step) >= work else (step, high)
            target = targets(high)
            load = np.rint(time - target).astype(np.int64)
            left[(level > 0) & (-load <= LACKS * target)] = 0
            packs = fill(documents, short, load, left, level, 0)
            if (packs >= 0).all():
                break
        number += multiple
    numbers = [list(pack) for pack in shelves.packs] + [[] for _ in alone]
    in_order, ends = short[np.argsort(packs, kind="stable")].tolist(), np.cumsum(np.bincount(packs)).tolist()
    for pack, (start, end) in enumerate(zip([0, *ends], ends)):
        numbers[pack] += in_order[start:end]
    late = np.zeros((num_domains, number))
    np.maximum.at(late, (domain[row], microbatch[row]), load + target)
    return _Plan(
        step_ns=float(late.sum(axis=1).max()), num_microbatches=number, wait_ranks=width, numbers=numbers,
        sizes=sizes[level].tolist(), domains=domain[row].tolist(), microbatches=microbatch[row].tolist(),
    )  # fmt: skip


def _of_rows(longest: np.ndarray, num_domains: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [rows]: domain and microbatch of each row; the longest row goes to the domain with the least time so far.

    rows of 5 4 3 0, two domains -> domains 0 1 1 0, microbatches 0 0 1 1
    """
    domain, microbatch = np.zeros_like(longest), np.zeros_like(longest)
    least = [(0, k, 0) for k in range(num_domains)]
    for row in np.argsort(-longest, kind="stable").tolist():
        load, k, count = heapq.heappop(least)
        domain[row], microbatch[row] = k, count
        if count + 1 < number:
            heapq.heappush(least, (load + int(longest[row]), k, count + 1))
    return domain, microbatch


def _even(longest: np.ndarray, step: float) -> np.ndarray:
    """Times of the microbatches of each domain, with the sum `step`: all equal, except those with a longer pack.

    longest  [domains, microbatches]: time of the longest pack, in ns

    longest [[9, 0, 1]], step 14.5 -> [[9, 2.75, 2.75]]
    """
    number = longest.shape[1]
    falling = -np.sort(-longest, axis=1)
    before = np.concatenate([np.zeros((len(longest), 1)), np.cumsum(falling, axis=1)], axis=1)[:, :-1]
    # even[:, k]: the equal time of all other microbatches, if the k longest keep the time of their longest pack
    even = (step - before) / (number - np.arange(number))
    chosen = np.argmax(even >= falling, axis=1)
    return np.maximum(longest, even[np.arange(len(longest)), chosen][:, None])
