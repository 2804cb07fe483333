"""The output, files, pictures and refusals of `sft plan`."""

import json
import re
from datetime import datetime
from pathlib import Path

import pytest

from sft.cli import main
from sft.estimate.gpus import GIB
from sft.planner.report import Report
from tests.unit.fixtures.tasks import task_of

pytestmark = pytest.mark.usefixtures("released_models", "no_calibration")
PLAN = ["plan", "--model", "Qwen/Qwen3-8B"]
SMALL = [*PLAN, "--gpus", "8", "--seq-length", "65536"]
ROUNDED = 0.06  # each printed item is rounded to 0.05, and omitted if it is smaller


@pytest.fixture
def no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_CACHE", str(tmp_path / "cache"))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 2
    return capsys.readouterr().err


def test_all_that_is_printed() -> None:
    _, task = task_of("Qwen/Qwen3-8B", 65536)
    report = Report.of(task.changed(tokens=2e9), 8)
    lines = report.lines(datetime(2026, 11, 24))
    assert list(lines) == ["predict", "layouts", "memory", "time", "run", "why", "limits", "buys"]
    assert lines["predict"][0] == "Qwen/Qwen3-8B, all weights, on 8 GPUs h100, one node"
    assert lines["predict"][1] == "16 packs of 65,536 tokens a step, with documents of 65,536 tokens"
    assert lines["predict"][2].startswith("predicted, not measured; all constants of h100 are assumed")
    assert len(lines["layouts"]) == 1 + 5
    assert lines["why"][0].startswith(f"{report.proposals[1].time.step_s - report.proposals[0].time.step_s:.2g} s (")
    assert lines["limits"][0].startswith("time: ")
    assert lines["buys"][0].startswith("16 GPUs: ")


def test_what_limits_and_what_more_would_buy() -> None:
    """8B at 128K on 8 GPUs: without savings, far more than 80 GB are needed; a second node needs fewer savings."""
    _, task = task_of("Qwen/Qwen3-8B", 131072)
    reasons = Report.of(task, 8).reasons
    assert reasons is not None
    memory = next(line for line in reasons.limits if line.startswith("memory: "))
    found = re.fullmatch(r"memory: (.*) would take (\d+)% less, but needs (\d+) of (\d+) usable GiB", memory)
    assert found and int(found[3]) > int(found[4]) > 70
    assert "recompute" not in found[1]
    gain = re.match(r"16 GPUs: ([\d.]+) times the tokens/s with ", reasons.buys[0])
    assert gain and 1.9 < float(gain[1]) < 2.3  # twice the GPUs, and less recomputation


def test_a_batch_that_is_too_small_is_named() -> None:
    """One pack per step on 2 x 8 GPUs cannot fill a pipeline or dp."""
    _, task = task_of("Qwen/Qwen3-30B-A3B", 32768, packs=2)
    reasons = Report.of(task, 64).reasons
    assert reasons is not None
    assert reasons.limits[-1].startswith("the batch: 4 packs a step instead of 2 give ")


def test_memory_and_time_add_up() -> None:
    """The printed items add up to all memory and to the whole step."""
    _, task = task_of("Qwen/Qwen3-8B", 65536)
    report = Report.of(task, 8)
    best, lines = report.proposals[0], report.lines(datetime(2026, 11, 24))
    items = lines["memory"][0].partition(" = ")[2].partition(";")[0].split(" + ")
    total = sum(float(item.rpartition(" ")[2]) for item in items)
    assert total == pytest.approx(best.memory.device / GIB, abs=ROUNDED * 7)
    parts = lines["time"][0].partition(" = ")[2].split(" + ")
    assert sum(float(part.rpartition(" ")[2]) for part in parts) == pytest.approx(best.time.step_s, abs=0.01 * 8)


def test_gpu_hours_and_the_end() -> None:
    """Tokens / (tokens/s) is the duration of the run; times the GPUs, it is the GPU hours."""
    _, task = task_of("Qwen/Qwen3-8B", 65536)
    report = Report.of(task.changed(tokens=36e6), 8, 1)
    rate = report.proposals[0].time.tokens_per_s
    hours = 36e6 / rate / 3600
    line = report.lines(datetime(2026, 11, 24))["run"][1]
    assert line.startswith(f"36,000,000 tokens: {8 * hours:,.0f} GPU hours in {hours:,.1f} h")
    assert line.endswith("ends 2026-11-24 00:" + f"{int(hours * 60):02d}")
    told = report.json()["proposals"][0]
    assert told["gpu_hours"] == pytest.approx(8 * hours) and told["hours"] == pytest.approx(hours)
    assert told["cost"] is None and "cost" not in " ".join(report.lines(datetime(2026, 11, 24))["run"])


def test_the_cost_is_gpu_hours_times_the_price() -> None:
    _, task = task_of("Qwen/Qwen3-8B", 65536)
    report = Report.of(task.changed(tokens=2e9, price=2.5), 8, 1)
    billion, whole = report.lines(datetime(2026, 11, 24))["run"]
    gpu_hours = 1e9 / report.proposals[0].time.tokens_per_gpu_s / 3600
    assert billion.endswith(f"{gpu_hours:,.0f} GPU hours for a billion tokens (cost {2.5 * gpu_hours:,.0f})")
    assert f"{2 * gpu_hours:,.0f} GPU hours (cost {5 * gpu_hours:,.0f}) in " in whole
    assert report.json()["proposals"][0]["cost"] == pytest.approx(5 * gpu_hours)


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL[:-3], "8,16", "--seq-length", "65536", "--json", "--tokens", "1e9", "--top", "2"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["version"] == 1
    assert [report["num_gpus"] for report in whole["numbers_of_gpus"]] == [8, 16]
    report = whole["numbers_of_gpus"][0]
    assert report["predicted"] is True and len(report["proposals"]) == 2
    for proposal in report["proposals"]:
        assert sum(proposal["memory_bytes"].values()) == pytest.approx(proposal["device_bytes"])
        assert sum(proposal["parts_s"].values()) == pytest.approx(proposal["step_s"])
        assert proposal["tokens_per_s"] == pytest.approx(2**20 / proposal["step_s"])
        assert proposal["tokens_per_s_per_gpu"] == pytest.approx(proposal["tokens_per_s"] / 8)
    assert report["why"] and report["limits"] and report["buys"] and report["changes"] == []
    assert all(source["source"].startswith("assumed") for source in report["constants"].values())


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--gpus", "1", "--seq-length", "1048576"]) == 2
    printed = capsys.readouterr().out
    assert "no fit  the layout that needs the least memory, one GPU, recompute full, activations offloaded" in printed
    assert "the cheapest change that fits: " in printed and "also fits: --gpus 2, with " in printed


def test_no_layout_has_so_many_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """56 = 7 x 8: neither 36 layers, 32 heads, packs of 2^16 tokens nor 16 packs are divisible by 7."""
    assert main([*PLAN, "--gpus", "56", "--seq-length", "65536"]) == 2
    assert "no layout of this model and of 16 packs a step has 56 ranks" in capsys.readouterr().out


def test_written_recipe_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*SMALL, "--write", "out/a.yaml", "--picture", "out/a.svg"]) == 0
    told = capsys.readouterr().err
    assert "recipe out/a.yaml" in told and "picture out/a.svg" in told
    assert main(["check", "out/a.yaml", "--no-data", "--world-size", "8"]) == 0
    picture = Path("out/a.svg").read_text()
    for text in ("GiB of a rank, predicted", "seconds of a step, predicted", "usable", "saved by layers", "attention"):
        assert f"<!-- {text}" in picture
    assert main([*SMALL, "--gpus", "8,16", "--picture", "a.png"]) == 0
    assert Path("a.png").read_bytes()[:4] == b"\x89PNG"


def test_lengths_of_documents(capsys: pytest.CaptureFixture[str]) -> None:
    long, short = (
        json.loads(printed)["numbers_of_gpus"][0]["proposals"][0]["parts_s"]["attention"]
        for printed in (
            (main([*SMALL, "--json", *words]), capsys.readouterr().out)[1] for words in ([], ["--lengths", "8192:1"])
        )
    )
    assert short < long / 4  # documents of an eighth of the length have an eighth of the FLOPs, at a lower rate


def test_lengths_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    """Two documents, each with a user message and an assistant message, in bytes and a few marks."""
    for length in (50, 80):
        turns = [{"role": "user", "content": "a" * length}, {"role": "assistant", "content": "b" * 40}]
        with Path("chat.jsonl").open("a") as file:
            file.write(json.dumps({"messages": turns}) + "\n")
    Path("mine.yaml").write_text(
        "run: {dir: runs/mine}\nmodel: {hf: Qwen/Qwen3-0.6B}\n"
        "data: {train: chat.jsonl, seq_length: 4096, tokenizer: byte}\n"
        "train: {num_epochs: 3, global_batch_size: 8}\noptim: {lr: 0.001}\n"
    )
    assert main(["plan", "--model", "mine.yaml", "--gpus", "8", "--lengths", "data"]) == 0
    printed = capsys.readouterr().out
    assert "8 packs of 4,096 tokens a step, with documents of 111 to 141 tokens, 126 on average" in printed
    assert "756 tokens: 0 GPU hours" in printed  # 3 epochs of 252 tokens


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--gpus a is no list of numbers" in refused(capsys, *PLAN, "--gpus", "a")
    assert "gpus = 12 is no multiple of gpus_per_node = 8" in refused(capsys, *PLAN, "--gpus", "12")
    assert "--write writes one recipe" in refused(capsys, *SMALL, "--gpus", "8,16", "--write", "a.yaml")
    assert "does not end in .png or .svg" in refused(capsys, *SMALL, "--picture", "a.gif")
    assert "seq_length = 0 is not above 0" in refused(capsys, *PLAN, "--gpus", "8", "--seq-length", "0")
    assert "unknown GPU h900.  Known GPUs: a100-40, a100-80" in refused(capsys, *SMALL, "--gpu", "h900")
    assert "unknown network tin" in refused(capsys, *SMALL, "--fabric", "tin")
    assert "lengths 5 cannot be read" in refused(capsys, *SMALL, "--lengths", "5")
