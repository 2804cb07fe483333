"""Assigns the sequences of a global batch to data-parallel ranks, so that all ranks finish at about the same time.

Decides which sequences share each of the dp x num_microbatches slots; a slot holds one pack.  `plan.py` decides which
sequences a global batch has.  Balancing never drops or repeats a sequence or moves it to another step, and no slot
holds more than seq_length padded tokens.  Costs are integers and position breaks ties, so every rank computes the same
assignment.

The cost of a sequence is padded_tokens + attention(length).  The unit is a token's computation outside attention.
attention(length) is length ** 2 / crossover, and less in layers with a sliding window (`flops.AttentionCost`).
`efficiency` measures the balance; the best value is 1:

    per step        mean cost of a rank / largest cost of a rank; a step ends when the slowest rank has finished
    per microbatch  the same ratio if ranks wait for each other after every microbatch, as with expert parallelism

The method has these steps:

    packs      are sorted by cost and assigned in rows of dp packs; the costliest pack of a row goes to the rank with
               the least cost
    ranks      exchange sequences: a rank with too high a cost gives a long sequence for about as many tokens of short
               sequences
    sequences  are assigned one by one instead of in packs, if the ranks are still not balanced and if they fit
    rows       are balanced last: a rank distributes the sequences of two of its packs anew
    level      if all ranks wait for each other in every microbatch, rows are then balanced again (`level.py`)
"""

import heapq
from collections.abc import Sequence

import numpy as np

from sft.data.packing.level import level
from sft.data.packing.pair_split import PairSplitter
from sft.layers.flops import AttentionCost
from sft.parallel.shapes import SampleSizes, attention_cost, padded

Slots = list[list[tuple[int, ...]]]  # sample ids by rank and microbatch

# Shares of the mean cost of a rank.  Exchanges end when no rank exceeds the mean by more than BALANCED.  An exchange
# must move more than BALANCED / 2.  Single sequences are assigned only if a rank exceeds the mean by more than
# REASSIGN_ABOVE.
BALANCED = 0.002
REASSIGN_ABOVE = 0.01
NUM_PARTNERS, NUM_PAIRS = 6, 16  # ranks that the costliest rank tries to exchange with, and pairs of packs per rank
MAX_SPLITS = 400  # splits of pairs of packs in each balancing of ranks or rows; limits the time
FILL = 0.999  # share of a rank's capacity that single sequences may take, because they rarely fill packs exactly


def costs(lengths: SampleSizes, *, doc_multiple: int, attention: AttentionCost) -> np.ndarray:
    """int64 [n]: the cost of each sequence, in tokens.

    lengths [1000, 4000], doc_multiple 32, AttentionCost(1000) -> [1024 + 1000, 4000 + 16000]
    """
    return padded(lengths, doc_multiple) + np.rint(attention_cost(lengths, attention)).astype(np.int64)


def assign(
    packs: Sequence[Sequence[int]],
    lengths: SampleSizes,
    *,
    dp: int,
    seq_length: int,
    doc_multiple: int,
    attention: AttentionCost,
    meets: bool = False,
) -> Slots:
    """Assigns the samples of `packs` to slots so that `dp` ranks have balanced costs.  Returns sample ids by rank and
    microbatch.

    packs    sample ids of the dp x num_microbatches packs of a global batch; packs may be empty
    lengths  sizes of all samples of the corpus, by sample id
    meets    whether all ranks wait for each other in every microbatch.  Then rows are balanced, not ranks (`level.py`)

    Costs 8 1 7 2, two ranks:                     packs (0,) (1,) (2,) (3,) -> [[(0,), (1,)], [(2,), (3,)]]
    Costs 9 1 1 1 of sizes 3 1 1 1, two ranks:    packs (0,) (1, 2, 3)      -> [[(0,)], [(1, 2, 3)]], the best possible

    Without `meets`, the largest cost of a rank is never higher than in a round robin, where pack k is microbatch
    k // dp of rank k % dp.
    """
    round_robin = [[tuple(pack) for pack in packs[rank::dp]] for rank in range(dp)]
    ids = np.array([i for pack in packs for i in pack], dtype=np.int64)
    if dp == 1 or len(ids) == 0:
        return round_robin
    pack_of = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
    of_ids = costs(lengths[ids], doc_multiple=doc_multiple, attention=attention)
    costliest_first = np.lexsort((-np.asarray(lengths[ids]), -of_ids))
    ids, pack_of = ids[costliest_first], pack_of[costliest_first]
    batch = _Batch(
        [np.flatnonzero(pack_of == k).tolist() for k in range(len(packs))],
        sizes=padded(lengths[ids], doc_multiple) // doc_multiple,
        costs=of_ids[costliest_first],
        limit=seq_length // doc_multiple,
        dp=dp,
    )
    round_robin_cost = max(sum(batch.cost[rank::dp]) for rank in range(dp))
    batch.assign_packs()
    batch.balance_ranks()
    if batch.assign_sequences():
        batch.balance_ranks()
    batch.balance_rows()
    if meets:
        batch.level_rows()
        return batch.by_rank(ids)
    if max(batch.load) > round_robin_cost:
        return round_robin
    return batch.by_rank(ids)


class _Batch:
    """The packs of a batch during the assignment.  Sequences are numbered in order of falling cost.

    packs, cost  the sequences of each pack, and the cost of these sequences
    ranks, load  the packs of each rank, and the cost of these packs
    """

    def __init__(self, packs: list[list[int]], *, sizes: np.ndarray, costs: np.ndarray, limit: int, dp: int) -> None:
        self._costs, self._limit = costs, limit
        self._sizes: list[int] = sizes.tolist()  # in units of doc_multiple tokens
        self.packs = packs
        self.cost = [int(costs[pack].sum()) for pack in packs]
        self.ranks: list[list[int]] = [[] for _ in range(dp)]
        self.load = [0] * dp
        self._mean = sum(self.cost) / dp
        self._splitter = PairSplitter(sizes, costs, limit)

    def assign_packs(self) -> None:
        """Assigns packs in rows of dp packs, costliest first.  In each row, every rank gets one pack; the costliest
        pack goes to the rank with the least cost so far."""
        dp = len(self.ranks)
        self.ranks, self.load = [[] for _ in range(dp)], [0] * dp
        order = sorted(range(len(self.packs)), key=lambda k: (-self.cost[k], k))
        for first in range(0, len(order), dp):
            least = sorted(range(dp), key=lambda rank: (self.load[rank], rank))
            for k, rank in zip(order[first : first + dp], least, strict=True):
                self.ranks[rank].append(k)
                self.load[rank] += self.cost[k]

    def assign_sequences(self) -> bool:
        """Assigns single sequences to ranks and packs each rank anew.  Returns whether the assignment changed.

        Nothing changes if the ranks are balanced, if the new assignment is not better, or if sequences do not fit.
        """
        if max(self.load) <= self._mean * (1 + REASSIGN_ABOVE):
            return False
        of_ranks = self._sequences_of_ranks()
        if of_ranks is None:
            return False
        loads = [self._cost(sequences) for sequences in of_ranks]
        if max(loads) >= max(self.load):
            return False
        packed = [self._packed(sequences, len(rank)) for sequences, rank in zip(of_ranks, self.ranks, strict=True)]
        if not all(packed):
            return False
        for rank, packs in zip(self.ranks, packed, strict=True):
            for k, sequences in zip(rank, packs or (), strict=True):
                self._put(k, sequences)
        self.load = loads
        return True

    def _sequences_of_ranks(self) -> list[list[int]] | None:
        """Assigns each sequence, costliest first, to the rank with the least cost among the ranks with room for it.

        Returns the sequences of each rank; None if a sequence fits on no rank.
        """
        of_ranks: list[list[int]] = [[] for _ in self.ranks]
        left = [int(len(rank) * self._limit * FILL) for rank in self.ranks]
        least = [(0, rank) for rank in range(len(self.ranks))]
        for i, size in enumerate(self._sizes):  # in order of falling cost
            full = []
            while least and left[least[0][1]] < size:
                full.append(heapq.heappop(least))
            if not least:
                return None
            load, rank = least[0]
            heapq.heapreplace(least, (load + int(self._costs[i]), rank))
            of_ranks[rank].append(i)
            left[rank] -= size
            for entry in full:
                heapq.heappush(least, entry)
        return of_ranks

    def _packed(self, sequences: list[int], count: int) -> list[list[int]] | None:
        """Packs the sequences in their order into `count` packs.  Each goes into the pack with room that costs least.

        If a sequence finds no room, all are packed again, each into the fullest pack with room (best fit).  None if
        they do not fit so either.
        """
        for by_cost in (True, False):
            packs: list[list[int]] = [[] for _ in range(count)]
            left, cost = [self._limit] * count, [0] * count
            for i in sequences:
                size = self._sizes[i]
                fitting = [(cost[k] if by_cost else free, k) for k, free in enumerate(left) if free >= size]
                if not fitting:
                    break
                k = min(fitting)[1]
                packs[k].append(i)
                left[k] -= size
                cost[k] += int(self._costs[i])
            else:
                return packs
        return None

    def balance_ranks(self) -> None:
        """Exchanges sequences between the costliest rank and one of the cheapest, until the ranks are balanced, no
        exchange helps, or MAX_SPLITS splits were tried."""
        budget = self._splitter.num_splits + MAX_SPLITS
        while self._splitter.num_splits < budget:
            heavy = max(range(len(self.load)), key=lambda rank: (self.load[rank], -rank))
            if self.load[heavy] <= self._mean * (1 + BALANCED):
                return
            lightest = sorted(range(len(self.load)), key=lambda rank: (self.load[rank], rank))[:NUM_PARTNERS]
            if not any(self._relieve(heavy, light) for light in lightest if light != heavy):
                return

    def _relieve(self, heavy: int, light: int) -> bool:
        """Exchanges sequences of a pack of rank `heavy` and a pack of rank `light`, to bring one of the two ranks as
        near to the mean cost as possible.  Returns whether an exchange was made."""
        excess = self.load[heavy] - self.load[light]
        wanted = int(min(self.load[heavy] - self._mean, max(self._mean - self.load[light], excess / 2)))
        good = max(wanted / 4, self._mean * BALANCED / 2)
        heavy_packs, light_packs = self.ranks[heavy], self.ranks[light]
        heavy_packs.sort(key=lambda k: (-self.cost[k], k))
        light_packs.sort(key=lambda k: (-self.cost[k], k))
        more = np.subtract.outer([self.cost[k] for k in heavy_packs], [self.cost[k] for k in light_packs])

        # First try to exchange two whole packs.
        i, j = divmod(int(np.abs(more - wanted).argmin()), len(light_packs))
        best, change = abs(int(more[i, j]) - wanted), None
        if best > good:
            near = sorted(
                (abs(i - j), -int(more[i, j]), i, j) for i in range(len(heavy_packs)) for j in range(len(light_packs))
            )
            for _, _, a, b in near[:NUM_PAIRS]:
                split = self._split(heavy_packs[a], light_packs[b], self.cost[heavy_packs[a]] - wanted)
                error = abs(self.cost[heavy_packs[a]] - self._cost(split[0]) - wanted) if split else best
                if split and error < best:
                    best, change, i, j = error, split, a, b
                if best <= good:
                    break
        p, q = heavy_packs[i], light_packs[j]
        moved = self.cost[p] - (self._cost(change[0]) if change else self.cost[q])
        if not self._mean * BALANCED / 2 < moved < excess:
            return False
        if change:
            self._put(p, change[0])
            self._put(q, change[1])
        else:
            heavy_packs[i], light_packs[j] = q, p
        self.load[heavy] -= moved
        self.load[light] += moved
        return True

    def balance_rows(self) -> None:
        """Distributes the sequences of two packs of a rank anew where this lowers the sum of the rows' largest costs.

        Row j holds the j-th costliest pack of every rank.  The cost of a rank does not change.
        """
        for rank in self.ranks:
            rank.sort(key=lambda k: (-self.cost[k], k))
        rows = np.array([[self.cost[k] for k in rank] for rank in self.ranks])  # [dp, microbatches]
        balanced: set[int] = set()
        budget = self._splitter.num_splits + MAX_SPLITS
        while self._splitter.num_splits < budget and len(balanced) < rows.shape[1] > 1:
            excess = rows.max(axis=0) - rows.mean(axis=0)
            excess[list(balanced)] = -1
            j = int(excess.argmax())
            if excess[j] <= rows[:, j].mean() * BALANCED or not self._balance_row(rows, j):
                balanced.add(j)

    def _balance_row(self, rows: np.ndarray, j: int) -> bool:
        """Tries to lower the largest cost of row j: distributes the sequences of its costliest pack and of another pack
        of the same rank anew.  Returns whether this lowered the sum of the rows' largest costs."""
        rank = int(rows[:, j].argmax())
        largest, packs = rows.max(axis=0), self.ranks[rank]
        allowed = largest - rows[rank]
        for k in np.argsort(-allowed, kind="stable")[:NUM_PARTNERS].tolist():
            wanted = min(int(largest[j] - rows[:, j].mean()), int(allowed[k]))
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

    def level_rows(self) -> None:
        """Balances rows by exchanges between all packs, even if the costs of ranks become less balanced."""
        self.packs = level(self.packs, self._costs, self._splitter, len(self.ranks))
        self.cost = [self._cost(pack) for pack in self.packs]
        self.assign_packs()

    def by_rank(self, ids: np.ndarray) -> Slots:
        """The ids of the sequences, by rank and microbatch."""
        return [[tuple(ids[self.packs[k]].tolist()) for k in rank] for rank in self.ranks]

    def _split(self, p: int, q: int, wanted_cost: int) -> tuple[list[int], list[int]] | None:
        return self._splitter.split(self.packs[p], self.packs[q], wanted_cost)

    def _cost(self, sequences: list[int]) -> int:
        return int(self._costs[sequences].sum())

    def _put(self, pack: int, sequences: list[int]) -> None:
        self.packs[pack] = sequences
        self.cost[pack] = self._cost(sequences)


def efficiency(work: np.ndarray) -> tuple[float, float]:
    """The efficiency of an assignment per step and per microbatch.  work: cost of each pack, [dp, num_microbatches]

    [[6, 2], [3, 3]] -> (7 / 8, 7 / (6 + 3))
    """
    mean = work.sum() / len(work)
    return float(mean / work.sum(axis=1).max()), float(mean / work.max(axis=0).sum())
