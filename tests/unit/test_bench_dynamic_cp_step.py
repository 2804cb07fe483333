"""tools/bench/dynamic_cp_step.py: the rate of the loopback, rows and bars; the tiny run is in test_bench.py."""

from typing import Any

import pytest

from tools.bench import dynamic_cp_step
from tools.bench.dynamic_cp_rank import Work
from tools.bench.dynamic_cp_step import Case, Link


def test_the_rate_adds_the_wanted_share() -> None:
    """A step of 4 s sends 100 MB, and 1 s of it is hidden: 5 s at 160 Mbit/s add 4 s, 9 s at 88.9 Mbit/s add 8 s."""
    link = Link(seconds=4.0, num_bytes=1e8, hidden_s=1.0, tflops=0.1)
    assert [link.rate(share) for share in (1.0, 2.0)] == [160_000_000, 88_888_889]


def test_hidden_seconds_are_those_that_a_limit_does_not_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit 4 s and 100 MB.  At 200 Mbit/s, which are 4 s, the step takes 7 s: 1 s is hidden."""
    rates = []

    def measured(work: Work, rate: str) -> dict[str, Any]:
        rates.append((rate, work.tflops))
        return measurement([4.0, 4.0] if rate == "none" else [7.0, 7.0], [1.0, 1.0])

    monkeypatch.setattr(dynamic_cp_step, "measured", measured)
    work = Work(num_ranks=2, hidden=32, layers=1, seq_length=1024, packs=1, batches=2, rounds=1)
    assert dynamic_cp_step.link_of(work) == Link(4.0, 1e8, 1.0, 0.5)
    assert rates == [("none", None), ("200000000bit", 0.5)]


def measurement(fixed: list[float], dynamic: list[float], sent: int = 60) -> dict[str, Any]:
    """Of two batches.  sent: by dynamic CP in the first batch; the plan says 60"""

    def fact(sent: int, planned: int, loopback: float, makespan_ns: int, alone: dict[str, float]) -> dict[str, Any]:
        plan = {"num_bytes": planned, "makespan_ns": makespan_ns, "share_of_tokens": alone}
        return {"sent": sent, "loopback": loopback, "plan": plan}

    of_fixed = [fact(200, 200, 1e8, 20, {"2": 1.0})] * 2
    of_dynamic = [fact(sent, 60, 3e7, 11, {"1": 0.5, "2": 0.5}), fact(0, 0, 1e7, 9, {"1": 1.0})]
    seconds = {"fixed": fixed, "dynamic": dynamic}
    return {"seconds": seconds, "facts": {"fixed": of_fixed, "dynamic": of_dynamic}, "gb_s": 0.1, "tflops": 0.5}


def test_a_row_in_numbers() -> None:
    """Two batches, three rounds.  Ratios are of pairs, and seconds are means over batches of medians over rounds."""
    row = dynamic_cp_step.row_of(measurement([4, 6, 4, 6, 9, 6], [2, 3, 1, 6, 9, 6]), unlimited_s=2.0)
    expected = {
        "fixed_s": 5.0, "dynamic_s": 4.0, "ratio": 0.75, "ratio_min": 0.25, "ratio_max": 1.0, "share": 1.5,
        "fixed_bytes": 200, "dynamic_bytes": 30, "planned_bytes": 30, "unplanned_bytes": 0, "loopback_ratio": 0.2,
        "predicted": 0.5, "alone": 0.75,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected


def test_bars() -> None:
    """80% at a share of 1, which may be measured as 1.15; every byte is in the plan."""
    row = dynamic_cp_step.row_of(measurement([4, 4], [3.2, 3.2]), unlimited_s=2.0)
    slow = dynamic_cp_step.row_of(measurement([4, 4], [3.3, 3.3], sent=61), unlimited_s=1.8)
    rows = [{"case": "2:1", "wanted_share": 1.0, **row}, {"case": "4:1", "wanted_share": 1.0, **slow}]
    bars = list(dynamic_cp_step.bars([*rows, {"case": "2:0", **row}]))
    assert [bar.bound for bar in bars] == [0.80, 1.15, 0, 0.80, 1.15, 0, 1.02, 0]
    assert [bar.is_missed for bar in bars] == [False, False, False, True, True, True, False, False]


@pytest.mark.parametrize("text", ["2", "1:1", "two:1", "2:-1", "2:x"])
def test_a_case_is_ranks_and_share(text: str) -> None:
    assert Case.read("4:0.5") == Case(4, 0.5)
    with pytest.raises(ValueError):
        Case.read(text)
