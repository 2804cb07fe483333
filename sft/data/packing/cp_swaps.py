"""Exchanges short documents between packs of a row, so that the slowest pack takes less time, for `cp_rows.py`.

A row takes as long as its slowest pack.  Every short document is in a slot of a pack, and every pack also has one free
slot.  An exchange swaps the contents of two slots.  If one of them is free, the exchange moves a document.
"""

from dataclasses import dataclass

import numpy as np

from sft.data.packing.cp_cost import Documents

# Exchanges end if no exchange makes the slowest pack faster by the share LEVEL of the mean time of a pack, or after
# MAX_EXCHANGES.  No exchange is tried with more than MOST_SHORT short documents, because packs are then even already.
LEVEL, MAX_EXCHANGES, MOST_SHORT = 0.0005, 100, 4000


@dataclass(frozen=True, kw_only=True)
class FilledPacks:
    """The packs of all rows: arrays int64 [packs].  Exchanges change `load` and `left`.

    row    row of each pack; the rows of a domain of ranks are numbered one after the other
    level  index in documents.sizes of the size of the pack's group
    load   time of each pack in ns
    left   units that still fit
    """

    row: np.ndarray
    level: np.ndarray
    load: np.ndarray
    left: np.ndarray


def relieve_rows(
    documents: Documents, packs: FilledPacks, short: np.ndarray, pack_of: np.ndarray, rows: int
) -> np.ndarray:
    """Exchanges short documents between packs of a row.  Returns int64 [short]: the pack of each after the exchanges.

    short    numbers of the short documents
    pack_of  the pack of each before the exchanges
    rows     number of rows of a domain

    one row, a pack of documents of 5 and 4 tokens, and an empty pack, with room for 9 tokens each
    -> packs of 5 and of 4 tokens
    """
    slots = _Slots.of(documents, packs, short, pack_of)
    slowest = np.zeros(int(packs.row.max(initial=0)) // rows * rows + rows, dtype=np.int64)
    np.maximum.at(slowest, packs.row, packs.load)
    ended, least = np.zeros(len(slowest), dtype=bool), max(1, int(LEVEL * packs.load.mean()))
    for _ in range(MAX_EXCHANGES):
        first = int(slowest.reshape(-1, rows).sum(axis=1).argmax()) * rows
        row = first + int(np.where(ended, -1, slowest)[first : first + rows].argmax())
        if ended[row]:
            break
        ended[row] = not slots.relieve(row, least)
        slowest[row] = packs.load[packs.row == row].max()
    return slots.packs_of(short)


@dataclass(frozen=True)
class _Slots:
    """The slots of all packs, in order of their rows.

    start   the index of the first slot of each row
    number  the document in each slot; -1: the slot is free
    pack    the pack of each slot
    """

    documents: Documents
    packs: FilledPacks
    start: np.ndarray
    number: np.ndarray
    pack: np.ndarray

    @staticmethod
    def of(documents: Documents, packs: FilledPacks, short: np.ndarray, pack_of: np.ndarray) -> "_Slots":
        free = np.arange(len(packs.row))
        number, pack = np.concatenate([short, np.full(len(free), -1)]), np.concatenate([pack_of, free])
        order = np.argsort(packs.row[pack], kind="stable")
        start = np.searchsorted(packs.row[pack[order]], np.arange(packs.row.max(initial=0) + 2))
        return _Slots(documents, packs, start, number[order], pack[order])

    def relieve(self, row: int, least: int) -> bool:
        """Makes the best exchange for the row's slowest pack, if it gains at least `least` ns.  Returns whether it
        did."""
        of_row = slice(self.start[row], self.start[row + 1])
        number, pack, (load, left, level) = self.number[of_row], self.pack[of_row], self._of_packs
        heavy = int(pack[load[pack].argmax()])
        own = np.flatnonzero((pack == heavy) & (number >= 0))
        if len(own) == 0:
            return False
        is_real, candidates = number >= 0, number[own][:, None]
        times, units = self.documents.times, self.documents.units
        after = load[heavy] - times[level[heavy], candidates] + times[level[heavy], number] * is_real
        of_other = load[pack] - times[level[pack], number] * is_real + times[level[pack], candidates]
        more = units[candidates] - units[number] * is_real
        allowed = (more <= left[pack]) & (-more <= left[heavy]) & (pack != heavy)
        gain = np.where(allowed, load[heavy] - np.maximum(after, of_other), 0)
        i, j = divmod(int(gain.argmax()), len(number))
        if gain[i, j] < least:
            return False
        load[heavy], load[pack[j]] = after[i, j], of_other[i, j]
        left[heavy] += more[i, j]
        left[pack[j]] -= more[i, j]
        number[own[i]], number[j] = number[j], number[own[i]]
        return True

    @property
    def _of_packs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.packs.load, self.packs.left, self.packs.level

    def packs_of(self, short: np.ndarray) -> np.ndarray:
        is_real = self.number >= 0
        pack_of = np.zeros(int(short.max(initial=0)) + 1, dtype=np.int64)
        pack_of[self.number[is_real]] = self.pack[is_real]
        return pack_of[short]
