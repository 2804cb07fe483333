"""tools/bench_step.py and bench_attention.py: their arithmetic, their rows, and that they run; no speed is judged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools import (
    attention_ways,
    bench_attention,
    bench_step,
    measure,
    step_case,
    step_choices,
    step_roofline,
    step_tables,
)
from tools.step_choices import Case

GIB = 2**30


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Case:
    """Hidden 4, ffn 8, 2 heads of 2, 1 layer, tied, 10 tokens: 960 FLOPs a token, 240 a label, 24 a square."""
    monkeypatch.setitem(step_choices.SHAPES, "tiny", (1, 4, 8, 2, 2, 2, True))
    monkeypatch.setattr(Case, "vocab", 10)
    return Case.read("tiny:128:one")


def row(**changes: Any) -> dict[str, Any]:
    rates = {"flash": {"forward": 80.0, "backward": 50.0}, "cudnn": {"forward": 100.0, "backward": 40.0}}
    found = {"tokens": 100, "labels": 50, "squares": 1000, "seconds": 1000.0, "device": "cuda", "status": "done"}
    return {**found, "constants": {"gemm": 7900.0, "attention": rates}, **changes}


# --- arithmetic --------------------------------------------------------------------------------------------------


def test_what_a_step_takes_at_least(small: Case) -> None:
    """Products at 650 of 790: layers 96,000 and head 12,000 at 6500; attention 8,000 at 100, 2.5 times that at 50."""
    found = step_roofline.floors(small, row(), gemm=7900.0, forward=100.0, backward=50.0)
    assert found["none"] == pytest.approx(108_000 / 6500 + 80 + 400)
    assert found["keep"] == pytest.approx(140_000 / 6500 + 480)  # layers once more
    assert found["full"] == pytest.approx(140_000 / 6500 + 560)  # and attention forward
    faster = step_roofline.floors(small, row(), gemm=15_800.0, forward=100.0, backward=50.0)
    assert faster["keep"] == pytest.approx(140_000 / 13_000 + 480)


def test_a_roofline_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-8B without recomputation on 32K: 8,040 tokens/s at 650, 620 and 520 TFLOP/s."""
    monkeypatch.setitem(step_choices.SHAPES, "tiny", (32, 4096, 14_336, 32, 8, 128, False))
    monkeypatch.setattr(Case, "vocab", 128_256)
    seen = {"tokens": 32_768, "labels": 32_768, "squares": 32_768**2}
    found = step_roofline.floors(Case.read("tiny:32k:one"), seen, gemm=790e12, forward=620e12, backward=520e12)
    assert 32_768 / found["none"] == pytest.approx(8040, rel=1e-3)


def test_what_follows_from_a_row(small: Case) -> None:
    """132,000 FLOPs in 1000 s are 132 a second, of a peak of 1e-9 TFLOP/s 13.2%; the best rate of any kernel counts."""
    found = step_roofline.finished(small, row(), peak_tflops=1e-9)
    assert (found["tokens_per_s"], found["mfu"]) == (0.1, pytest.approx(0.132))
    assert found["of_full"] == pytest.approx((140_000 / 6500 + 560) / 1000)
    assert "mfu" not in step_roofline.finished(small, row(device="cpu"), peak_tflops=1e-9)


def test_what_no_step_does_without() -> None:
    """Qwen3-0.6B: 18 bytes of 596,049,920 parameters, 2 x 1024 x 28 of each token; offloaded two layers of it."""
    assert step_choices.at_least(Case.read("0.6b:64k:one:full"), "cuda") == 18 * 596_049_920 + 57_344 * 65_536
    offloaded = Case.read("0.6b:64k:one:full+offload+optim1")
    assert step_choices.at_least(offloaded, "cuda") == 6 * 596_049_920 + 2 * 2048 * 65_536


def test_flops_of_attention() -> None:
    """Documents of 2 and 4 tokens, 3 heads of 8."""
    assert measure.attention_flops(np.array([0, 2, 6]), 3, 8) == 960.0


def test_efficiency_is_of_the_slowest_rank() -> None:
    whole = {"fwd_s": 2.0, "both_s": 4.0}
    ranks = [{"fwd_s": 0.5, "both_s": both, "extra": 10 + i} for i, both in enumerate([1.0, 1.25, 1.0, 1.0])]
    found = bench_attention.row_of("flash", 4, ranks, 7e12, whole)
    assert (found["fwd_efficiency"], found["efficiency"]) == (1.0, pytest.approx(0.8))
    assert found["fwd_tflops"] == pytest.approx(7 / 4 / 0.5)
    assert found["both_tflops"] == pytest.approx(3.5 * 7 / 4 / 1.25)
    assert found["extra"] == 13


def test_packs_are_full() -> None:
    for mix in measure.MIXES:
        found = measure.boundaries_of(mix, 32_768, 64)
        assert found[0] == 0 and found[-1] == 32_768 and np.diff(found).min() > 0
        assert not (found % 64).any() and (len(found) == 2) == (mix == "one")


def test_padded_is_to_the_longest_of_the_same_samples() -> None:
    seq_length, multiple, lengths = step_case.drawn(Case.read("1.7b:32k:padded"), 3)
    assert len(lengths) == 48 and lengths.max() <= multiple < lengths.max() + 64
    assert seq_length % multiple == 0 and 32_768 - multiple < seq_length <= 32_768


# --- what can be asked for ---------------------------------------------------------------------------------------


def test_a_case_names_its_recipe() -> None:
    case = Case.read("4B:64k:one:selective+offload0.8+tile4k+optim0.5")
    assert str(case) == "4b:64k:one:selective+offload0.8+tile4k+optim0.5"
    config = case.config("cuda", also=["parallel.overlap=false"])
    assert (config.train.recompute, config.train.offload_fraction, config.train.mlp_tile) == (
        "selective",
        0.8,
        4096,
    )
    assert (config.optim.offload_fraction, config.data.seq_length, config.run.precision) == (0.5, 65_536, "bf16")
    assert not config.parallel.overlap
    plain = Case.read("4b:64k:one")
    assert str(plain) == "4b:64k:one:selective" and plain.config("cpu").train.mlp_tile is None
    # Adam on the host needs bf16
    assert (
        plain.config("cpu").run.precision == "fp32" and plain.using("full+optim1").config("cpu").run.precision == "bf16"
    )
    assert str(Case.read("4b:1000:chat:full+optim+tile")) == "4b:1000:chat:full+tile4k+optim1"
    assert Case.read("4b:64k:one:full+offload1") == Case.read("4b:64k:one:full+offload")
    assert str(plain.using("full+offload")) == "4b:64k:one:full+offload"
    assert plain.using("full+offload").config("cpu").train.offload_fraction == 1.0


def test_trades_are_pairs_with_the_first() -> None:
    assert [case.way for case in step_choices.trades("1.7b:64k")] == [
        "selective",
        "full",
        "selective+offload",
        "full+offload",
        "selective+tile4k",
        "none",
        "selective+optim1",
        "selective",
    ]
    found = step_choices.trades("8b:32k+optim1")
    assert {str(case).split(":one:")[0] for case in found} == {"8b:32k"}
    assert [case.way for case in found][2] == "selective+offload+optim1" and len(found) == 7


def test_what_a_trade_costs() -> None:
    """Two steps in 4 s, and one in 3 s: half as long again."""
    first = {"case": "a", "status": "done", "seconds": 4.0, "steps": 2, "peak_bytes": 8 * GIB}
    first |= {"by_equations": 7.5 * GIB, "host_bytes": 0}
    second = {**first, "case": "b", "seconds": 3.0, "steps": 1, "peak_bytes": 2 * GIB, "host_bytes": 6 * GIB}
    _, *found = step_tables.traded([{"case": "c", "status": "out of memory"}, first, second])
    assert [line.split() for line in found] == [
        ["a", "1.000", "8.0", "7.5", "0.0"],
        ["b", "1.500", "2.0", "7.5", "6.0"],
    ]
    assert step_tables.traded([{"case": "c", "status": "stopped"}]) == ["trades: none of these was measured"]


# --- where the time goes -----------------------------------------------------------------------------------------


def event(name: str, start: float, us: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": us}


def test_shares_of_a_trace() -> None:
    """Of 1 ms.  A product in the head is the head's; a range of the CPU says nothing about the device."""
    found = step_roofline.shares(
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
    assert step_roofline.shares([event("aten::mm", 0, 900, "cpu_op")], 1e-3) == {}


# --- rows that are not numbers -----------------------------------------------------------------------------------


def test_a_case_that_cannot_fit_is_a_row() -> None:
    options = bench_step.parse(["--device", "cpu", "--cases", "8b:32k:one"])
    options.memory_gib, options.host_gib = 80.0, 128.0
    found = bench_step.in_a_process(options.cases[0], options, [], 60)
    # fp32 on a CPU: 16 bytes of 8,190,735,360 parameters; 73,856 of each token in 36 layers
    assert found["status"] == "skipped: 203 GiB by arithmetic, 80 GiB there; --try-all tries"
    assert step_tables.lines(found) == [
        "8b:32k:one:selective                        skipped: 203 GiB by arithmetic, 80 GiB there; --try-all tries"
    ]
    options.memory_gib = 0.0
    found = bench_step.in_a_process(Case.read("8b:32k:one:full+optim1"), options, [], 60)
    assert found["status"] == "skipped: 122 GiB of host memory by arithmetic, 128 GiB there; --try-all tries"


def test_out_of_memory_and_failures_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step_case, "trainer", too_much)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * GIB)
    options = bench_step.parse(["--device", "cpu", "--tiny"])
    found = bench_step.child(options.cases[0], options)
    assert found["status"].startswith("out of memory at 3.0 GiB, after ")
    options.memory_gib, options.host_gib = 0.0, 128.0
    failed = bench_step.in_a_process(
        options.cases[0], options, ["--device", "cpu", "--set", "train.recompute=often"], 60
    )
    assert failed["status"].startswith("failed: ") and "recompute" in failed["error"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--cases", "2b:64k:one"], "2b:64k:one is not one of"),
        (["--cases", "4b:64k:poems"], "4b:64k:poems is not one of"),
        (["--cases", "4b:64k:one:often"], "often is not one of none, selective, full"),
        (["--cases", "4b:64k:one:full+magic"], "magic is not offload or optim with a share, or tile"),
        (["--trades", "9b:64k"], "9b:64k:one is not one of"),
        (["--longest", "tiny"], "needs --memory"),
        (["--peer", "9b"], "--peer 9b"),
        (["--steps", "0"], "nothing to measure"),
        (["--kernels", "magic"], "--kernels magic"),
    ],
)
def test_what_cannot_be_measured(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_step.parse(["--device", "cpu", *arguments])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_every_default_case_is_one_that_a_host_of_128_gib_takes() -> None:
    found = bench_step.parse(["--device", "cpu"]).cases
    assert len(found) == len({str(case) for case in found}) > 10
    assert max(case.estimate("cuda").host for case in found) < 0.9 * 128 * GIB


def test_no_case_is_begun_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    assert bench_step.main(["--device", "cpu", "--tiny", "--minutes", "-1", "--out", str(out)]) == 0
    assert f"{'tiny:512:chat:full':<42}  not begun: -1 minutes are over" in capsys.readouterr().out
    header, only = (json.loads(line) for line in out.read_text().splitlines())
    assert torch.__version__.startswith(header["header"]["versions"]["torch"])
    assert only["status"] == "not begun: -1 minutes are over"


# --- the whole tools ---------------------------------------------------------------------------------------------


def test_a_tiny_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    assert bench_step.main(["--device", "cpu", "--tiny", "--steps", "1", "--out", str(out)]) == 0
    _, found = (json.loads(line) for line in out.read_text().splitlines())
    assert (found["case"], found["status"], found["steps"], found["shares"]) == ("tiny:512:chat:full", "done", 1, {})
    assert 0 < found["labels"] < found["tokens"] <= 512 and found["seconds"] > 0 and found["loss"] > 0
    assert set(found["constants"]["attention"]) == {"flash", "sdpa"} and "mfu" not in found
    printed = capsys.readouterr().out
    assert "attention portable (plain torch, no flash kernel: it needs CUDA)" in printed
    assert "; no te (it needs CUDA); no cudnn (it needs CUDA)" in printed


def test_a_tiny_search_and_its_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU has no limit of its own: a hundredth of a GiB by the equations is its limit here."""
    out = tmp_path / "rows.jsonl"
    arguments = ["--cases", "none", "--longest", "tiny", "--memory", "0.01", "--check", "--out", str(out)]
    assert bench_step.main(["--device", "cpu", "--tiny", *arguments]) == 0
    _, found = (json.loads(line) for line in out.read_text().splitlines())
    assert (found["longest"], found["memory"], found["status"]) == ("tiny", "full", "done")
    assert found["fits"] == found["predicted"] and found["fails"] == found["fits"] + 64
    assert [fits for _, fits in found["tried"]] == [True, False]
    printed = capsys.readouterr().out
    assert f"tiny with full: {found['fits']:,} tokens fit" in printed
    assert printed.count("\n  not measured  ") == 13  # what a CPU does says nothing about a bar


def test_a_tiny_attention(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--device", "cpu", "--tiny", "--mixes", "chat", "--out", str(out)]
    assert bench_attention.main(arguments) == 0
    _, *rows = (json.loads(line) for line in out.read_text().splitlines())
    absent, rows = rows[:2], rows[2:]
    assert absent == [{"way": way, "status": "does not run here: it needs CUDA"} for way in ("te", "cudnn")]
    assert [(found["length"], found["way"], found["cp"]) for found in rows] == [
        (length, way, cp)
        for length in (256, 512)
        for way, cp in [("flash", 1), ("flash", 2), ("sdpa", 1), ("tiles", 1)]
    ]
    assert len(rows[1]["ranks"]) == 2 and rows[1]["efficiency"] > 0


def test_what_a_kernel_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN takes short packs here and no long ones, Transformer Engine none."""
    monkeypatch.setattr(attention_ways, "why_not", lambda name, device: None)

    def by_cudnn(p: attention_ways.Problem) -> attention_ways.Way:
        if len(p.tensors[0]) > 256:
            raise RuntimeError("No available kernel. Aborting execution.\nmore")
        return attention_ways.by_sdpa(p)

    def by_te(p: attention_ways.Problem) -> attention_ways.Way:
        raise ValueError("No dot product attention backend is available")

    monkeypatch.setattr(attention_ways, "by_cudnn", by_cudnn)
    monkeypatch.setattr(attention_ways, "by_te", by_te)
    out = tmp_path / "rows.jsonl"
    arguments = ["--device", "cpu", "--tiny", "--mixes", "one", "--ways", "te,cudnn", "--out", str(out)]
    assert bench_attention.main(arguments) == 0
    _, absent, timed, refused = (json.loads(line) for line in out.read_text().splitlines())
    assert absent["status"] == "does not run here: No dot product attention backend is available"
    assert (timed["way"], timed["length"]) == ("cudnn", 256) and timed["both_s"] > 0
    assert (refused["length"], refused["status"]) == (512, "refused: No available kernel. Aborting execution.")
    found, why = step_case.attention_rates(Case.read("tiny:512:one"), torch.device("cpu"), ["sdpa", "te", "cudnn"])
    assert list(found) == ["sdpa"] and list(why) == ["te", "cudnn"]


def test_a_fault_of_ours_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(p: attention_ways.Problem) -> attention_ways.Way:
        raise RuntimeError("tiles")

    monkeypatch.setattr(attention_ways, "by_tiles", broken)
    with pytest.raises(RuntimeError, match="tiles"):
        bench_attention.main(["--device", "cpu", "--tiny", "--mixes", "one", "--ways", "tiles"])
    assert not attention_ways.is_refusal("te", torch.OutOfMemoryError())


def test_a_wrong_attention_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = measure.stand_in
    monkeypatch.setattr(measure, "stand_in", lambda *a, **k: (right(*a, **k)[0] * 1.1, right(*a, **k)[1]))
    assert bench_attention.main(["--device", "cpu", "--tiny", "--mixes", "one"]) == 2
    said = capsys.readouterr()
    assert "one: flash, cp 1, rank 0: the output is off by 10" in said.err and "fwd ms" not in said.out
