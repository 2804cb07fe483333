"""tools/bench: rows and bars of checkpoint, load_hf, longest, delta_rule and kernels; no speed is judged."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.plain_flash import PLAIN
from tests.unit.fixtures.recurrence import random_inputs
from tools.bench import __main__ as bench
from tools.bench import checkpoint, delta_rule, kernels, load_hf, longest, trees
from tools.bench.checkpoint import BESIDE, FIRST, STALL, SYNC, WORK, Took
from tools.bench.clock import growth
from tools.bench.harness import Refused

MIB, GIB = 2**20, 2**30


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


# --- load_hf -----------------------------------------------------------------------------------------------------


def test_the_model_fits_the_bytes() -> None:
    """Layers have 60,821,504 parameters, the embedding 262,668,288, a norm 2,048; the model has at least one layer."""
    assert [load_hf.num_layers_for("llama-3.2-1b", gib * GIB) for gib in (1, 0.001)] == [4, 1]
    tensors = load_hf.tensors_of(load_hf.config_of("llama-3.2-1b", 4))
    assert load_hf.num_bytes(tensors) == 2 * (262_668_288 + 2_048 + 4 * 60_821_504)


def grown(num_mib: int) -> dict[str, float]:
    """The growth of this process by one block, after it has held and released another block."""
    bytearray(200 * MIB)
    seconds, peak = growth(lambda: bytearray(num_mib * MIB))
    return {"seconds": seconds, "peak": peak}


def test_a_process_grows_by_its_own_work() -> None:
    """It grows by 64 MiB; memory that the process already holds does not count."""
    here = bytearray(500 * MIB)
    assert 60 * MIB < load_hf.in_new_process(grown, 64)["peak"] < 90 * MIB and len(here) == 500 * MIB
    with pytest.raises(Refused, match="grown: .*negative"):
        load_hf.in_new_process(grown, -1)


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(function: object, model: Path, *arguments: object) -> None:
        assert (model / "model.safetensors").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(load_hf, "in_new_process", interrupted)
    assert bench.main(["load_hf", "--tiny", f"--folder={tmp_path}"]) == 130
    assert list(tmp_path.iterdir()) == []


def test_weights_in_the_page_cache_are_judged_by_a_copy_and_others_by_a_sum() -> None:
    """A model of 8 GiB, of which each of 8 ranks keeps 1 GiB."""
    took = {load_hf.SUM: 1.0, load_hf.COPY: 2.0, load_hf.WHOLE: 3.0, load_hf.PART: 0.5}
    turns = [
        {
            (way, state): {"seconds": seconds, "peak": MIB, "touched": 4 * GIB}
            | ({"kept": GIB, "requested": GIB + GIB // 10} if way == load_hf.PART else {})
            for way, seconds in took.items()
            for state in (load_hf.CACHED, load_hf.COLD)
        }
    ]
    rows = {row["way"]: {"case": "x", "largest": MIB // 2, **row} for row in load_hf.rows_of(turns, 8 * GIB)}
    assert rows["read and place, from disk"]["ratio"] == 3.0 and rows["read and place, cached"]["ratio_of_copy"] == 1.5
    assert rows["read and place, tp 8, from disk"]["touched"] == 4.0
    missed = {bar.name: bar.is_missed for bar in load_hf.bars(list(rows.values()))}
    assert {name.partition(": ")[2]: is_missed for name, is_missed in missed.items() if "seconds" in name} == {
        "seconds, compared with load_file and a copy": False,
        "seconds, compared with load_file and a sum": True,
    }
    assert [is_missed for name, is_missed in missed.items() if "requested" in name] == [False, False, True, True]
    assert not any(is_missed for name, is_missed in missed.items() if "beyond" in name)


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


# --- delta_rule --------------------------------------------------------------------------------------------------


def test_the_plain_kernel_is_judged_at_8k_on_a_cpu() -> None:
    measured = {"device": "cpu", "way": "torch", "fwd_ratio": 0.6, "ratio": 0.71, "saved_ratio": 0.012}
    rows = [{"case": "8k:one", **measured}, {"case": "2k:one", **measured, "ratio": 0.9}]
    assert [(bar.value, bar.bound, bar.is_missed) for bar in delta_rule.bars(rows)] == [
        (0.6, 0.7, False),
        (0.71, 0.7, True),
        (0.012, 0.1, False),
    ]
    assert all(bar.value is None for bar in delta_rule.bars([{**rows[0], "device": "cuda"}]))


def test_saved_bytes_are_those_beyond_the_inputs() -> None:
    """exp saves its result, a product saves both factors; 3 tokens with 2 key heads and 6 value heads of width 8."""
    inputs = random_inputs(3, torch.float32)
    assert delta_rule.saved_bytes(lambda x: x.q * x.k, inputs) == 0
    assert delta_rule.saved_bytes(lambda x: x.q.exp() * x.k, inputs) == 3 * 2 * 8 * 4


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


# --- trees -------------------------------------------------------------------------------------------------------


def test_a_trace_as_a_tree_in_numbers() -> None:
    """System message of 6 tokens, two turns of 2 thinking, 1 action and 3 observation: texts of 9 and 13 tokens.

    The second text has 13 tokens, and the first one adds 3 behind 6 of them: 13^2 + 9^2 - 6^2 = 214.
    """
    trace = trees.Trace(2, system=6, thinking=2, action=1, observation=3)
    assert trace.promised() == {
        "tree": {"tokens": 16, "pairs": 107},
        "separate": {"tokens": 22, "pairs": 125},
    }
    packs = trees.packs_of(trace, 4)
    (tree,) = packs["tree"][0]
    assert tree.tree is not None and tree.tree.branches.forks.tolist() == [0, 6]
    assert [[len(sample.tokens) for sample in pack] for pack in packs["separate"]] == [[9], [13]]
    assert sorted(len(text.tokens) for text in trace.texts()) == [9, 13]
    assert trees.share_saved(19, 22, trace.promised(), "tokens") == pytest.approx(0.5)  # 3 of the 6 promised
