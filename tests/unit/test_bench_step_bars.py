"""tools/bench/steps/bars.py: which rows meet which bar."""

from typing import Any

import pytest

from tools.bench.harness import Bar
from tools.bench.steps.bars import bars as judge


def judged(rows: list[dict[str, Any]]) -> list[Bar]:
    return list(judge(rows))


def missed(bars: list[Bar]) -> list[Bar]:
    return [bar for bar in bars if bar.is_missed]


def step(case: str, **measured: Any) -> dict[str, Any]:
    found = {"step": case, "status": "done", "device": "cuda", "seconds": 10.0, "steps": 5, "tokens_per_s": 1000.0}
    return {**found, "of_keep": 0.9, "mfu": 0.45, **measured}


def search(shape: str, ratio: float) -> dict[str, Any]:
    return {"longest": shape, "ratio": ratio, "status": "done", "device": "cuda"}


def found(rows: list[dict[str, Any]]) -> dict[str, Bar]:
    bars = judged(rows)
    assert len(bars) == 13
    return {bar.name: bar for bar in bars if bar.value is not None}


ALL_MET = [
    *(step(f"{shape}:{length}:one:{way}") for shape in ("1.7b", "4b") for length in ("64k", "128k")
      for way in ("selective", "selective+offload")),
    step("1.7b:32k:chat:full", tokens_per_s=2000.0),
    step("1.7b:32k:padded:full"),
    *(search(shape, 0.97) for shape in ("0.6b", "1.7b", "4b", "8b")),
]  # fmt: skip


def test_all_are_met() -> None:
    bars = judged(ALL_MET)
    assert missed(bars) == [] and all(bar.value is not None for bar in bars)


def test_nothing_measured_is_nothing_missed() -> None:
    bars = judged([{"step": "4b:64k:one:full", "status": "out of memory at 70 GiB"}])
    assert missed(bars) == [] and [str(bar)[:14] for bar in bars] == ["not measured  "] * 13
    assert judged([{**row, "device": "cpu"} for row in ALL_MET]) == bars


def test_the_best_way_counts_for_the_roofline() -> None:
    rows = [step("4b:64k:one:full", of_keep=0.8), step("4b:64k:one:selective+offload", of_keep=0.86)]
    assert found(rows)["4b at 64K, of the roofline of keep-attention"].value == 0.86
    assert not found([step("4b:64k:chat:full")])  # documents of another kind
    (bar,) = missed(judged(rows[:1]))
    assert str(bar) == "MISSED        4b at 64K, of the roofline of keep-attention: 0.8, at least 0.85"


def test_mfu_is_judged_at_128k_only() -> None:
    assert [bar.name for bar in missed(judged([step("1.7b:64k:one:full", mfu=0.1)]))] == []
    assert [bar.name for bar in missed(judged([step("1.7b:128k:one:full", mfu=0.41)]))] == ["1.7b at 128K, causal MFU"]


def test_packed_is_compared_with_padded_of_the_same_kind() -> None:
    name = "chat, packed over padded"
    packed = step("1.7b:32k:chat:full", tokens_per_s=1990.0)
    assert name not in found([packed, step("4b:32k:padded:full")])
    assert name not in found([packed, step("1.7b:32k:padded:selective")])
    assert name not in found([step("1.7b:32k:chat:selective"), step("1.7b:32k:padded:full")])
    bars = judged([packed, step("1.7b:32k:padded:full")])
    assert [(bar.name, bar.value) for bar in missed(bars)] == [(name, 1.99)]


def test_offloading_is_compared_with_the_same_without() -> None:
    """2.1 s a step over 2 s, from 64K on; the worst pair counts."""
    name = "1.7b from 64K on, time with activations offloaded over without"
    plain, quick = step("1.7b:64k:one:full"), step("1.7b:64k:one:full+offload", seconds=10.1)
    slow = step("1.7b:128k:one:selective+offload", seconds=10.5)
    assert found([plain, quick])[name].value == pytest.approx(1.01)
    bars = judged([plain, quick, step("1.7b:128k:one:selective"), slow])
    assert [(bar.name, bar.value) for bar in missed(bars)] == [(name, pytest.approx(1.05))]
    assert name not in found([plain, slow])
    assert found([plain, step("1.7b:64k:one:full+offload0.5", seconds=10.2)])[name].value == pytest.approx(1.02)
    assert name not in found([step("1.7b:32k:one:full"), step("1.7b:32k:one:full+offload", seconds=20.0)])


def test_the_longest_context() -> None:
    (bar,) = missed(judged([search("8b", 0.94)]))
    assert bar.name == "8b, longest context that fits over that of the equations"
    assert missed(judged([search("8b", 0.95)])) == []
