"""Places documents so that ranks that wait for each other after every microbatch finish each microbatch together.

With pipelines, experts or shards (parallel.shard), `CpCost.wait_ranks` consecutive ranks (a domain) wait for each other
after every microbatch, or within it.  A row is one microbatch of one domain.  A row takes as long as its slowest pack,
so packs of about equal time belong in the same row:

    packs    of long documents are formed (`cp_packs.py`)
    rows     take packs in order of falling time; a pack goes to the first row with enough free ranks
    domains  take rows in order of falling time; a row goes to the domain with the least time so far
    targets  every row gets a target time, so that all domains finish together: the time of its longest pack, or an even
             share of the remaining time
    short    documents are placed last.  Each goes to the pack that is furthest below its row's target

How packs are formed decides how well they fit together.  So several rules (`RULES`) are tried, and the shortest step is
kept.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sft.data.packing.cp_cost import Documents
from sft.data.packing.cp_fill import fill
from sft.data.packing.cp_packs import GroupPack, PackRule, packs_of_long
from sft.data.packing.cp_ranks import FILL
from sft.data.packing.cp_swaps import MOST_SHORT, FilledPacks, relieve_rows

# The rules, in the order in which they are tried.  FEW_BYTES has the rules if only the cp ranks of a row of the grid
# wait for each other: these rules prefer small groups, because large groups send more bytes.
RULES = (
    PackRule(0.8, 1.5, 9, 0.3, True), PackRule(0.2, 1.0, 2, 0.1, False), PackRule(0.8, 1.5, 3, 0.3, False),
    PackRule(1.0, 1.5, 3, 0.2, False), PackRule(0.2, 0.5, 2, 0.1, True), PackRule(0.6, 1.0, 2, 0.3, False),
    PackRule(0.6, 0.5, 2, 0.3, True), PackRule(0.2, 0.5, 2, 0.3, False), PackRule(0.2, 1.0, 2, 0.3, True),
    PackRule(0.2, 1.5, 3, 0.3, False), PackRule(0.6, 0.5, 9, 0.1, True), PackRule(0.4, 0.5, 2, 0.3, True),
    PackRule(0.6, 1.0, 2, 0.1, True),
)  # fmt: skip
FEW_BYTES = (
    PackRule(1.0, 2.0, 9, 0.2, False), PackRule(0.8, 0.75, 9, 0.2, False), PackRule(1.0, 0.75, 4, 0.2, False),
    PackRule(0.6, 0.75, 9, 0.5, False), PackRule(0.6, 1.5, 9, 0.2, False), PackRule(0.4, 1.0, 9, 0.2, False),
    PackRule(0.8, 1.5, 9, 0.3, True),
)  # fmt: skip
# Limits of the planning time.  At most MAX_LONG documents that need one rank are long.  A rule costs its number of long
# documents, plus an eighth of all documents.  No further rule is tried once the rules have cost MAX_SPENT, or once a
# step is expected to take at most ENOUGH times the bound.  Then up to three rules with the shortest expected steps
# place the short documents: as many rules as place at most MAX_PLACED documents together, but at least one.
MAX_LONG, MAX_SPENT, ENOUGH, MAX_PLACED = 1200, 4000, 1.005, 8000


class Placed(NamedTuple):
    """A pack of documents (their numbers) on the ranks `rank`, ..., `rank` + `cp_size` - 1."""

    cp_size: int
    rank: int
    microbatch: int
    documents: list[int]


def packs_of_rows(
    documents: Documents, num_ranks: int, multiple: int, wait_ranks: int, rules: Sequence[PackRule]
) -> list[Placed]:
    """Assigns documents to rows of packs.  Returns all packs that hold a document, by the rule with the shortest step.

    multiple    the number of microbatches is planned as a multiple of this
    wait_ranks  number of consecutive ranks of a domain
    """
    work = float(documents.work(documents.least).sum())
    number = max(1, -(-int(documents.units.sum()) // (num_ranks * documents.limit)))
    mean_ns, enough_ns = work / num_ranks / number, documents.bound_ns(num_ranks) * ENOUGH
    grid, plans = _Grid(documents, wait_ranks, num_ranks // wait_ranks, multiple), list[_PlannedRows]()
    spent = 0
    for rule in rules:
        most = max(rule.short * mean_ns, float(documents.times[0][MAX_LONG:].max(initial=0)))
        is_long = (documents.least > 0) | (documents.times[0] > most)
        packs = packs_of_long(documents, np.flatnonzero(is_long), wait_ranks, mean_ns, rule)
        plans.append(_planned(grid, packs, np.flatnonzero(~is_long), number))
        spent += int(is_long.sum()) + len(is_long) // 8
        if spent >= MAX_SPENT or plans[-1].step_ns <= enough_ns:
            break
    plans.sort(key=lambda rows: rows.step_ns)
    number_filled = max(1, min(3, MAX_PLACED // max(1, len(documents.ids))))
    best = min((_filled(grid, rows) for rows in plans[:number_filled]), key=lambda filled: filled.step_ns)
    return _placed(grid, best.rows, _exchanged(grid, best))


@dataclass(frozen=True)
class _Grid:
    """The ranks of a step.  width: number of ranks of a domain; multiple: divides the number of microbatches"""

    documents: Documents
    width: int
    num_domains: int
    multiple: int


@dataclass(frozen=True, kw_only=True)
class _PlannedRows:
    """Packs in rows, before short documents are placed.

    Bins are the packs, and after them the ranks without a pack, each as a bin of its own.

    packs       packs of long documents
    short       int64: numbers of the short documents
    level       int64 [bins]: index in documents.sizes of the size of the bin's group
    time        int64 [bins]: time of the bin in ns
    left        int64 [bins]: units that still fit into the bin
    domain      int64 [bins]: domain of the bin's row
    microbatch  int64 [bins]: microbatch of the bin's row
    target      float64 [bins]: target time of the bin's row in ns
    number      number of microbatches
    step_ns     expected time of the step
    """

    packs: list[GroupPack]
    short: np.ndarray
    level: np.ndarray
    time: np.ndarray
    left: np.ndarray
    domain: np.ndarray
    microbatch: np.ndarray
    target: np.ndarray
    number: int
    step_ns: float


def _planned(grid: _Grid, packs: list[GroupPack], short: np.ndarray, number: int) -> _PlannedRows:
    """Assigns packs to rows, and sets the targets of rows.  Adds microbatches until short documents should fit.

    number  the least number of microbatches
    """
    documents, sizes, num_packs = grid.documents, np.array(grid.documents.sizes), len(packs)
    levels = np.array([pack.level for pack in packs], dtype=np.int64)
    times = np.array([documents.times[level][own].sum() for level, own in packs], dtype=np.int64)
    used = np.array([documents.units[own].sum() for _, own in packs], dtype=np.int64)
    row_of, free_of = _rows_of(sizes[levels], times, grid.width)
    work = int(documents.times[0][short].sum())
    density = work / max(1, int(documents.units[short].sum()))
    number = max(number, -(-len(free_of) // grid.num_domains))
    while True:
        number += -number % grid.multiple
        longest, free = np.zeros(number * grid.num_domains, dtype=np.int64), np.full(
            number * grid.num_domains, grid.width
        )
        np.maximum.at(longest, row_of, times)
        free[: len(free_of)] = free_of
        domain, microbatch = _of_rows(longest, grid.num_domains, number)
        row = np.concatenate([row_of, np.repeat(np.arange(len(free)), free)])
        domain, microbatch = domain[row], microbatch[row]
        alone = np.zeros(len(row) - num_packs, dtype=np.int64)
        level, time = np.concatenate([levels, alone]), np.concatenate([times, alone])
        left = sizes[level] * documents.limit - np.concatenate([used, alone])
        capacity = left * density * FILL / sizes[level]
        of_domain = np.zeros((grid.num_domains, number), dtype=np.int64)
        np.maximum.at(of_domain, (domain, microbatch), time)

        def target(step: float) -> np.ndarray:
            return _even(of_domain, step)[domain, microbatch]

        def taken(step: float) -> float:
            return float((np.clip(target(step) - time, 0, capacity) * sizes[level]).sum())

        low = float(of_domain.sum(axis=1).max())
        high = low + number * documents.limit * density
        if taken(high) >= work:
            break
        number += 1
    for _ in range(16):
        step = (low + high) / 2
        low, high = (low, step) if taken(step) >= work else (step, high)
    return _PlannedRows(
        packs=packs, short=short, level=level, time=time, left=left, domain=domain, microbatch=microbatch,
        target=target(high), number=number, step_ns=high + number * documents.microbatch_ns,
    )  # fmt: skip


class _FilledRows(NamedTuple):
    """Rows with short documents, and the predicted time of the step.

    pack_of     int64 [short]: the bin of each short document
    time, left  int64 [bins]: time and free units of each bin with its short documents
    """

    step_ns: float
    rows: _PlannedRows
    pack_of: np.ndarray
    time: np.ndarray
    left: np.ndarray


def _filled(grid: _Grid, rows: _PlannedRows) -> _FilledRows:
    """Places the short documents.  Adds microbatches until each fits into a pack."""
    documents = grid.documents
    while True:
        load, left = np.rint(rows.time - rows.target).astype(np.int64), rows.left.copy()
        left[(rows.level > 0) & (load >= 0)] = 0  # a short document on several ranks would send bytes
        pack_of = fill(documents, rows.short, load, left, rows.level, 0)
        if (pack_of >= 0).all():
            break
        rows = _planned(grid, rows.packs, rows.short, rows.number + 1)
    time = load + np.rint(rows.target).astype(np.int64)
    late = np.zeros((grid.num_domains, rows.number), dtype=np.int64)
    np.maximum.at(late, (rows.domain, rows.microbatch), time)
    step_ns = float(late.sum(axis=1).max()) + rows.number * documents.microbatch_ns
    return _FilledRows(step_ns, rows, pack_of, time, left)


def _exchanged(grid: _Grid, filled: _FilledRows) -> list[list[int]]:
    """The documents of each bin, after exchanges of short documents."""
    rows = filled.rows
    packs = FilledPacks(
        row=rows.domain * rows.number + rows.microbatch, level=rows.level, load=filled.time, left=filled.left
    )
    pack_of = filled.pack_of
    if len(rows.short) <= MOST_SHORT:
        pack_of = relieve_rows(grid.documents, packs, rows.short, pack_of, rows.number)
    narrow = np.uint16 if len(rows.level) < 1 << 16 else np.int64  # numpy sorts 16-bit numbers by radix
    in_order = rows.short[np.argsort(pack_of.astype(narrow), kind="stable")].tolist()
    ends = np.cumsum(np.bincount(pack_of, minlength=len(rows.level))).tolist()
    short = [in_order[start:end] for start, end in zip([0, *ends], ends)]
    numbers = [[*pack.documents, *own] for pack, own in zip(rows.packs, short)]
    return [*numbers, *short[len(numbers) :]]


def _placed(grid: _Grid, rows: _PlannedRows, numbers: list[list[int]]) -> list[Placed]:
    """The packs with a document, and their ranks.  Large groups come first in a row, so each begins at a multiple of
    its size."""
    next_rank: dict[tuple[int, int], int] = {}
    placed = []
    sizes, domains, microbatches = (
        of.tolist() for of in (np.array(grid.documents.sizes)[rows.level], rows.domain, rows.microbatch)
    )
    for k in sorted(range(len(numbers)), key=lambda k: -sizes[k]):
        row = domains[k], microbatches[k]
        rank = next_rank.get(row, domains[k] * grid.width)
        if numbers[k]:
            placed.append(Placed(sizes[k], rank, microbatches[k], sorted(numbers[k])))
            next_rank[row] = rank + sizes[k]
    return placed


def _rows_of(sizes: np.ndarray, times: np.ndarray, width: int) -> tuple[np.ndarray, list[int]]:
    """Assigns packs to rows.  Returns int64 [packs], the row of each pack, and the number of free ranks of each row.

    Each pack, that with the longest time first, goes to the first row with enough free ranks.
    sizes, times: number of ranks, and time in ns, of each pack

    sizes 2 1 1 1, times 5 9 4 3, width 2 -> rows 1 0 0 2, free ranks 0 0 1
    """
    rows, free, first = np.zeros(len(sizes), dtype=np.int64), list[int](), 0
    of = sizes.tolist()
    for pack in np.argsort(-times, kind="stable").tolist():
        row = first
        while row < len(free) and free[row] < of[pack]:
            row += 1
        if row == len(free):
            free.append(width)
        free[row] -= of[pack]
        rows[pack] = row
        while first < len(free) and not free[first]:
            first += 1
    return rows, free


def _of_rows(longest: np.ndarray, num_domains: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Assigns rows to domains.  Returns two arrays int64 [rows]: the domain and the microbatch of each row.

    Each row, the longest first, goes to the domain with the least time so far.
    longest: int64 [rows], time of the longest pack of each row; number: number of microbatches

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
    """Target times of the microbatches of each domain, [domains, microbatches] in ns, whose sum is `step`.

    All targets of a domain are equal, except those of microbatches with a longer pack: these have the pack's time.
    longest  [domains, microbatches]: time of the longest pack, in ns

    longest [[9, 0, 1]], step 14.5 -> [[9, 2.75, 2.75]]
    """
    number = longest.shape[1]
    falling = -np.sort(-longest, axis=1)
    before = np.concatenate([np.zeros((len(longest), 1)), np.cumsum(falling, axis=1)], axis=1)[:, :-1]
    # even[:, k]: the equal time of the other microbatches, if the k longest have the time of their longest pack
    even = (step - before) / (number - np.arange(number))
    chosen = np.argmax(even >= falling, axis=1)
    return np.maximum(longest, even[np.arange(len(longest)), chosen][:, None])
