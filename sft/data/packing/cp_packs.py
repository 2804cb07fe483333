"""Forms packs of long documents so that many packs take about the same time, for `cp_rows.py`.

Packs are formed for one row of ranks after another.  The longest document that has no pack decides how long the row
takes.  Each group of free ranks gets one document.  Then each pack gets as many further documents as it has time and
room for, the longest first (first fit, Coffman et al. 1980); the pack with the most time left is filled first:

    rows of 4 ranks, each of 10 tokens; documents of 18 14 10 8 8 3; a group gets the document with the most work per
    rank
    18 on two ranks: the row takes 9        8 and 8 on one rank each
    14 on two ranks: the row takes 7        10 and 3 on two ranks

`PackRule.by_work` decides which document a group gets first.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sft.data.packing.cp_cost import Documents


class PackRule(NamedTuple):
    """How packs are formed.  Times are shares of a microbatch's mean time.

    least    each pack of a row of ranks may take this time, even if the row's first document takes less
    alone    if the first document of a row of ranks takes longer than this on a group, it goes to a larger group
    sizes    the number of sizes that groups may have: the largest sizes
    short    documents that need one rank and take at most this time there are short: `cp_rows.py` places them
    by_work  whether a group gets the document with the most work per rank, instead of the longest one
    """

    least: float
    alone: float
    sizes: int
    short: float
    by_work: bool


class GroupPack(NamedTuple):
    """A pack of long documents.

    level      index in documents.sizes of the size of the pack's group
    documents  numbers of its documents
    """

    level: int
    documents: list[int]


@dataclass
class _Open:
    """A pack to which documents are added.  time, units: time in ns, and units of length, that further documents may
    take"""

    level: int
    documents: list[int]
    time: float
    units: int


def packs_of_long(
    documents: Documents, numbers: np.ndarray, width: int, mean_ns: float, rule: PackRule
) -> list[GroupPack]:
    """Forms packs of the documents with these numbers.

    width    number of ranks of a row
    mean_ns  mean time of a microbatch in ns; times of the rule are shares of it
    """
    return _LongDocuments(documents, numbers, max(0, len(documents.sizes) - rule.sizes)).packs(width, mean_ns, rule)


class _LongDocuments:
    """Forms packs of long documents, and keeps the documents that have no pack yet.

    Lists have an entry for each document, in order of falling padded length.  A document with a tree may take less time
    than a shorter document.  So `_most` holds, for each document, the longest time of it and all later ones.
    """

    def __init__(self, documents: Documents, numbers: np.ndarray, level: int) -> None:
        self._limits = [size * documents.limit for size in documents.sizes]
        self._sizes, self._level = documents.sizes, level
        self._numbers = numbers.tolist()
        self._units: list[int] = documents.units[numbers].tolist()
        self._times: list[list[int]] = documents.times[:, numbers].tolist()
        self._least: list[int] = np.maximum(documents.least[numbers], level).tolist()
        self._work: list[float] = documents.work(documents.least)[numbers].tolist()
        self._most = np.maximum.accumulate(documents.times[:, numbers][:, ::-1], axis=1)[:, ::-1]
        # Rising, for bisect
        self._by_units = [-units for units in self._units]
        self._by_time: list[list[int]] = (-self._most).tolist()
        self._next = list(range(len(self._numbers) + 1))  # union-find: leads to the next document without a pack

    def packs(self, width: int, mean_ns: float, rule: PackRule) -> list[GroupPack]:
        packs, first, last = [], self._from(0), len(self._sizes) - 1
        while first < len(self._numbers):
            level = self._least[first]
            while level < last and self._times[level][first] > rule.alone * mean_ns:
                level += 1
            height = max(rule.least * mean_ns, int(self._most[level, first]))
            starts = [self._start(level, self._limits[level], height) for level in range(last + 1)]
            free, opened = width, list[_Open]()
            while free and (chosen := self._chosen(starts, free, rule.by_work)):
                document, level = chosen
                opened.append(_Open(level, [], height, self._limits[level]))
                self._add(opened[-1], document)
                free -= self._sizes[level]
            for pack in sorted(opened, key=lambda pack: -pack.time):
                while (document := self._from(self._start(pack.level, pack.units, pack.time))) < len(self._numbers):
                    self._add(pack, document)
                packs.append(GroupPack(pack.level, pack.documents))
            first = self._from(first)
        return packs

    def _start(self, level: int, units: int, time: float) -> int:
        """The first document from which on every document has at most `units` and takes at most `time` ns."""
        return max(bisect_left(self._by_units, -units), bisect_left(self._by_time[level], -time))

    def _from(self, document: int) -> int:
        """The first document without a pack among `document` and all later ones."""
        following, end = self._next, document
        while following[end] != end:
            end = following[end]
        while following[document] != end:
            following[document], document = end, following[document]
        return end

    def _chosen(self, starts: list[int], free: int, by_work: bool) -> tuple[int, int] | None:
        """The document of the next group, and the level of the group; None if no document fits.

        starts  by level, the first document that fits in the row's time; moves it to a document without a pack
        free    number of free ranks of the row
        """
        best, chosen = 0.0, None
        for level in range(self._level, len(starts)):
            if self._sizes[level] > free:
                break
            starts[level] = document = self._from(starts[level])
            if document < len(self._numbers) and self._least[document] <= level:
                value = self._work[document] / self._sizes[level] if by_work else len(self._numbers) - document
                if value > best:
                    best, chosen = value, (document, level)
        return chosen

    def _add(self, pack: _Open, document: int) -> None:
        self._next[document] = document + 1
        pack.documents.append(self._numbers[document])
        pack.time -= self._times[pack.level][document]
        pack.units -= self._units[document]
