"""tools/bench: rows and bars of checkpoint, longest and kernels; no speed is judged."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.plain_flash import PLAIN
from tools.bench import __main__ as bench
from tools.bench import checkpoint, kernels, longest
from tools.bench.checkpoint import BESIDE, FIRST, STALL, SYNC, WORK, Took
from tools.bench.clock import growth

MIB = 2**20


# --- checkpoint --------------------------------------------------------------------------------------------------


def saves(**seconds: float) -> dict[str, list[Took]]:
    """Every row with three measurements of a second, or around the seconds that are given for it."""
    turns = {name: [Took(1.0, 0), Took(1.0, 3 << 20), Took(1.0, 1 << 20)] for name in checkpoint.COMPARED_WITH}
    turns[FIRST] = [Took(0.5, 512 << 20)]
    for name, value in seconds.items():
        turns[name] = [Took(9.0), Took(value, 2 << 20), Took(0.001)]  # the median is the one in the middle
    return turns


@pytest.mark.parametrize("precision, layers, hidden", [("bf16", 10, 768), ("fp32", 10, 704)])
def test_a_parameter_of_bf16_takes_14_bytes(precision: str, layers: int, hidden: int) -> None:
    """1024 MiB are 76.7 million parameters in bf16, or 67.1 million in fp32, which needs no bf16 copy."""
    config = checkpoint.config_of(precision, 1024, 3)
    assert (config.model.num_layers, config.model.hidden_size, config.run.precision) == (layers, hidden, precision)


def test_rows_of_saves_and_loads() -> None:
    turns = saves(**{SYNC: 2.0, "torch.save": 0.5, STALL: 0.25, "torch.load": 4.0, BESIDE: 1.5})
    rows = {row.pop("way"): row for row in checkpoint.rows_of(turns, 3_000_000_000)}
    assert rows["torch.save"] == {"seconds": 0.5, "bytes_per_s": 6e9, "peak": 2 << 20}
    sync = {"seconds": 2.0, "bytes_per_s": 1.5e9, "peak": 2 << 20, "ratio": 4.0, "compared_with": "torch.save"}
    assert rows[SYNC] == sync
    assert (rows[FIRST]["peak"], rows[FIRST]["ratio"], rows[STALL]["ratio"]) == (512 << 20, 0.25, 0.125)
    verified = {"seconds": 1.0, "bytes_per_s": 3e9, "peak": 3 << 20, "ratio": 0.25, "compared_with": "torch.load"}
    assert rows["load, verify full"] == verified
    assert rows[WORK] == {"seconds": 1.0}
    assert rows[BESIDE] == {"seconds": 1.5, "ratio": 1.5, "compared_with": WORK}


@pytest.mark.parametrize("stall, is_missed", [(0.3, False), (0.32, True)])
def test_an_async_save_stalls_for_15_percent(stall: float, is_missed: bool) -> None:
    """The first save, which allocates buffers, does not count."""
    rows = [{"case": "bf16", **row} for row in checkpoint.rows_of(saves(**{SYNC: 2.0, STALL: stall}), 1)]
    (bar,) = checkpoint.bars(rows)
    assert bar.is_missed == is_missed and (bar.value, bar.bound) == (stall / 2, 0.15)


def test_a_process_grows_by_its_own_work() -> None:
    """It grows by 64 MiB; memory that the process already holds, or held before, does not count."""
    here = bytearray(500 * MIB)
    bytearray(200 * MIB)
    _, peak = growth(lambda: bytearray(64 * MIB))
    assert 60 * MIB < peak < 90 * MIB and len(here) == 500 * MIB


# --- longest -----------------------------------------------------------------------------------------------------


def tries(limit: int, predicted: int) -> longest.Search:
    return longest.search(predicted, lambda length: length <= limit, 1000)


@pytest.mark.parametrize("limit", [1_000, 37_000, 95_000, 99_999, 101_000, 250_000])
def test_the_longest_is_found_to_within_two_percent(limit: int) -> None:
    search = tries(limit, 100_000)
    assert search.stopped is None and search.fails is not None
    assert search.fits <= limit < search.fails
    assert search.fails - search.fits <= max(1000, 0.02 * search.fits)
    assert all(length % 1000 == 0 for length, _ in search.tried)
    assert search.ratio == search.fits / 100_000


def test_a_good_prediction_takes_three_tries_or_four() -> None:
    assert tries(101_000, 100_400).tried == [(100_000, True), (105_000, False), (102_000, False)]
    assert tries(97_500, 100_000).tried == [(100_000, False), (95_000, True), (97_000, True), (98_000, False)]


def test_a_search_ends_where_nothing_fits_or_nothing_is_known() -> None:
    def stopped(length: int) -> bool:
        if length > 100_000:
            raise longest.Stopped("not started: 5 minutes have passed")
        return True

    assert (tries(0, 100_000).fits, tries(0, 100_000).ratio, tries(0, 100_000).fails) == (0, 0.0, 1000)
    assert (tries(5000, 0).fits, tries(5000, 0).ratio) == (5000, None)
    search = longest.search(100_000, stopped, 1000)
    assert (search.fits, search.fails, search.stopped) == (100_000, None, "not started: 5 minutes have passed")
    assert longest.search(1000, lambda length: True, 1000).stopped == "12 tries"


# --- kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", kernels.LAYERS)
def test_every_kernel_is_compared_with_float64(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flash kernel, as tests/plain_flash.py has it, with windows that hide keys, sinks and soft caps."""
    monkeypatch.setattr(kernels, "FLASH", {"torch's flash kernel": PLAIN})
    monkeypatch.setattr(kernels, "CHECKED", (5, 40, 1, 23, 60))
    monkeypatch.setattr(kernels, "CHECKED_WINDOW", 20)
    options = bench.parse(["kernels", "--tiny", "--cases", f"{layer}:one", "--ways", "torch", "--tokens", "32"])
    (row,) = kernels.measure(options.cases[0], options)
    assert row["tokens"] == (16 if layer == "512" else 32) and 0 < row["error"] < 4e-3
    (bar,) = kernels.bars([{"case": layer, **row}])
    assert not bar.is_missed


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(*given: Any, **how: Any) -> Any:
        dquery, dkeys, dvalues = PLAIN.backward(*given, **how)
        return dquery, 1.02 * dkeys, dvalues

    monkeypatch.setattr(kernels, "FLASH", {"torch's flash kernel": replace(PLAIN, backward=backward)})
    options = bench.parse(["kernels", "--tiny", "--cases", "64:one", "--ways", "torch", "--tokens", "32"])
    (row,) = kernels.measure(options.cases[0], options)
    assert row["error"] == pytest.approx(0.02, rel=0.05)


def test_flops_count_visible_keys_alone() -> None:
    """Of two documents of 2 and 4 tokens, 3 heads of 8: halves of the squares, and with a window of 2 tokens less."""
    boundaries = np.array([0, 2, 6])
    assert kernels.Layer(3, 1, 8, 8).flops(boundaries) == 960
    assert kernels.Layer(3, 1, 8, 8, window=2).flops(boundaries) == 768
