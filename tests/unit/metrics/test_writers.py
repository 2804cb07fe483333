"""Destinations of records: files, which are read back, and lines on the console.  test_services.py has W&B and
MLflow."""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from sft.cli import main
from sft.metrics.log import MetricsLog
from sft.metrics.run_facts import RunFacts
from sft.metrics.scalars import scalars
from sft.metrics.totals import Peak
from sft.metrics.writers import JsonLines, TensorBoard, open_writers
from sft.parallel.layout import Layout
from sft.run.gpu_peak import peak_tflops
from tests.unit.fixtures.logs import console, log_of
from tests.unit.metric_values import RECIPE, START, check, config, evaluation, result, run_of, totals, train


@pytest.fixture(autouse=True)
def first_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each real start is a new process.  In a single process and second, the tenth file would sort before the ninth."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# Files


def test_what_is_written_can_be_read_back(tmp_path: Path) -> None:
    said, _ = console()
    other = evaluation(objective=50.0) | {"set": "code"}
    with log_of(open_writers(tmp_path, config(), 0, said), said) as metrics:
        metrics.start()
        metrics.train(3, result(), seconds=2.0)
        metrics.evaluation(3, "eval", totals(), seconds=2.0)
        assert metrics.evaluation(3, "code", totals(objective=50.0), seconds=2.0) == other
    start, *rest = lines(tmp_path)
    check(start)
    assert {**start, "time": 0} == {**START, "time": 0}
    assert rest == [train(), evaluation(), other]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Scalars("lm loss")[0].value == 1.5 and events.Scalars("lm loss")[0].step == 3
    assert events.Scalars("loss by position/0-4K/loss")[0].value == 1.25
    assert events.Scalars("sample loss validation")[0].value == 1.5
    assert events.Scalars("lm loss validation/code")[0].value == 2.5
    assert not {"kind", "step", "set", "time"} & {re.sub(" .*", "", tag) for tag in events.Tags()["scalars"]}


def test_no_step_is_told_twice(tmp_path: Path) -> None:
    """The run is cut off in its fourth step, and resumes after step 2, whose evaluation came before its checkpoint."""
    told = [START, evaluation() | {"step": 0}, *(train() | {"step": n} for n in (1, 2)), evaluation() | {"step": 2}]
    late = [train() | {"step": 3}, evaluation() | {"step": 3}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in told + late) + '{"kind": "train", "st')
    writer = JsonLines(path, step=2, is_evaluated=True)
    writer.write(train())
    assert lines(tmp_path) == [*told, train()]  # written at once, because the run may be killed
    writer.close()
    JsonLines(path, step=0, is_evaluated=False).close()  # without a checkpoint, the run starts over
    assert lines(tmp_path) == [START]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_hides_what_is_told_again(tmp_path: Path) -> None:
    for first in (0, 2):
        writer = TensorBoard(tmp_path, step=first, is_evaluated=True)
        for n in range(first + 1, 5):
            writer.write(train() | {"step": n, "lm loss": 10.0 * first + n})
        writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == [(1, 1), (2, 2), (3, 23), (4, 24)]


def test_tensorboard_has_the_points_of_a_pass_once(tmp_path: Path) -> None:
    """Kills before the first checkpoint, and after the evaluation of step 2, whose optimizer step is written again."""
    for first, steps in ((0, []), (0, []), (0, [1, 2]), (2, []), (2, [3])):
        writers = open_writers(tmp_path, config(), first, console()[0], is_evaluated=False)
        records = [evaluation() | {"step": first}, *(train() | {"step": step} for step in steps)]
        records += [evaluation() | {"step": step} for step in steps if step == 2]
        for writer in writers:
            for record in records:
                writer.write(record)
            writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss validation")] == [0, 2]
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3]


def test_numbers_that_are_drawn() -> None:
    assert scalars(START) == {}
    drawn = scalars(train())
    assert (drawn["skipped"], drawn["documents"], drawn["loss by source/code/tokens"]) == (0.0, 4.0, 10.0)
    assert "loss by position/4K+/loss" not in drawn  # its value is null
    assert {"kind", "step"} & drawn.keys() == set()
    assert scalars(evaluation())["loss by source/code/loss validation"] == 2.0
    assert scalars(evaluation() | {"set": "code"})["token accuracy validation/code"] == 0.25


def test_a_full_disk_under_tensorboard_is_told_once_and_metrics_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def full(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    said, stream = console()
    with log_of(open_writers(tmp_path, config(), 0, said), said) as metrics:
        metrics.train(3, result(), seconds=2.0)
        metrics.evaluation(3, "eval", totals(), seconds=2.0)
    assert stream.getvalue().count("TensorBoard gets no more records of this run: OSError: [Errno 28] No space") == 1
    assert [line["kind"] for line in lines(tmp_path)] == ["train", "eval"]


@pytest.mark.parametrize(
    "verb, package, is_folder", [("train", "wandb", False), ("check", "wandb", True), ("check", "mlflow", False)]
)
def test_a_missing_package_is_refused_before_the_data_are_looked_at(
    tmp_path: Path,
    verb: str,
    package: str,
    is_folder: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also if other programs left a folder of this name, which Python would import as a package."""
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(RECIPE)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / package).is_dir()])
    if is_folder:
        Path(package).mkdir()
        monkeypatch.syspath_prepend(str(tmp_path))
    assert main([verb, "a.yaml", f"log.{package}=chats"]) == 2
    assert capsys.readouterr() == (
        "",
        f"ConfigError: log.{package} = chats (command line: log.{package}=chats) needs the package {package}, which is "
        f"not installed here: pip install {package}; or train without it: log.{package}=null.\n",
    )


# The console


def test_lines_of_a_run() -> None:
    said, stream = console()
    with log_of([], said, "log.every=3") as metrics:
        metrics.evaluation(0, "eval", totals(objective=40.0), seconds=2.0)
        for n in (1, 2, 3):
            metrics.train(n, result(), seconds=2.0)
        metrics.evaluation(3, "eval", totals(), seconds=2.0)
        metrics.evaluation(3, "code", totals(denominator=0.0), seconds=2.0)
        metrics.summarise()
    assert stream.getvalue().splitlines() == [
        "held-out after step 0: lm loss 2.0000 on 20 supervised tokens, 2.0 s",
        "step 3/9  lm loss 1.5000  grad-norm   0.5  lr 1.0e-03     50 tok/s    2.00 s  4.0 GiB  left 0:00:12",
        "held-out after step 3: lm loss 1.5000 on 20 supervised tokens, 2.0 s",
        "held-out code after step 3: lm loss      - on 20 supervised tokens, 2.0 s",
        "lm loss, train: 1.5000 (step 1) -> 1.5000 (step 3)",
        "lm loss, held-out: 2.0000 (step 0) -> 1.5000 (step 3)",
    ]


def test_a_line_fits_120_columns() -> None:
    """In a long and fast run with memory and MFU; a CPU has neither, and a skipped step has no speed."""
    said, stream = console()
    run = run_of(config("log.peak_tflops=1"))  # TFLOP/s; the two ranks have 4 TFLOP in two seconds
    with MetricsLog(Path(), [], said, run, step=9_998, num_steps=99_999) as metrics:
        fast = dict(num_real_tokens=2_469_134, num_rows=0, attention_flops=0.82 * 4e12 - 2_469_134 * 960)
        metrics.train(9_999, replace(result(**fast), grad_norm=123_456.0), seconds=2.0)
        metrics.train(10_000, replace(result(), skipped=True, grad_norm=math.nan), seconds=2.0)
        metrics.train(10_001, result(memory_reserved=Peak(value=0.0, rank=0)), seconds=2.0)
    wide, skipped, cpu = stream.getvalue().splitlines()
    assert wide == (
        "step  9999/99999  lm loss 1.5000  grad-norm 1.2e+05  lr 1.0e-03  1.23M tok/s    2.00 s  4.0 GiB  MFU 82%  "
        "left 50:00:00"
    )
    assert skipped.endswith("lr 1.0e-03  skipped: not finite  left 49:59:58")
    assert "GiB" not in cpu and max(map(len, (wide, skipped, cpu))) <= 120


@pytest.mark.parametrize(
    ("words", "device", "name", "expected"),
    [
        ((), "cpu", "", None),
        ((), "cuda", "NVIDIA H100 80GB HBM3", 989.4),
        ((), "cuda", "NVIDIA GeForce RTX 4090", None),
        (("run.precision=fp32",), "cuda", "NVIDIA H100 80GB HBM3", None),
        (("log.peak_tflops=500",), "cuda", "NVIDIA H100 80GB HBM3", 500.0),
    ],
)
def test_the_peak_of_the_gpu_is_known_or_there_is_no_mfu(
    words: tuple[str, ...], device: str, name: str, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    recipe = config(*words)
    of_device = peak_tflops(recipe, torch.device(device))
    assert RunFacts.of(recipe, Layout.resolve(recipe, 2), 10, peak_tflops=of_device).peak_tflops == expected


def test_lines_of_a_run_that_was_resumed() -> None:
    """After step 6, prints every fourth step and the last; the remaining time follows from the start's own steps, 2 s
    each."""
    said, stream = console()
    with log_of([], said, "log.every=4", step=6) as metrics:
        for n in (7, 8, 9):
            metrics.train(n, result(), seconds=2.0)
    lines_said = stream.getvalue().splitlines()
    assert [(line.split("  ")[0], line[-12:]) for line in lines_said] == [
        ("step 8/9", "left 0:00:02"), ("step 9/9", "left 0:00:00")
    ]  # fmt: skip
