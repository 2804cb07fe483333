"""tools/bench, whole steps and attention: their arithmetic and their rows; no speed is checked."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import __main__ as bench
from tools.bench import attention, attention_ways
from tools.bench.attention_ways import Pack, Way
from tools.bench.step import bars as bars_of_steps
from tools.bench.steps import case as step_case
from tools.bench.steps import process, roofline, trainer
from tools.bench.steps.case import StepCase
from tools.bench.steps.loop import StepOptions

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> StepCase:
    """Hidden 4, ffn 8, 2 heads of 2, 1 layer, tied, 10 tokens: 960 FLOPs per token, 240 per label, 24 per squared
    length."""
    monkeypatch.setitem(step_case.SHAPES, "tiny", (1, 4, 8, 2, 2, 2, True))
    monkeypatch.setattr(StepCase, "vocab", 10)
    return StepCase.read("tiny:128:one")


def row(**changes: Any) -> dict[str, Any]:
    rates = {"flash": {"forward": 80.0, "backward": 50.0}, "cudnn": {"forward": 100.0, "backward": 40.0}}
    found = {
        "tokens": 100,
        "labels": 50,
        "attention_flops": 24_000.0,
        "seconds": 1000.0,
        "device": "cuda",
        "status": "done",
    }
    return {**found, "constants": {"gemm": 7900.0, "attention": rates}, **changes}


# --- arithmetic --------------------------------------------------------------------------------------------------


def test_what_a_step_takes_at_least(small: StepCase) -> None:
    """Products run at 650 / 790 of the rate 7900, that is 6500: 96,000 in layers and 12,000 in the head.  Attention has
    8,000 in forward at the rate 100, and 2.5 times as many in backward at 50."""
    found = roofline.floors(small, row(), gemm=7900.0, forward=100.0, backward=50.0)
    assert found["none"] == pytest.approx(108_000 / 6500 + 80 + 400)
    assert found["keep"] == pytest.approx(140_000 / 6500 + 480)  # the layers are computed once more
    assert found["full"] == pytest.approx(140_000 / 6500 + 560)  # and attention forward, too
    faster = roofline.floors(small, row(), gemm=15_800.0, forward=100.0, backward=50.0)
    assert faster["keep"] == pytest.approx(140_000 / 13_000 + 480)


def test_what_follows_from_a_row(small: StepCase) -> None:
    """132,000 FLOPs in 1000 s are 132 per second, 13.2% of a peak of 1e-9 TFLOP/s; the best rate of any kernel
    counts."""
    found = roofline.with_rates(small, row(), peak_tflops=1e-9)
    assert (found["tokens_per_s"], found["mfu"]) == (0.1, pytest.approx(0.132))
    assert found["of_full"] == pytest.approx((140_000 / 6500 + 560) / 1000)
    assert "mfu" not in roofline.with_rates(small, row(device="cpu"), peak_tflops=1e-9)


def test_frozen_weights_take_two_products_of_three(small: StepCase) -> None:
    """Forward and the gradient of the input: layers 64,000 and head 8,000; recompute would be a third product.

    Adapters of rank 2 have 2 (4 (4 + 4) + 3 (4 + 8)) = 136 elements, with 6 FLOPs each.
    """
    case, adapters = small.using("full+lora2"), 6 * 136 * 100
    assert roofline.useful_flops(case, row()) == pytest.approx(64_000 + adapters + 8_000 + 24_000)
    found = roofline.floors(case, row(), gemm=7900.0, forward=100.0, backward=50.0)
    assert found["none"] == pytest.approx((72_000 + adapters) / 6500 + 80 + 400)
    assert found["keep"] == pytest.approx((72_000 + adapters + 32_000) / 6500 + 480)


def test_what_lora_saves_is_a_note() -> None:
    states = {"trained": 16_384, "gradient_bytes": 2**20, "optimizer_bytes": 2**21}
    measured = {"lora": states, "full": {name: 10 * value for name, value in states.items()}}
    alone = "trained 16,384 (full {}); MiB of gradients 1.0 (full {}), of the optimizer 2.0 (full {})"
    assert roofline.adapters_note(measured) == alone.format("163,840", "10.0", "20.0")
    assert roofline.adapters_note({"lora": states}) == alone.format(*["does not fit beside it"] * 3)
    assert roofline.adapters_note({}) == ""


def test_efficiency_is_of_the_slowest_rank() -> None:
    whole = {"fwd_s": 2.0, "both_s": 4.0}
    ranks = [{"fwd_s": 0.5, "both_s": both, "extra": 10 + i} for i, both in enumerate([1.0, 1.25, 1.0, 1.0])]
    found = attention.row_of(4, ranks, 7e12, whole)
    assert (found["fwd_efficiency"], found["efficiency"]) == (1.0, pytest.approx(0.8))
    assert found["fwd_tflops"] == pytest.approx(7 / 4 / 0.5)
    assert found["both_tflops"] == pytest.approx(3.5 * 7 / 4 / 1.25)
    assert found["extra"] == 13


# --- valid cases -------------------------------------------------------------------------------------------------


def test_a_case_names_its_recipe() -> None:
    case = StepCase.read("4B:64k:one:selective+offload0.8+tile4k+optim0.5")
    assert str(case) == "4b:64k:one:selective+offload0.8+tile4k+optim0.5"
    config = case.config("cuda", also=["parallel.overlap=false"])
    train = config.train
    assert (train.recompute, train.offload_fraction, train.mlp_tile) == ("selective", 0.8, 4096)
    assert (config.optim.offload_fraction, config.data.seq_length, config.run.precision) == (0.5, 65_536, "bf16")
    assert not config.parallel.overlap
    plain = StepCase.read("4b:64k:one")
    assert str(plain) == "4b:64k:one:selective" and plain.config("cpu").train.mlp_tile is None
    assert plain.config("cpu").run.precision == "fp32"
    assert plain.using("full+optim1").config("cpu").run.precision == "bf16"  # Adam on the host needs bf16
    assert str(StepCase.read("4b:1000:chat:full+optim+tile")) == "4b:1000:chat:full+tile4k+optim1"
    assert plain.using("full+offload").config("cpu").train.offload_fraction == 1.0
    assert str(StepCase.read("4b:1000:chat:full+lora")) == "4b:1000:chat:full+lora16"
    assert plain.using("full+lora8").config("cpu").lora.rank == 8 and plain.config("cpu").lora.rank is None


# --- shares of time ----------------------------------------------------------------------------------------------


def test_shares_of_a_trace() -> None:
    """Shares of 1 ms.  A product inside the head's range counts for the head; a range of the CPU says nothing about the
    device."""
    rows = [
        ("sft: head", 0, 1000, "user_annotation"),
        ("sft: head", 300, 100, "gpu_user_annotation"),
        ("void flash_fwd_kernel<cutlass::bfloat16_t>", 0, 200, "kernel"),
        ("nvjet_tst_128x256", 200, 100, "kernel"),
        ("sm90_xmma_gemm_bf16", 300, 50, "kernel"),
        ("void at::native::vectorized_elementwise_kernel", 400, 150, "kernel"),
        ("Memcpy DtoD", 600, 25, "gpu_memcpy"),
        ("aten::mm", 0, 900, "cpu_op"),
    ]
    events = [{"ph": "X", "name": name, "ts": start, "dur": us, "cat": kind} for name, start, us, kind in rows]
    wanted = {"attention": 0.2, "linear": 0.1, "head": 0.05, "optimizer": 0, "copies": 0.025, "other": 0.15}
    assert roofline.shares(events, 1e-3) == pytest.approx({**wanted, "idle": 0.475})
    assert roofline.shares(events[-1:], 1e-3) == {}


# --- rows without measurements -----------------------------------------------------------------------------------


def test_a_case_that_cannot_fit_is_a_row() -> None:
    """fp32 on a CPU: 16 bytes for each of 8,190,735,360 parameters; 73,856 bytes for each token in 36 layers."""

    def status(case: str, arguments: str) -> str:
        options = bench.parse(["step", "--tiny", *arguments.split()])
        return str(process.measured(StepCase.read(case), options)["status"])

    device = "needs at least 203 GiB, and the device has 80 GiB"
    assert status("8b:32k:one", "--memory 80 --host-gib 128") == f"skipped: {device}; --try-all runs it"
    host = "needs 122 GiB of host memory, and the host has 128 GiB"
    assert status("8b:32k:one:full+optim1", "--host-gib 128") == f"skipped: {host}; --try-all runs it"
    assert status("tiny:512:one", "--minutes -1") == "not started: -1 minutes have passed"


def test_out_of_memory_and_failures_are_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_much(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert bench.main(["step", "--tiny", "--set", "log.every=often"]) == 2
    assert 'step: log.every = "often" (command line: log.every=often)' in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(process, "ROOT", Path("/"))  # the child process does not find tools
        patch.setenv("PYTHONPATH", "")
        failed = process.measured(StepCase.read("tiny:512:chat:full"), bench.parse(["step", "--tiny"]))
    assert failed["status"].startswith("failed: ") and "tools" in failed["error"]
    monkeypatch.setattr(trainer, "measure", too_much)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * GIB)
    row = process.child(StepCase.read("tiny:512:chat:full"), StepOptions(device="cpu"))
    assert row["status"].startswith("out of memory at 3.0 GiB, after ")


# --- attention ---------------------------------------------------------------------------------------------------


def test_what_a_kernel_refuses_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN accepts short packs here but no long ones, Transformer Engine none.  Faults of our code do not count as
    refusals."""
    monkeypatch.setattr(attention_ways, "why_not", lambda name, device: None)

    def by_cudnn(p: Pack) -> Way:
        if len(p.tensors[0]) > 256:
            raise RuntimeError("No available kernel. Aborting execution.\nmore")
        return attention_ways.by_sdpa(p)

    def by_te(p: Pack) -> Way:
        raise ValueError("No dot product attention backend is available")

    monkeypatch.setattr(attention_ways, "by_cudnn", by_cudnn)
    monkeypatch.setattr(attention_ways, "by_te", by_te)
    asked = bench.parse("attention --tiny --cases 256:one,512:one --ways te,cudnn".split())
    (absent,) = attention.prepare(asked)
    timed, refused = [row for case in asked.cases for row in attention.measure(case, asked)]
    assert absent["status"] == "does not run here: No dot product attention backend is available"
    assert (timed["way"], timed["length"]) == ("cudnn", 256) and timed["both_s"] > 0
    assert (refused["length"], refused["status"]) == (512, "refused: No available kernel. Aborting execution.")
    found, why = roofline.attention_rates(StepCase.read("tiny:512:one"), CPU, ["sdpa", "te", "cudnn"])
    assert list(found) == ["sdpa"] and list(why) == ["te", "cudnn"]
    assert not attention_ways.is_refusal("te", torch.OutOfMemoryError())
    monkeypatch.setattr(attention_ways, "by_plain", by_cudnn)
    with pytest.raises(RuntimeError, match="No available kernel"):
        bench.main(["attention", "--tiny", "--ways", "plain", "--cases", "512:one"])


def test_a_wrong_attention_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = attention_ways.stand_in
    monkeypatch.setattr(attention_ways, "stand_in", lambda *a, **k: (right(*a, **k)[0] * 1.1, right(*a, **k)[1]))
    assert bench.main(["attention", "--tiny", "--cases", "256:one"]) == 2
    output = capsys.readouterr()
    assert "attention: flash, cp 1, rank 0: the output differs by " in output.err and "fwd ms" not in output.out


# --- rows and bars -------------------------------------------------------------------------------------------------


def step(case: str, **measured: Any) -> dict[str, Any]:
    row = {"step": case, "status": "done", "device": "cuda", "seconds": 10.0, "steps": 5, "tokens_per_s": 1000.0}
    return {**row, "of_keep": 0.9, "mfu": 0.45, **measured}


def longest(shape: str, ratio: float) -> dict[str, Any]:
    return {"longest": shape, "ratio": ratio, "status": "done", "device": "cuda"}


def test_all_bars_are_met() -> None:
    shapes = [f"{shape}:{length}:one" for shape in ("1.7b", "4b") for length in ("64k", "128k")]
    rows = [step(f"{case}:{way}") for case in shapes for way in ("selective", "selective+offload")]
    rows += [step("1.7b:32k:chat:full", tokens_per_s=2000.0), step("1.7b:32k:padded:full")]
    rows += [step("1.7b:64k:one:full"), step("1.7b:64k:one:attention_kept", seconds=8.7)]
    rows += [longest(shape, 0.97) for shape in ("0.6b", "1.7b", "4b", "8b")]
    bars = list(bars_of_steps(rows))
    assert len(bars) == 14 and not any(bar.is_missed or bar.value is None for bar in bars)
    elsewhere = [*({**row, "device": "cpu"} for row in rows), {"step": "4b:64k:one:full", "status": "out of memory"}]
    assert all(bar.value is None for bar in bars_of_steps(elsewhere))


ROOFLINE = "4b at 64K, share of the roofline with keep-attention"
OFFLOAD = "1.7b from 64K on, time with activation offload"
PACKED = step("1.7b:32k:chat:full", tokens_per_s=1990.0)


@pytest.mark.parametrize(
    "rows, missed",
    [
        ([step("4b:64k:one:full", of_keep=0.8)], [f"{ROOFLINE}: 0.8, at least 0.85"]),
        # the best row counts
        ([step("4b:64k:one:full", of_keep=0.8), step("4b:64k:one:selective+offload", of_keep=0.86)], []),
        ([step("1.7b:128k:one:full", mfu=0.41)], ["1.7b at 128K, causal MFU: 0.41, at least 0.42"]),
        ([step("1.7b:64k:one:full", mfu=0.1)], []),
        ([step("4b:64k:one:full+lora16", of_keep=0.8)], []),
        ([longest("8b", 0.94)], ["8b, longest context that fits / predicted longest context: 0.94, at least 0.95"]),
        ([longest("8b", 0.95)], []),
        ([PACKED, step("1.7b:32k:padded:full")], ["chat, tokens per second packed / padded: 1.99, at least 2"]),
        ([PACKED, step("1.7b:32k:padded:selective"), step("4b:32k:padded:full")], []),
        (  # 2.1 s per step over 2 s; the worst pair counts
            [step(f"1.7b:{length}:one:full") for length in ("64k", "128k")]
            + [step("1.7b:64k:one:full+offload", seconds=10.1), step("1.7b:128k:one:full+offload0.5", seconds=10.5)],
            [f"{OFFLOAD} / time without: 1.05, at most 1.03"],
        ),
        ([step("1.7b:64k:one:full"), step("1.7b:64k:one:selective+offload", seconds=10.5)], []),
        (
            [step("1.7b:64k:one:full"), step("1.7b:64k:one:attention_kept", seconds=8.9)],
            ["1.7b at 64K, time with attention kept / time with full recomputation: 0.89, at most 0.88"],
        ),
        ([step("1.7b:64k:one:full+offload"), step("1.7b:64k:one:attention_kept")], []),
        ([step("1.7b:32k:one:full"), step("1.7b:32k:one:full+offload", seconds=20.0)], []),
    ],
)
def test_bars_that_are_missed(rows: list[dict[str, Any]], missed: list[str]) -> None:
    assert [str(bar) for bar in bars_of_steps(rows) if bar.is_missed] == [f"MISSED        {text}" for text in missed]
