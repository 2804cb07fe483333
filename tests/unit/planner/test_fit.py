"""`sft check --gpu` refuses a recipe that does not fit the GPU's memory, and names a change with which it fits."""

import re
from pathlib import Path

import pytest

from sft.cli import main

RECIPE = """\
run: {dir: runs/a, grace_s: 100000}
model: {num_layers: 32, hidden_size: 4096, ffn_hidden_size: 14336, num_attention_heads: 32, num_query_groups: 8,
        vocab_size: 128256, init_from: random}
data: {train: a.jsonl, seq_length: 131072}
train: {num_steps: 10, global_batch_size: 8}
optim: {lr: 1e-5}
"""
EXPERTS = ["model.moe={num_experts: 128, top_k: 8, ffn_hidden_size: 768}", "model.hidden_size=2048", "parallel.ep=8"]
EXPERTS += ["model.num_layers=48", "model.head_dim=128", "model.num_query_groups=4", "data.seq_length=65536"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFT_CACHE", str(tmp_path / "cache"))
    Path("a.yaml").write_text(RECIPE)


def check(*overrides: str, gpu: str = "h100", num_gpus: str = "8") -> int:
    return main(["check", "a.yaml", "--no-data", "--world-size", num_gpus, "--gpu", gpu, *overrides])


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["parallel.cp=8"], "The cheapest change that fits is "),  # 126 GiB without recompute
        (["parallel.cp=1"], "The cheapest change that fits is "),  # 612 GiB
        (["parallel.cp=8", "train.recompute=selective", *EXPERTS], "The cheapest change that fits is "),  # 94 GiB
        (["parallel.cp=1", "data.seq_length=1048576"], "The cheapest layout that fits is "),
        (["parallel.cp=8", "data.seq_length=4194304"], "The cheapest layout that fits is "),  # in chunks of heads
        (["parallel.cp=4", "data.seq_length=8388608"], "No layout of 4 GPUs fits.  The cheapest change that fits is "),
    ],
    ids=str,
)
def test_the_change_that_is_named_makes_it_fit(
    capsys: pytest.CaptureFixture[str], overrides: list[str], kind: str
) -> None:
    num_gpus = "4" if "4 GPUs" in kind else "8"
    assert check(*overrides, num_gpus=num_gpus) == 2
    printed = capsys.readouterr().err
    assert re.search(
        r"does not fit h100: a rank needs [\d,.]+ GiB \(predicted: weights [\d.]+, .*\), and can use [\d.]+ GiB = "
        r"capacity 79\.1 - CUDA's context 0\.75 - NCCL's buffers [\d.]+ - 3% 2\.4\.  ",
        printed,
    )
    change = printed.partition(kind)[2].partition(":")[0]
    named = [word for word in change.split() if "=" in word]
    more = re.search(r"--gpus (\d+)", change)
    assert named and check(*overrides, *named, num_gpus=more[1] if more else num_gpus) == 0


def test_what_fits_is_not_refused() -> None:
    assert check("parallel.cp=8", gpu="b200") == 0
    assert main(["check", "a.yaml", "--no-data", "--world-size", "8"]) == 0  # without a GPU, nothing is refused


def test_an_unknown_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(gpu="h1000") == 2
    assert "unknown GPU h1000.  Known GPUs: a100-40, " in capsys.readouterr().err


def test_the_gpu_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sft.estimate import gpus

    (tmp_path / "0000:3b").mkdir()
    (tmp_path / "0000:3b" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 100\n")
    assert gpus.gpu_of_machine(tmp_path) == gpus.gpu("h100")
    assert gpus.gpu_of_machine(tmp_path / "none") is None
    monkeypatch.setattr(gpus, "gpu_of_machine", lambda: gpus.gpu("h200"))
    assert main(["check", "a.yaml", "--no-data", "--world-size", "8", "parallel.cp=1"]) == 2
    assert "does not fit h200" in capsys.readouterr().err
    assert main(["check", "a.yaml", "--no-data", "--world-size", "8", "run.device=cpu"]) == 0
