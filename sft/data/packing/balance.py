"""Which rank computes which sequences of a global batch, so that all ranks are done at the same time.

Decides how a global batch's sequences lie in its dp x num_microbatches slots, a pack each.  Which sequences the
batch has is the plan's business (`plan.py`): none is lost, doubled or moved to another step here, and no slot
holds more than seq_length padded tokens.  All in whole numbers, ties by position: every rank computes the same.

A sequence costs its padded tokens plus the square of its length over `crossover`, the length at which attention
takes as long as all else (`layout.attention_crossover`).  How level it is, 1 at best, is told in two ways:

    per step        mean over max, over ranks, of what they compute in the step, which ends when the last is done
    per microbatch  the same where they wait for each other after every microbatch, as the stages of pipelines do

Packs are dealt out, costliest first, each to the rank that has least, in rows of similar cost.  Then two packs at a
time are split anew, sizes kept: a heavy rank gives a long sequence and takes as many tokens in short ones, until ranks,
then rows, are level.  Where that does not level ranks, sequences are dealt out in place of packs, if they find room.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from sft.parallel.alignment import aligned

Slots = list[list[tuple[int, ...]]]  # sample ids by rank and microbatch

LEVEL = 0.002  # of the mean: a rank within this of it is left as it is, and less than half of it is not worth moving
ENUMERATED, EXACT = 10, 24  # of two packs: longest sequences tried on either side, and shortest summed exactly
PARTNERS, PAIRS = 6, 16  # ranks that a heavy one tries to exchange with, and pairs of packs with each
ENOUGH = 0.01  # of the mean: ranks within this of it are not dealt out once more
SPLITS = 400, 400  # tried for ranks and for rows of a batch, which bounds the time
FILLED = 0.999  # of a rank's packs, where sequences are dealt out: the rest is lost between them


def costs(lengths: np.ndarray, *, doc_multiple: int, crossover: float) -> np.ndarray:
    """int64 [n]: what each sequence costs, in tokens.

    lengths [1000, 4000], doc_multiple 32, crossover 1000 -> [1024 + 1000, 4000 + 16000]
    """
    real = np.asarray(lengths, dtype=np.int64)
    return aligned(real, doc_multiple) + np.rint(real * (real / crossover)).astype(np.int64)


def assign(
    packs: Sequence[Sequence[int]],
    lengths: np.ndarray,
    *,
    dp: int,
    seq_length: int,
    doc_multiple: int,
    crossover: float,
) -> Slots:
    """The packs of a global batch, some of them empty, made level over `dp` ranks.

    Costs 8 1 7 2, two ranks:                     packs (0,) (1,) (2,) (3,) -> [[(0,), (1,)], [(2,), (3,)]]
    Costs 9 1 1 1 of sizes 3 1 1 1, two ranks:    packs (0,) (1, 2, 3)      -> [[(0,)], [(1, 2, 3)]], nothing to gain

    Never worse per step than pack k as microbatch k // dp of rank k % dp.
    """
    plain = [[tuple(pack) for pack in packs[rank::dp]] for rank in range(dp)]
    ids = np.array([i for pack in packs for i in pack], dtype=np.int64)
    if dp == 1 or len(ids) == 0:
        return plain
    pack_of = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
    longest_first = np.argsort(-lengths[ids], kind="stable")
    ids, pack_of = ids[longest_first], pack_of[longest_first]
    batch = _Batch(
        [np.flatnonzero(pack_of == k).tolist() for k in range(len(packs))],
        sizes=aligned(lengths[ids], doc_multiple) // doc_multiple,
        costs=costs(lengths[ids], doc_multiple=doc_multiple, crossover=crossover),
        limit=seq_length // doc_multiple,
        dp=dp,
    )
    before = max(sum(batch.cost[rank::dp]) for rank in range(dp))
    batch.deal()
    batch.level_ranks()
    if batch.deal_sequences():
        batch.level_ranks()
    batch.level_rows()
    if max(batch.load) > before:
        return plain
    return [[tuple(ids[batch.packs[k]].tolist()) for k in rank] for rank in batch.ranks]


class _Batch:
    """The packs of a batch while they are changed.  Sequences are numbered from the longest on.

    packs, size, cost  of each pack: its sequences, their units of doc_multiple tokens, what they cost
    ranks, load        of each rank: its packs, what they cost
    """

    def __init__(self, packs: list[list[int]], *, sizes: np.ndarray, costs: np.ndarray, limit: int, dp: int) -> None:
        self._size_of, self._cost_of, self._limit = sizes, costs, limit
        self._sizes: list[int] = sizes.tolist()
        self.packs = packs
        self.size = [int(sizes[pack].sum()) for pack in packs]
        self.cost = [int(costs[pack].sum()) for pack in packs]
        self.ranks: list[list[int]] = [[] for _ in range(dp)]
        self.load = [0] * dp
        self._mean = sum(self.cost) / dp
        self._splits = 0
        self._ways = np.arange(1 << ENUMERATED)[:, None] >> np.arange(ENUMERATED) & 1  # [ways, longest sequences]

    def deal(self) -> None:
        """The dp costliest packs one to each rank, then the next dp: the costlier, the less the rank has."""
        dp = len(self.ranks)
        order = sorted(range(len(self.packs)), key=lambda k: (-self.cost[k], k))
        for first in range(0, len(order), dp):
            least = sorted(range(dp), key=lambda rank: (self.load[rank], rank))
            for k, rank in zip(order[first : first + dp], least, strict=True):
                self.ranks[rank].append(k)
                self.load[rank] += self.cost[k]

    def deal_sequences(self) -> bool:
        """The same of sequences, each to a rank with room, whose packs are then filled anew.  Changes nothing, and says
        so, where ranks are level enough, or more level than they would be, or sequences do not fit."""
        if max(self.load) <= self._mean * (1 + ENOUGH):
            return False
        dealt = self._sequences_of_ranks()
        if dealt is None:
            return False
        loads = [self._cost(sequences) for sequences in dealt]
        if max(loads) >= max(self.load):
            return False
        packed = [self._packed(sequences, len(rank)) for sequences, rank in zip(dealt, self.ranks, strict=True)]
        if not all(packed):
            return False
        for rank, packs in zip(self.ranks, packed, strict=True):
            for k, sequences in zip(rank, packs or (), strict=True):
                self._put(k, sequences)
        self.load = loads
        return True

    def _sequences_of_ranks(self) -> list[list[int]] | None:
        """The costliest sequence first, each to the rank that has least of those with room for it."""
        dealt: list[list[int]] = [[] for _ in self.ranks]
        room = [int(len(rank) * self._limit * FILLED) for rank in self.ranks]
        least = [(0, rank) for rank in range(len(self.ranks))]
        for i, size in enumerate(self._sizes):  # the longest is the costliest
            full = []
            while least and room[least[0][1]] < size:
                full.append(heapq.heappop(least))
            if not least:
                return None
            load, rank = least[0]
            heapq.heapreplace(least, (load + int(self._cost_of[i]), rank))
            dealt[rank].append(i)
            room[rank] -= size
            for entry in full:
                heapq.heappush(least, entry)
        return dealt

    def _packed(self, sequences: list[int], count: int) -> list[list[int]] | None:
        """The largest first, into `count` packs: each into that which costs least, or by best fit; None where they do
        not fit."""
        for level in (True, False):
            packs: list[list[int]] = [[] for _ in range(count)]
            room, cost = [self._limit] * count, [0] * count
            for i in sequences:
                size = self._sizes[i]
                fitting = [(cost[k] if level else left, k) for k, left in enumerate(room) if left >= size]
                if not fitting:
                    break
                k = min(fitting)[1]
                packs[k].append(i)
                room[k] -= size
                cost[k] += int(self._cost_of[i])
            else:
                return packs
        return None

    def level_ranks(self) -> None:
        """Exchanges between the heaviest rank and a light one, until it is level or no exchange helps."""
        budget = self._splits + SPLITS[0]
        while self._splits < budget:
            heavy = max(range(len(self.load)), key=lambda rank: (self.load[rank], -rank))
            if self.load[heavy] <= self._mean * (1 + LEVEL):
                return
            lightest = sorted(range(len(self.load)), key=lambda rank: (self.load[rank], rank))[:PARTNERS]
            if not any(self._relieve(heavy, light) for light in lightest if light != heavy):
                return

    def _relieve(self, heavy: int, light: int) -> bool:
        """Moves cost from rank `heavy` to rank `light` so that one of them comes to the mean, as far as it can be."""
        excess = self.load[heavy] - self.load[light]
        wanted = int(min(self.load[heavy] - self._mean, max(self._mean - self.load[light], excess / 2)))
        good = max(wanted / 4, self._mean * LEVEL / 2)
        ours, theirs = self.ranks[heavy], self.ranks[light]
        ours.sort(key=lambda k: (-self.cost[k], k))
        theirs.sort(key=lambda k: (-self.cost[k], k))
        more = np.subtract.outer([self.cost[k] for k in ours], [self.cost[k] for k in theirs])

        # As they are first: a pack for a pack.
        i, j = divmod(int(np.abs(more - wanted).argmin()), len(theirs))
        best, change = abs(int(more[i, j]) - wanted), None
        if best > good:
            near = sorted((abs(i - j), -int(more[i, j]), i, j) for i in range(len(ours)) for j in range(len(theirs)))
            for _, _, a, b in near[:PAIRS]:
                split = self._split(ours[a], theirs[b], self.cost[ours[a]] - wanted)
                error = abs(self.cost[ours[a]] - self._cost(split[0]) - wanted) if split else best
                if split and error < best:
                    best, change, i, j = error, split, a, b
                if best <= good:
                    break
        p, q = ours[i], theirs[j]
        moved = self.cost[p] - (self._cost(change[0]) if change else self.cost[q])
        if not self._mean * LEVEL / 2 < moved < excess:
            return False
        if change:
            self._put(p, change[0])
            self._put(q, change[1])
        else:
            ours[i], theirs[j] = q, p
        self.load[heavy] -= moved
        self.load[light] += moved
        return True

    def level_rows(self) -> None:
        """Row j is the j-th costliest pack of every rank: splits two packs of a rank anew where that lowers the
        sum of the rows' largest costs.  What a rank has in all stays the same."""
        for rank in self.ranks:
            rank.sort(key=lambda k: (-self.cost[k], k))
        rows = np.array([[self.cost[k] for k in rank] for rank in self.ranks])  # [dp, microbatches]
        done: set[int] = set()
        budget = self._splits + SPLITS[1]
        while self._splits < budget and len(done) < rows.shape[1] > 1:
            excess = rows.max(axis=0) - rows.mean(axis=0)
            excess[list(done)] = -1
            j = int(excess.argmax())
            if excess[j] <= rows[:, j].mean() * LEVEL or not self._level_row(rows, j):
                done.add(j)

    def _level_row(self, rows: np.ndarray, j: int) -> bool:
        """Lowers the largest of row j, in favour of packs of the same rank that their rows have room for."""
        rank = int(rows[:, j].argmax())
        largest, packs = rows.max(axis=0), self.ranks[rank]
        room = largest - rows[rank]
        for k in np.argsort(-room, kind="stable")[:PARTNERS].tolist():
            wanted = min(int(largest[j] - rows[:, j].mean()), int(room[k]))
            split = self._split(packs[j], packs[k], self.cost[packs[j]] - wanted) if wanted > 0 and k != j else None
            if split:
                changed = rows.copy()
                changed[rank, [j, k]] = [self._cost(part) for part in split]
                order = np.argsort(-changed[rank], kind="stable")
                changed[rank] = changed[rank, order]
                if changed.max(axis=0).sum() < largest.sum():
                    self._put(packs[j], split[0])
                    self._put(packs[k], split[1])
                    self.ranks[rank] = [packs[i] for i in order]
                    rows[:] = changed
                    return True
        return False

    def _cost(self, sequences: list[int]) -> int:
        return int(self._cost_of[sequences].sum())

    def _put(self, pack: int, sequences: list[int]) -> None:
        self.packs[pack] = sequences
        self.size[pack] = int(self._size_of[sequences].sum())
        self.cost[pack] = self._cost(sequences)

    def _split(self, p: int, q: int, wanted: int) -> tuple[list[int], list[int]] | None:
        """The sequences of packs p and q in two packs of which the first costs about `wanted`; None where they would
        not fit.

        All ways to share out the longest; for each, of the others as many as it takes from the shorter end of the
        middle, and those of the shortest whose sizes fill the first pack up exactly.  Which sums these can have is a
        row of bits: `reach | reach << size` adds a sequence.
        """
        self._splits += 1
        pool = sorted(self.packs[p] + self.packs[q])
        long, others = pool[:ENUMERATED], pool[: ENUMERATED - 1 : -1]
        short, middle = others[:EXACT], others[EXACT:]
        ways = self._ways[: 1 << len(long), : len(long)]
        size, cost = ways @ self._size_of[long], ways @ self._cost_of[long]
        most = self._limit - size  # of the others, in the first pack
        least = np.maximum(self.size[p] + self.size[q] - self._limit - size, 0)

        reaches = [1]
        for i in short:
            reaches.append(reaches[-1] | reaches[-1] << self._sizes[i])
        below, above = _nearest(reaches[-1])
        filled, spent = _cumulated(self._size_of[others]), _cumulated(self._cost_of[others])
        exact = filled[len(short)]
        whole = filled[len(short) :] - exact  # of the middle, by how many of it
        paid = spent[len(short) :] - spent[len(short)]

        aim = filled[np.minimum(np.searchsorted(spent, wanted - cost), len(others))]
        aim = np.minimum(np.maximum(aim, least), np.maximum(most, 0))
        taken = np.maximum(np.searchsorted(whole, aim - exact // 2, side="right") - 1, 0)
        rest = np.clip(aim - whole[taken], 0, exact)
        rest = np.where(below[rest] >= least - whole[taken], below[rest], above[rest])
        fits = (rest >= least - whole[taken]) & (rest <= most - whole[taken])
        error = np.abs(cost + paid[taken] + spent[np.searchsorted(filled, rest)] - wanted)
        best = int(np.where(fits, error, np.iinfo(np.int64).max).argmin())
        if not fits[best]:
            return None
        first = {i for bit, i in enumerate(long) if best >> bit & 1} | set(middle[: int(taken[best])])
        left = int(rest[best])
        for i, reach in zip(reversed(short), reversed(reaches[:-1]), strict=True):
            if not reach >> left & 1:  # not without this one
                first.add(i)
                left -= self._sizes[i]
        return [i for i in pool if i in first], [i for i in pool if i not in first]


def _cumulated(values: np.ndarray) -> np.ndarray:
    """[2, 3] -> [0, 2, 5]"""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def _nearest(reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Of every number up to the highest bit that is set: the next one whose bit is, below and above or itself.

    0b100101 -> [0, 0, 2, 2, 2, 5], [0, 2, 2, 5, 5, 5]
    """
    count = reach.bit_length()
    bits = np.unpackbits(np.frombuffer(reach.to_bytes(count // 8 + 1, "little"), dtype=np.uint8), bitorder="little")
    set_bits = np.flatnonzero(bits)
    numbers = np.arange(count)
    return (
        set_bits[np.searchsorted(set_bits, numbers, side="right") - 1],
        set_bits[np.searchsorted(set_bits, numbers)],
    )


def efficiency(work: np.ndarray) -> tuple[float, float]:
    """Per step and per microbatch, of what the packs cost, [dp, num_microbatches].

    [[6, 2], [3, 3]] -> (7 / 8, 7 / (6 + 3))
    """
    mean = work.sum() / len(work)
    return float(mean / work.sum(axis=1).max()), float(mean / work.max(axis=0).sum())
