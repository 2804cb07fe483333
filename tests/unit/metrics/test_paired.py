"""Intervals of differences on the same questions."""

from fractions import Fraction
from math import comb

import pytest

from sft.metrics.paired import Difference, clopper_pearson, difference

# Exact 95% intervals of Clopper and Pearson, as tables and R's binom.test give them.
TABLE = {(0, 10): (0, 0.30850), (1, 10): (0.00253, 0.44502), (5, 10): (0.18709, 0.81291), (10, 10): (0.69150, 1)}


@pytest.mark.parametrize(("counts", "interval"), TABLE.items())
def test_the_exact_interval(counts: tuple[int, int], interval: tuple[float, float]) -> None:
    assert clopper_pearson(*counts) == pytest.approx(interval, abs=1e-5)


def test_each_end_leaves_a_fortieth() -> None:
    """Sums of exact fractions at the two ends."""
    for hits, trials in ((3, 7), (12, 40)):
        low, high = map(Fraction, clopper_pearson(hits, trials))
        above = sum(comb(trials, k) * low**k * (1 - low) ** (trials - k) for k in range(hits, trials + 1))
        below = sum(comb(trials, k) * high**k * (1 - high) ** (trials - k) for k in range(hits + 1))
        assert float(above) == pytest.approx(0.025, rel=1e-9) and float(below) == pytest.approx(0.025, rel=1e-9)


def test_a_difference_counts_only_questions_with_two_results() -> None:
    before = [True] * 12 + [False] * 8
    after = [True] * 2 + [False] * 18  # 10 answers are lost
    found = difference(before, after)
    # 10 of 20 questions differ, none is gained: -1/2 of all; the share of gained ones is at most 0.3085.
    assert found == pytest.approx((-0.5, -0.5, 0.5 * (2 * 0.30850 - 1)), abs=1e-5) and found.is_fall
    assert difference(after, before) == pytest.approx((0.5, 0.5 * (1 - 2 * 0.30850), 0.5), abs=1e-5)
    assert difference(before, before) == Difference(0, 0, 0) and not difference(before, before).is_fall


def test_few_lost_answers_are_no_fall() -> None:
    """5 of 5 lost has probability 1/32 on each side, which is above 1/40; 6 of 6 has 1/64."""
    for lost, is_fall in ((5, False), (6, True)):
        assert difference([True] * 20, [False] * lost + [True] * (20 - lost)).is_fall == is_fall
