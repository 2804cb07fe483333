"""Compares two results on the same questions with an exact test.

A question that both results answer right, or both wrong, says nothing about a difference.  Of the others, let `gained`
be right only after, and `lost` only before.  If neither result is better, each of these is as probable as the other.
The interval of the share gained / (gained + lost) is that of Clopper and Pearson (1934), so the test is McNemar's exact
test.  The difference of the accuracies is (gained - lost) / questions.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
_HALVINGS = 60  # of an interval from 0 to 1


class Difference(NamedTuple):
    """The share of right answers after minus before, and the ends of its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0 or self.high < 0

    @property
    def is_fall(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.high < 0


def difference(before: Sequence[bool], after: Sequence[bool]) -> Difference:
    """The difference of two results on the same questions, at least one, in the same order."""
    pairs = list(zip(before, after, strict=True))
    gained = sum(a and not b for b, a in pairs)
    lost = sum(b and not a for b, a in pairs)
    low, high = clopper_pearson(gained, gained + lost) if gained + lost else (0.5, 0.5)
    share = (gained + lost) / len(pairs)
    return Difference((gained - lost) / len(pairs), share * (2 * low - 1), share * (2 * high - 1))


def clopper_pearson(hits: int, trials: int) -> tuple[float, float]:
    """The exact interval of the probability of a hit.  trials: at least 1"""
    tail = (1 - CONFIDENCE) / 2

    def at_least(p: float) -> float:
        """The probability of `hits` hits or more."""
        return sum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(hits, trials + 1))

    def more(p: float) -> float:
        """The probability of more than `hits` hits."""
        return sum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(hits + 1, trials + 1))

    low = 0.0 if hits == 0 else _where(lambda p: at_least(p) >= tail)
    high = 1.0 if hits == trials else _where(lambda p: more(p) >= 1 - tail)
    return low, high


def _where(is_reached: Callable[[float], bool]) -> float:
    """The smallest number from 0 to 1 at which a condition holds that holds for all larger numbers."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_reached(middle) else (middle, high)
    return high
