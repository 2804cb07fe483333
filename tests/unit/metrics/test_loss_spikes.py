"""Which losses are told as spikes, on losses written by hand."""

import random

from sft.metrics.loss_spikes import LossSpikes


def told(losses: list[float]) -> list[int]:
    """Places, counted from 0, of which something is said."""
    spikes = LossSpikes()
    return [place for place, loss in enumerate(losses) if spikes.check(loss) is not None]


def noise(count: int, middle: float = 2.0, spread: float = 0.05) -> list[float]:
    rng = random.Random(11)
    return [rng.gauss(middle, spread) for _ in range(count)]


def test_the_line_names_the_loss_and_what_is_usual() -> None:
    """Distances from the median 2.05 are 0, 0.05 / 31 twice, ...; the middle one of 63 is 16 * 0.05 / 31 = 0.0258."""
    spikes = LossSpikes()
    usual = [2.0 + 0.1 * i / 62 for i in range(63)]
    assert [spikes.check(loss) for loss in usual] == [None] * 63
    assert spikes.check(4.0) == "4.0000, the median of earlier losses is 2.0500 +- 0.0383"


def test_a_spike_does_not_hide_the_next() -> None:
    """Nor is noise told: within six standard deviations, as measured, lie all but two in a billion."""
    losses = noise(100)
    for place in (50, 51, 52, 60):
        losses[place] = 1000.0
    losses[70] = 3.0
    assert told(losses) == [50, 51, 52, 60, 70]


def test_of_the_first_16_none_is_told() -> None:
    assert told([2.0] * 15 + [50.0]) == []
    assert told([2.0] * 16 + [50.0]) == [16]


def test_constant_losses_are_not_told_and_what_leaves_them_by_far_is() -> None:
    """Without any spread a hundredth of the loss stands for it: six of them are usual."""
    assert told([2.0] * 100) == [] and told([0.0] * 100) == []
    assert told([2.0] * 30 + [2.11]) == []
    assert told([2.0] * 30 + [2.13]) == [30]


def test_a_fall_is_no_spike() -> None:
    assert told(noise(30) + [0.1] + noise(30)) == []
    assert told([5.0 - 0.04 * step for step in range(120)]) == []


def test_only_the_last_64_count() -> None:
    """When 32 of 64 are of the new level, the median is 3.0 and 6 * 1.4826 above it is usual."""
    assert told([2.0] * 64 + [4.0] * 100) == list(range(64, 96))
