"""tools/bench, whole steps and attention: their arithmetic and their rows; no speed is judged."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools.bench import __main__ as bench
from tools.bench import attention, attention_stand_in, attention_ways, trades
from tools.bench.attention_ways import Pack, Way
from tools.bench.steps import case as step_case
from tools.bench.steps import process, rates, roofline, trainer
from tools.bench.steps.case import StepCase
from tools.bench.steps.loop import StepOptions

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> StepCase:
    """Hidden 4, ffn 8, 2 heads of 2, 1 layer, tied, 10 tokens: 960 FLOPs a token, 240 a label, 24 a square."""
    monkeypatch.setitem(step_case.SHAPES, "tiny", (1, 4, 8, 2, 2, 2, True))
    monkeypatch.setattr(StepCase, "vocab", 10)
    return StepCase.read("tiny:128:one")


def row(**changes: Any) -> dict[str, Any]:
    rates = {"flash": {"forward": 80.0, "backward": 50.0}, "cudnn": {"forward": 100.0, "backward": 40.0}}
    found = {"tokens": 100, "labels": 50, "squares": 1000, "seconds": 1000.0, "device": "cuda", "status": "done"}
    return {**found, "constants": {"gemm": 7900.0, "attention": rates}, **changes}


# --- arithmetic --------------------------------------------------------------------------------------------------


def test_what_a_step_takes_at_least(small: StepCase) -> None:
    """Products at 650 of 790: layers 96,000 and head 12,000 at 6500; attention 8,000 at 100, 2.5 times that at 50."""
    found = roofline.floors(small, row(), gemm=7900.0, forward=100.0, backward=50.0)
    assert found["none"] == pytest.approx(108_000 / 6500 + 80 + 400)
    assert found["keep"] == pytest.approx(140_000 / 6500 + 480)  # layers once more
    assert found["full"] == pytest.approx(140_000 / 6500 + 560)  # and attention forward
    faster = roofline.floors(small, row(), gemm=15_800.0, forward=100.0, backward=50.0)
    assert faster["keep"] == pytest.approx(140_000 / 13_000 + 480)


def test_what_follows_from_a_row(small: StepCase) -> None:
    """132,000 FLOPs in 1000 s are 132 a second, of a peak of 1e-9 TFLOP/s 13.2%; the best rate of any kernel counts."""
    found = roofline.with_rates(small, row(), peak_tflops=1e-9)
    assert (found["tokens_per_s"], found["mfu"]) == (0.1, pytest.approx(0.132))
    assert found["of_full"] == pytest.approx((140_000 / 6500 + 560) / 1000)
    assert "mfu" not in roofline.with_rates(small, row(device="cpu"), peak_tflops=1e-9)


def test_flops_of_attention() -> None:
    """Documents of 2 and 4 tokens, 3 heads of 8."""
    assert Pack.random(np.array([0, 2, 6]), (3, 1, 8), CPU).flops == 960.0


def test_efficiency_is_of_the_slowest_rank() -> None:
    whole = {"fwd_s": 2.0, "both_s": 4.0}
    ranks = [{"fwd_s": 0.5, "both_s": both, "extra": 10 + i} for i, both in enumerate([1.0, 1.25, 1.0, 1.0])]
    found = attention.row_of(4, ranks, 7e12, whole)
    assert (found["fwd_efficiency"], found["efficiency"]) == (1.0, pytest.approx(0.8))
    assert found["fwd_tflops"] == pytest.approx(7 / 4 / 0.5)
    assert found["both_tflops"] == pytest.approx(3.5 * 7 / 4 / 1.25)
    assert found["extra"] == 13


def test_padded_is_to_the_longest_of_the_same_samples() -> None:
    seq_length, multiple, lengths = trainer.documents_of(StepCase.read("1.7b:32k:padded"), 3)
    assert len(lengths) == 48 and lengths.max() <= multiple < lengths.max() + 64
    assert seq_length % multiple == 0 and 32_768 - multiple < seq_length <= 32_768


# --- what can be asked for ---------------------------------------------------------------------------------------


def test_a_case_names_its_recipe() -> None:
    case = StepCase.read("4B:64k:one:selective+offload0.8+tile4k+optim0.5")
    assert str(case) == "4b:64k:one:selective+offload0.8+tile4k+optim0.5"
    config = case.config("cuda", also=["parallel.overlap=false"])
    assert (config.train.recompute, config.train.offload_fraction, config.train.mlp_tile) == (
        "selective",
        0.8,
        4096,
    )
    assert (config.optim.offload_fraction, config.data.seq_length, config.run.precision) == (0.5, 65_536, "bf16")
    assert not config.parallel.overlap
    plain = StepCase.read("4b:64k:one")
    assert str(plain) == "4b:64k:one:selective" and plain.config("cpu").train.mlp_tile is None
    # Adam on the host needs bf16
    assert (
        plain.config("cpu").run.precision == "fp32" and plain.using("full+optim1").config("cpu").run.precision == "bf16"
    )
    assert str(StepCase.read("4b:1000:chat:full+optim+tile")) == "4b:1000:chat:full+tile4k+optim1"
    assert StepCase.read("4b:64k:one:full+offload1") == StepCase.read("4b:64k:one:full+offload")
    assert str(plain.using("full+offload")) == "4b:64k:one:full+offload"
    assert plain.using("full+offload").config("cpu").train.offload_fraction == 1.0


def test_trades_are_pairs_with_the_first() -> None:
    assert [case.memory_keys for case in trades.read("1.7b:64k")] == [
        "selective",
        "full",
        "selective+offload",
        "full+offload",
        "selective+tile4k",
        "none",
        "selective+optim1",
        "selective",
    ]
    found = trades.read("8b:32k+optim1")
    assert {str(case).split(":one:")[0] for case in found} == {"8b:32k"}
    assert [case.memory_keys for case in found][2] == "selective+offload+optim1" and len(found) == 7


# --- where the time goes -----------------------------------------------------------------------------------------


def event(name: str, start: float, us: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": us}


def test_shares_of_a_trace() -> None:
    """Of 1 ms.  A product in the head is the head's; a range of the CPU says nothing about the device."""
    found = roofline.shares(
        [
            event("sft: head", 0, 1000, "user_annotation"),
            event("sft: head", 300, 100, "gpu_user_annotation"),
            event("void flash_fwd_kernel<cutlass::bfloat16_t>", 0, 200),
            event("nvjet_tst_128x256", 200, 100),
            event("sm90_xmma_gemm_bf16", 300, 50),
            event("void at::native::vectorized_elementwise_kernel", 400, 150),
            event("Memcpy DtoD", 600, 25, "gpu_memcpy"),
            event("aten::mm", 0, 900, "cpu_op"),
        ],
        1e-3,
    )
    wanted = {"attention": 0.2, "linear": 0.1, "head": 0.05, "optimizer": 0, "copies": 0.025, "other": 0.15}
    assert found == pytest.approx({**wanted, "idle": 0.475})
    assert roofline.shares([event("aten::mm", 0, 900, "cpu_op")], 1e-3) == {}


# --- rows that are not numbers -----------------------------------------------------------------------------------


def options(*arguments: str) -> argparse.Namespace:
    return bench.parse(["step", "--tiny", *arguments])


def test_a_case_that_cannot_fit_is_a_row() -> None:
    row = process.measured(StepCase.read("8b:32k:one"), options("--memory", "80", "--host-gib", "128"))
    # fp32 on a CPU: 16 bytes of 8,190,735,360 parameters; 73,856 of each token in 36 layers
    assert row["status"] == "skipped: 203 GiB by arithmetic, 80 GiB there; --try-all tries"
    row = process.measured(StepCase.read("8b:32k:one:full+optim1"), options("--host-gib", "128"))
    assert row["status"] == "skipped: 122 GiB of host memory by arithmetic, 128 GiB there; --try-all tries"
    row = process.measured(StepCase.read("tiny:512:one"), options("--minutes", "-1"))
    assert row["status"] == "not begun: -1 minutes are over"


def test_out_of_memory_and_failures_are_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_much(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert bench.main(["step", "--tiny", "--set", "log.every=often"]) == 2
    assert 'step: log.every = "often" (command line: log.every=often)' in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(process, "ROOT", Path("/"))  # a child that finds no tools
        patch.setenv("PYTHONPATH", "")
        failed = process.measured(StepCase.read("tiny:512:chat:full"), options())
    assert failed["status"].startswith("failed: ") and "tools" in failed["error"]
    monkeypatch.setattr(trainer, "measure", too_much)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * GIB)
    row = process.child(StepCase.read("tiny:512:chat:full"), StepOptions(device="cpu"))
    assert row["status"].startswith("out of memory at 3.0 GiB, after ")


def test_a_trade_is_told_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps in 4 s, and one in 3 s: half as long again.  What was not measured has no ratio."""
    rows = iter([{"status": "out of memory"}, *({"status": "done", "step_s": seconds} for seconds in (2.0, 3.0))])
    monkeypatch.setattr(trades, "measured", lambda case, options: next(rows))
    found = list(trades.measure(trades.read("1.7b:64k")[:3], argparse.Namespace(keys=0)))
    assert [(row["way"], row.get("ratio")) for row in found] == [
        ("selective", None), ("full", 1.0), ("selective+offload", 1.5)
    ]  # fmt: skip


# --- attention ---------------------------------------------------------------------------------------------------


def attention_rows(*arguments: str) -> list[dict[str, Any]]:
    asked = bench.parse(["attention", "--tiny", *arguments])
    rows = [*attention.prepare(asked)]
    return rows + [row for case in asked.cases for row in attention.measure(case, asked)]


def test_what_a_kernel_refuses_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN takes short packs here and no long ones, Transformer Engine none."""
    monkeypatch.setattr(attention_ways, "why_not", lambda name, device: None)

    def by_cudnn(p: Pack) -> Way:
        if len(p.tensors[0]) > 256:
            raise RuntimeError("No available kernel. Aborting execution.\nmore")
        return attention_ways.by_sdpa(p)

    def by_te(p: Pack) -> Way:
        raise ValueError("No dot product attention backend is available")

    monkeypatch.setattr(attention_ways, "by_cudnn", by_cudnn)
    monkeypatch.setattr(attention_ways, "by_te", by_te)
    absent, timed, refused = attention_rows("--cases", "256:one,512:one", "--ways", "te,cudnn")
    assert absent["status"] == "does not run here: No dot product attention backend is available"
    assert (timed["way"], timed["length"]) == ("cudnn", 256) and timed["both_s"] > 0
    assert (refused["length"], refused["status"]) == (512, "refused: No available kernel. Aborting execution.")
    found, why = rates.attention_rates(StepCase.read("tiny:512:one"), CPU, ["sdpa", "te", "cudnn"])
    assert list(found) == ["sdpa"] and list(why) == ["te", "cudnn"]


def test_a_fault_of_ours_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(p: Pack) -> Way:
        raise RuntimeError("plain")

    monkeypatch.setattr(attention_ways, "by_plain", broken)
    with pytest.raises(RuntimeError, match="plain"):
        bench.main(["attention", "--tiny", "--ways", "plain"])
    assert not attention_ways.is_refusal("te", torch.OutOfMemoryError())


def test_a_wrong_attention_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = attention_stand_in.stand_in
    monkeypatch.setattr(attention_stand_in, "stand_in", lambda *a, **k: (right(*a, **k)[0] * 1.1, right(*a, **k)[1]))
    assert bench.main(["attention", "--tiny", "--cases", "256:one"]) == 2
    output = capsys.readouterr()
    assert "attention: flash, cp 1, rank 0: the output, of norm " in output.err and "fwd ms" not in output.out
