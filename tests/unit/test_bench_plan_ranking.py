"""tools/bench/plan_ranking.py: settings, ranks of numbers, and bars; the tiny run is in test_bench.py."""

import pytest

from tools.bench import plan_ranking
from tools.bench.plan_ranking import WAYS, kendall_tau
from tools.bench.plan_ranking_settings import Setting, Work

WORK = Work(settings=WAYS, hidden=256, layers=4, tokens=4096, rounds=1, steps=1)


@pytest.mark.parametrize(
    ("second", "tau"), [([1, 2, 3], 1), ([10, 30, 20], 1 / 3), ([3, 2, 1], -1), ([1, 1, 2], 2 / 3), ([7, 7, 7], 0)]
)
def test_kendalls_tau(second: list[float], tau: float) -> None:
    assert kendall_tau([1, 2, 3], second) == pytest.approx(tau)


def test_every_way_trains_the_same_tokens_on_two_ranks() -> None:
    for way in WAYS:
        setting = Setting.read(way)
        layout = WORK.layout(setting)
        assert str(setting) == way and layout.world_size == 2
        assert layout.global_batch_size * setting.seq_length == 4096
    layouts = {way: WORK.layout(Setting.read(way)) for way in WAYS}
    assert {(of.tp, of.cp, of.pp, of.dp, of.ep) for of in layouts.values()} == {
        (2, 1, 1, 1, 1),
        (1, 2, 1, 1, 1),
        (1, 1, 2, 1, 1),
        (1, 1, 1, 2, 1),
        (1, 1, 1, 2, 2),
    }
    assert len(WAYS) == len(set(WAYS)) >= 12


@pytest.mark.parametrize("text", ["tp2:x:none", "tp3:512:none", "tp2:512:some", "tp2:512:none:long"])
def test_a_way_names_what_it_may(text: str) -> None:
    with pytest.raises(ValueError, match="is not tp2|cp2"):
        Setting.read(text)


def test_bars() -> None:
    """Of three layouts one pair is in the wrong order: tau 1/3.  Two of three are within 20%, and one is far below."""
    times = [(1.0, 1.2), (2.0, 1.6), (3.0, 1.4)]
    rows = [
        {"case": network, "measured_s": real, "predicted_s": predicted, "ratio": predicted / real}
        for network in ("none", "400mbit")
        for real, predicted in times
    ]
    bars = list(plan_ranking.bars(rows))
    assert [bar.value for bar in bars] == [pytest.approx(1 / 3), pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert [bar.bound for bar in bars] == [0.6, 0.6, 2 / 3] and [bar.is_missed for bar in bars] == [True, True, False]
