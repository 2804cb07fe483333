"""tools/plot_run.py: what it reads from metrics.jsonl, and what it says when it cannot."""

import json
from pathlib import Path

import numpy as np
import pytest

from tools import plot_run

START = {"schema": 1, "kind": "start", "step": 0}


def train(step: int, loss: float | None, **metrics: float) -> dict:
    rate = {"grad-norm": 1.5, "learning-rate": 1e-4, "tokens-per-second": 900.0}
    return {"kind": "train", "step": step, "lm loss": loss} | rate | metrics


def held_out(step: int, loss: float) -> dict:
    return {"kind": "eval", "step": step, "lm loss": loss, "tokens/supervised": 812}


def write(folder: Path, *records: dict, tail: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return folder


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_a_run_becomes_a_png_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "demo", START, held_out(0, 5.6), train(1, 5.5), train(2, 5.1), held_out(2, 5.2))
    assert plot_run.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}/plot.png\n"
    assert is_picture(folder / "plot.png")


def test_several_runs_go_into_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write(tmp_path / name, START, train(1, 5.5), train(2, 5.1)) for name in ("a", "b", "c")]
    out = tmp_path / "pictures" / "compare.png"
    assert plot_run.main([*map(str, folders), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert is_picture(out)


def test_a_run_without_evaluation_or_with_null_metrics_is_drawn(tmp_path: Path) -> None:
    folder = write(tmp_path / "demo", START, train(1, None), train(2, 5.1, **{"grad-norm": 0.0}), train(3, None))
    assert plot_run.main([str(folder)]) == 0


def test_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    """A killed run wrote steps 1 to 3 and resumed after step 1."""
    records = [START, train(1, 5.0), train(2, 4.0), train(3, 3.0), START, train(2, 4.5), train(3, 3.5)]
    run = plot_run.read_run(write(tmp_path / "demo", *records))
    assert [(entry["step"], entry["lm loss"]) for entry in run.train] == [(1, 5.0), (2, 4.5), (3, 3.5)]


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    run = plot_run.read_run(write(tmp_path / "demo", START, train(1, 5.0), tail='{"kind": "tra'))
    assert [entry["step"] for entry in run.train] == [1]


def test_smoothing() -> None:
    few = np.array([5.0, 3.0, 4.0])
    assert plot_run.smoothed(few).tolist() == [5.0, 3.0, 4.0]
    many = np.array([1.0, 4.0, 1.0, 1.0, np.nan, 3.0] + 34 * [3.0])  # 40 values: mean of one on each side
    assert plot_run.smoothed(many)[:6].tolist() == [2.5, 2.0, 2.0, 1.0, 2.0, 3.0]
    assert plot_run.smoothed(many)[-1] == 3.0
    assert np.isnan(plot_run.smoothed(np.full(40, np.nan))).all()


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "metrics.jsonl does not exist. Give the folder of a run"),
        ("", "has no step and no evaluation"),
        ('{"schema": 0, "kind": "start", "step": 0}\n', "has schema 0; this tool reads schema 1"),
        ('{"kind": "train", "step": 1}\n', "has schema None; this tool reads schema 1"),
        ('{"schema": 1, "kind": "start", "step": 0}\n', "has no step and no evaluation"),
        ('{"schema": 1, "kind": "start", "step": 0}\nnonsense\n{}\n', "metrics.jsonl:2 is not JSON"),
        ('{"schema": 1, "kind": "start", "step": 0}\n{"loss": 3}\n', "metrics.jsonl:2 is not a record"),
        ("[1, 2]\n", "metrics.jsonl:1 is not a record"),
    ],
)
def test_a_run_that_cannot_be_drawn_gets_one_paragraph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    if text is not None:
        (folder / "metrics.jsonl").write_text(text)
    assert plot_run.main([str(folder)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("PlotError: ") and message in output.err and output.err.count("\n") == 1
    assert not (folder / "plot.png").exists()
