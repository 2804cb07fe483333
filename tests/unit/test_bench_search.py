"""tools/bench/longest.py: which lengths are tried."""

import pytest

from tools.bench import longest


def tries(limit: int, predicted: int, grain: int = 1000) -> longest.Search:
    return longest.search(predicted, lambda length: length <= limit, grain)


@pytest.mark.parametrize("limit", [1_000, 37_000, 95_000, 99_999, 100_000, 101_000, 104_000, 250_000])
def test_the_longest_is_found_to_within_two_percent(limit: int) -> None:
    found = tries(limit, 100_000)
    assert found.stopped is None and found.fails is not None
    assert found.fits <= limit < found.fails
    assert found.fails - found.fits <= max(1000, 0.02 * found.fits)
    assert all(length % 1000 == 0 for length, _ in found.tried)
    assert found.ratio == found.fits / 100_000


def test_a_good_prediction_takes_three_tries_or_four() -> None:
    assert tries(101_000, 100_400).tried == [(100_000, True), (105_000, False), (102_000, False)]
    assert tries(97_500, 100_000).tried == [(100_000, False), (95_000, True), (97_000, True), (98_000, False)]


def test_nothing_fits() -> None:
    found = tries(0, 100_000)
    assert (found.fits, found.ratio) == (0, 0.0) and found.fails == 1000
    assert tries(5000, 0).fits == 5000 and tries(5000, 0).ratio is None


def test_a_try_that_says_nothing_ends_the_search() -> None:
    def fits(length: int) -> bool:
        if length > 100_000:
            raise longest.Stopped("not begun: 5 minutes are over")
        return True

    found = longest.search(100_000, fits, 1000)
    assert (found.fits, found.fails, found.stopped) == (100_000, None, "not begun: 5 minutes are over")


def test_a_search_ends() -> None:
    found = longest.search(1000, lambda length: True, 1000)
    assert (len(found.tried), found.stopped) == (12, "12 tries")
