"""Learning rates at every step as literals, and the parameters that decay."""

from types import SimpleNamespace
from typing import Any

import pytest

from sft.config import OptimConfig
from sft.config.schedule import Schedule
from sft.errors import ConfigError
from sft.mcore.optimizer.build import build_scheduler

RATES = {  # 10 steps with peak 1.0: one rate per step, from step 1
    "constant": (dict(schedule="constant"), [1.0] * 10),
    "constant with warm-up": (dict(schedule="constant", warmup_steps=4), [0.25, 0.5, 0.75] + [1.0] * 7),
    "linear": (dict(schedule="linear"), [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]),
    "linear to a floor": (
        dict(schedule="linear", min_lr=0.5, warmup_steps=2),
        [0.5, 1.0, 0.9375, 0.875, 0.8125, 0.75, 0.6875, 0.625, 0.5625, 0.5],
    ),
    "cosine": (  # (1 + cos(pi k / 10)) / 2
        dict(schedule="cosine"),
        [0.97552826, 0.9045085, 0.79389263, 0.6545085, 0.5, 0.3454915, 0.20610737, 0.0954915, 0.02447174, 0.0],
    ),
    "cosine with a fraction of warm-up": (
        dict(schedule="cosine", warmup_fraction=0.2),  # then (1 + cos(pi k / 8)) / 2
        [0.5, 1.0, 0.96193977, 0.85355339, 0.69134172, 0.5, 0.30865828, 0.14644661, 0.03806023, 0.0],
    ),
    "wsd": (
        dict(schedule="wsd", warmup_steps=2, wsd_decay_fraction=0.4),
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0],
    ),
    "wsd with a cosine": (  # (1 + cos(pi k / 4)) / 2
        dict(schedule="wsd", wsd_decay="cosine", wsd_decay_fraction=0.4),
        [1.0] * 6 + [0.85355339, 0.5, 0.14644661, 0.0],
    ),
    "wsd with a square root": (  # 1 - sqrt(k / 4)
        dict(schedule="wsd", wsd_decay="minus_sqrt", wsd_decay_fraction=0.4),
        [1.0] * 6 + [0.5, 0.29289322, 0.1339746, 0.0],
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_learning_rates(name: str) -> None:
    keys, expected = RATES[name]
    optimizer: Any = SimpleNamespace(param_groups=[{}, {"wd_mult": 0.0}])
    optim = OptimConfig(lr=1.0, weight_decay=0.1, **keys)
    scheduler = build_scheduler(optim, optimizer, 10)
    seen = []
    for _ in range(10):
        scheduler.step(1)
        seen.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[1]["lr"] == seen[-1]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert seen == pytest.approx(expected, abs=1e-7)
    schedule = Schedule.resolve(optim, 10)
    assert [schedule.rate(optim, step) for step in range(1, 11)] == pytest.approx(seen, rel=1e-12)


def test_warm_up_must_leave_something_to_train() -> None:
    with pytest.raises(ConfigError, match="warm-up of 10 steps does not fit a run of 10 steps"):
        Schedule.resolve(OptimConfig(lr=1.0, warmup_steps=10), 10)
    assert Schedule.resolve(OptimConfig(lr=1.0, warmup_steps=9), 10).warmup_steps == 9


@pytest.mark.parametrize(
    "fraction, steps", [(0.03, 3), (0.031, 4), (0.07, 7), (0.14, 14), (0.28, 28), (0.55, 55), (0.001, 1), (0.0, 0)]
)
def test_a_share_of_the_steps_is_taken_of_the_number_as_written(fraction: float, steps: int) -> None:
    """A partial step counts as a whole step.  In floats, 0.07 * 100 is above 7."""
    assert Schedule.resolve(OptimConfig(lr=1.0, warmup_fraction=fraction), 100).warmup_steps == steps


def test_a_final_decay_is_rounded_of_the_number_as_written() -> None:
    """57.5 steps are rounded to the even number, 58; in floats, 0.575 * 100 is below 57.5."""
    wsd = OptimConfig(lr=1.0, schedule="wsd", wsd_decay_fraction=0.575)
    assert Schedule.resolve(wsd, 100).wsd_decay_steps == 58
