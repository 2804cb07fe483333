"""Distributes the sequences of two packs over the two packs anew, so that the first pack has about a wanted cost.

`balance.py` chooses the two packs and the wanted cost.  The method sorts the sequences of both packs by length:

    long    the 10 longest sequences: all ways to distribute them are tried, at most 1,024
    middle  the sequences between long and short: the first pack gets the shortest ones, as many as it needs
    short   the 24 shortest sequences: a subset sum finds which of them bring the first pack to the wanted size

Sequences are numbered in order of falling cost.  Sizes are in units of doc_multiple tokens, so sums are small.
"""

import numpy as np

NUM_LONG, NUM_SHORT = 10, 24


class PairSplitter:
    """Distributes sequences of pairs of packs of one global batch anew.

    sizes, costs  int64 [n]: size and cost of each sequence of the batch
    limit         the largest size of a pack
    """

    def __init__(self, sizes: np.ndarray, costs: np.ndarray, limit: int) -> None:
        self._sizes, self._costs, self._limit = sizes, costs, limit
        self._ways = np.arange(1 << NUM_LONG)[:, None] >> np.arange(NUM_LONG) & 1  # [ways, long sequences]
        self.num_splits = 0  # number of calls of `split`; the caller limits it

    def split(self, first: list[int], second: list[int], wanted_cost: int) -> tuple[list[int], list[int]] | None:
        """Two packs with the sequences of both; the first costs about `wanted_cost`.  None if the sequences do not fit.

        sizes = costs 4 3 2 1, limit 6, packs [0, 1] and [2, 3]: wanted 5 -> [1, 2] and [0, 3]
        """
        self.num_splits += 1
        pool = sorted(first + second)
        long, rest = pool[:NUM_LONG], pool[: NUM_LONG - 1 : -1]  # the rest in order of rising length
        short, middle = rest[:NUM_SHORT], rest[NUM_SHORT:]
        reachable = self._reachable_sizes(short)
        num_middle, short_size, error = self._targets(long, rest, reachable[-1], wanted_cost)
        way = int(error.argmin())
        if error[way] == np.iinfo(np.int64).max:
            return None
        chosen = {sequence for bit, sequence in enumerate(long) if way >> bit & 1}
        chosen |= set(middle[: int(num_middle[way])])
        chosen |= self._subset(short, reachable, int(short_size[way]))
        return [i for i in pool if i in chosen], [i for i in pool if i not in chosen]

    def _targets(
        self, long: list[int], rest: list[int], reachable: int, wanted_cost: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Three arrays, int64 [ways], with an entry for each way to distribute the long sequences.

        They are the number of middle sequences in the first pack, the total size of its short sequences, and
        |cost of the first pack - wanted cost|: the largest int64 if the sequences do not fit.
        """
        ways = self._ways[: 1 << len(long), : len(long)]
        long_size, long_cost = ways @ self._sizes[long], ways @ self._costs[long]
        pool_size = int(self._sizes[long].sum() + self._sizes[rest].sum())
        most = self._limit - long_size  # size that the rest may add to the first pack
        least = np.maximum(pool_size - self._limit - long_size, 0)  # size that the rest must add; then pack 2 fits
        sizes, costs = _prefix_sums(self._sizes[rest]), _prefix_sums(self._costs[rest])
        num_short = min(len(rest), NUM_SHORT)
        all_short = sizes[num_short]
        middle_sizes, middle_costs = sizes[num_short:] - all_short, costs[num_short:] - costs[num_short]

        aim = sizes[np.minimum(np.searchsorted(costs, wanted_cost - long_cost), len(rest))]
        aim = np.minimum(np.maximum(aim, least), np.maximum(most, 0))
        num_middle = np.maximum(np.searchsorted(middle_sizes, aim - all_short // 2, side="right") - 1, 0)
        from_middle = middle_sizes[num_middle]
        below, above = _nearest_set_bits(reachable)
        short_size = np.clip(aim - from_middle, 0, all_short)
        short_size = np.where(below[short_size] >= least - from_middle, below[short_size], above[short_size])
        fits = (short_size >= least - from_middle) & (short_size <= most - from_middle)
        short_cost = costs[np.searchsorted(sizes, short_size)]
        error = np.abs(long_cost + middle_costs[num_middle] + short_cost - wanted_cost)
        return num_middle, short_size, np.where(fits, error, np.iinfo(np.int64).max)

    def _reachable_sizes(self, short: list[int]) -> list[int]:
        """For the first 0, 1, 2, ... short sequences: the sums of all their subsets, as the set bits of an integer.

        sizes 2 and 3 -> 0b1, 0b101, 0b101101: the subsets of both add up to 0, 2, 3 or 5
        """
        reachable = [1]
        for sequence in short:
            reachable.append(reachable[-1] | reachable[-1] << int(self._sizes[sequence]))
        return reachable

    def _subset(self, short: list[int], reachable: list[int], size: int) -> set[int]:
        """Short sequences whose sizes add up to `size`.  Prefers the first ones of `short`."""
        chosen = set()
        for sequence, without in zip(reversed(short), reversed(reachable[:-1]), strict=True):
            if not without >> size & 1:
                chosen.add(sequence)
                size -= int(self._sizes[sequence])
        return chosen


def _prefix_sums(values: np.ndarray) -> np.ndarray:
    """The sums of the first 0, 1, 2, ... values: [2, 3] -> [0, 2, 5]"""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values, dtype=np.int64)])


def _nearest_set_bits(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """For every position up to the highest set bit: the nearest set bit at or below it, and at or above it.

    0b100101 -> [0, 0, 2, 2, 2, 5], [0, 2, 2, 5, 5, 5]
    """
    count = bits.bit_length()
    as_bytes = np.frombuffer(bits.to_bytes(count // 8 + 1, "little"), dtype=np.uint8)
    positions = np.flatnonzero(np.unpackbits(as_bytes, bitorder="little"))
    numbers = np.arange(count)
    below = positions[np.searchsorted(positions, numbers, side="right") - 1]
    return below, positions[np.searchsorted(positions, numbers)]
