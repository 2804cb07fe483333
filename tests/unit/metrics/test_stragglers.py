"""A rank that is slower than the others for ten steps in a row is named."""

import numpy as np

from sft.metrics.stragglers import Stragglers
from sft.metrics.totals import Peak, Totals, quantities
from tests.unit.metric_values import result


def lines(steps: list[tuple[float, int]], *, median: float = 1.0, wait: float = 0.0) -> list[int]:
    """The steps, from 1, after which a line names a rank.  steps: (seconds of its passes, slowest rank)"""
    stragglers = Stragglers()
    found = []
    for number, (seconds, rank) in enumerate(steps, 1):
        peaks = {"passes_s": Peak(value=seconds, rank=rank, median=median), "data_wait_s": Peak(value=wait, rank=3)}
        if stragglers.after(result(**peaks), seconds=2.0):
            found.append(number)
    return found


def test_a_slow_rank_is_named_after_ten_steps_and_again_after_a_hundred() -> None:
    assert lines([(1.1, 5)] * 9) == []
    assert lines([(1.1, 5)] * 120) == [10, 110]


def test_other_ranks_and_quick_steps_begin_anew() -> None:
    assert lines([(1.5, 5)] * 9 + [(1.5, 4)] + [(1.5, 5)] * 10) == [20]
    assert lines([(1.5, 5)] * 9 + [(1.09, 5)] + [(1.5, 5)] * 10) == [20]
    assert lines([(1.0, 0)] * 30) == [] == lines([(0.0, 0)] * 30, median=0.0)


def test_the_line() -> None:
    stragglers = Stragglers()
    slow = result(passes_s=Peak(value=3.0, rank=5, median=2.0), data_wait_s=Peak(value=0.0, rank=0))
    assert [stragglers.after(slow, seconds=4.0) for _ in range(10)][-1] == (
        "WARNING: rank 5 is slow: its passes took 3.00 s, 1.50 times the median of all ranks (2.00 s), and it was the "
        "slowest in 10 steps in a row"
    )


def test_a_wait_for_data_is_named() -> None:
    assert lines([(1.0, 0)] * 12, wait=0.19) == []
    assert lines([(1.0, 0)] * 12, wait=0.2) == [10]


def test_the_peak_over_ranks() -> None:
    """Of ranks with 1, 2, 9 and 4 seconds, the third is the slowest, and the median is 3."""
    declared = quantities(Totals)["passes_s"]
    peak = declared.over_ranks(np.array([[1.0], [2.0], [9.0], [4.0]]), [""])
    assert (peak.value, peak.rank, peak.median) == (9.0, 2, 3.0)
