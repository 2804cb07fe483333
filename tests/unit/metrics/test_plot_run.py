"""`sft plot`: the values that it reads from metrics.jsonl, and its errors."""

import errno
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sft.cli import main
from sft.metrics.results import plot
from sft.metrics.results.curves import smoothed

START = {"schema": 2, "kind": "start", "step": 0}


def train(step: int, loss: float | None, **metrics: float) -> dict:
    rate = {"grad-norm": 1.5, "learning-rate": 1e-4, "tokens-per-second": 900.0}
    return {"kind": "train", "step": step, "lm loss": loss} | rate | metrics


def held_out(step: int, loss: float, **more: object) -> dict:
    return {"kind": "eval", "step": step, "lm loss": loss, "tokens/supervised": 812} | more


def by_position(**losses: float | None) -> dict:
    """near=2.0, far=None -> a record with 100 tokens in bucket near, and none in bucket far"""
    return {"loss by position": {k: {"loss": v, "tokens": 0 if v is None else 100} for k, v in losses.items()}}


def write(folder: Path, *records: dict) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_run_becomes_a_png_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "demo", START | {"schema": 1}, train(1, 5.5), train(2, 5.1), held_out(2, 5.2))
    assert main(["plot", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}/plot.png\n"
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_full_disk_leaves_the_picture_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(figure: Figure, out: Path, **how: object) -> None:
        out.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = write(tmp_path / "demo", START, train(1, 5.5))
    (folder / "plot.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", full)
    assert main(["plot", str(folder)]) == 1
    assert capsys.readouterr().err == (
        f"StorageError: --out {folder}/plot.png cannot be written: the disk is full (OSError: [Errno 28] No space left "
        "on device).  Start the command again when this is mended.\n"
    )
    assert (folder / "plot.png").read_bytes() == b"old"
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "plot.png"]


@pytest.mark.parametrize("name", ["a.jpg", "a"])
def test_an_ending_that_is_no_picture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["plot", str(tmp_path), "--out", name]) == 2
    assert capsys.readouterr().err == f"ConfigError: --out {name} does not end in .png, .svg or .pdf.\n"


def test_smoothing() -> None:
    few = np.array([5.0, 3.0, 4.0])
    assert smoothed(few).tolist() == [5.0, 3.0, 4.0]
    # 40 values: the mean includes one value on each side
    many = np.array([1.0, 4.0, 1.0, 1.0, np.nan, 3.0] + 34 * [3.0])
    assert smoothed(many)[:6].tolist() == [2.5, 2.0, 2.0, 1.0, 2.0, 3.0]
    assert smoothed(many)[-1] == 3.0
    assert np.isnan(smoothed(np.full(40, np.nan))).all()


def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *runs: list[dict], more: Sequence[str] = ()) -> list[Axes]:
    """All panels of the picture of these runs, named a, b, ...; nothing is rendered.

    more  arguments of the command line
    """
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out, **_: figures.append(figure) or out.touch())
    folders = [write(tmp_path / name, START, *records) for name, records in zip("abc", runs, strict=False)]
    out = tmp_path / "pictures" / "plot.png"
    assert main(["plot", *map(str, folders), "--out", str(out), *more]) == 0
    assert list(out.parent.iterdir()) == [out]
    return figures[0].get_axes()


def position_panels(panels: list[Axes], data: str) -> dict[str, dict[str, list[tuple[float, float]]]]:
    return panels_under(panels, f"loss by position, {data}")


def panels_under(panels: list[Axes], headline: str) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """The title and the curves of each panel under this headline."""
    parts = {axes: axes.get_figure(root=False) for axes in panels}
    return {axes.get_title("left"): curves(axes) for axes, part in parts.items() if part.get_suptitle() == headline}


def curves(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The label and the points of each line."""
    return {str(line.get_label()): [(x, y) for x, y in line.get_xydata()] for line in axes.get_lines()}


def test_loss_by_position_of_held_out_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket never has no tokens; bucket far has some in the last evaluation only."""
    first, last = by_position(near=3.0, far=None, never=None), by_position(near=2.0, far=1.5, never=None)
    records = [held_out(0, 5.6) | first, train(1, 5.5) | by_position(near=9.0), held_out(1, 5.2) | last]
    panels = draw(tmp_path, monkeypatch, records)
    assert len(panels) == 5
    found = position_panels(panels, "held out")[""]
    assert list(found.items()) == [("near", [(0, 3), (1, 2)]), ("far", [(1, 1.5)])]
    assert ["near", "far"] in [
        [text.get_text() for text in a.get_legend().get_texts()] for a in panels if a.get_legend()
    ]


def test_loss_by_position_of_training_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single evaluation is not drawn as a curve.  Steps without tokens in a bucket are left out of the bucket's
    line."""
    records = [
        held_out(0, 5.6) | by_position(near=9.0, far=9.0),
        train(1, 5.5) | by_position(near=3.0, far=1.5),
        train(2, 5.4) | by_position(near=2.5, far=None),
        train(3, 5.3) | by_position(near=2.0, far=1.0),
    ]
    panels = draw(tmp_path, monkeypatch, records)
    assert position_panels(panels, "train") == {"": {"near": [(1, 3), (2, 2.5), (3, 2)], "far": [(1, 1.5), (3, 1)]}}


def test_loss_by_position_of_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel for each bucket, a colour for each run; a run without the key has no line."""
    a = [held_out(s, 5.0) | by_position(near=3.0 - s, far=2.0) for s in (0, 1)]
    b = [held_out(s, 5.0) | by_position(near=2.5 - s, far=None) for s in (0, 1)]
    c = [held_out(s, 5.0) for s in (0, 1)]
    panels = draw(tmp_path, monkeypatch, a, b, c)
    assert position_panels(panels, "held out") == {
        "near": {"a": [(0, 3), (1, 2)], "b": [(0, 2.5), (1, 1.5)]},
        "far": {"a": [(0, 2), (1, 2)]},
    }
    colors = {str(line.get_color()) for axes in panels for line in axes.get_lines() if line.get_label() == "a"}
    assert colors == {plot.COLORS[0]}


def test_each_held_out_set_has_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation has schema 2, without the name of its set; loss by position belongs to the first set."""
    records = [
        held_out(0, 5.0) | by_position(near=4.0),
        train(1, 5.5),
        held_out(1, 4.0, set="eval") | by_position(near=3.0),
        held_out(1, 7.0, set="code") | by_position(near=9.0),
        held_out(2, 6.0, set="code") | by_position(near=8.0),
    ]
    panels = draw(tmp_path, monkeypatch, records)
    [losses] = [axes for axes in panels if axes.get_title("left") == "loss"]
    assert curves(losses)["a: held out 5.000 to 4.000"] == [(0, 5), (1, 4)]
    assert curves(losses)["a: held out code 7.000 to 6.000"] == [(1, 7), (2, 6)]
    assert len({line.get_marker() for line in losses.get_lines()[2:]}) == 2
    assert position_panels(panels, "held out") == {"": {"near": [(0, 4), (1, 3)]}}


def accuracy(share: float | None) -> dict:
    return {"token accuracy": share}


def test_token_accuracy_of_held_out_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each set with two evaluations that measured it, and one line at chance; none for training."""
    records = [
        held_out(0, 5.0, set="near") | accuracy(0.1) | by_position(all=5.0),
        held_out(0, 5.0, set="far") | accuracy(0.2),
        held_out(0, 5.0, set="once") | accuracy(0.3),
        train(1, 5.5) | accuracy(0.9),
        held_out(1, 4.0, set="near") | accuracy(0.7),
        held_out(1, 4.0, set="far") | accuracy(None),
        held_out(2, 3.0, set="near") | accuracy(1.0) | by_position(all=3.0),
        held_out(2, 3.0, set="far") | accuracy(0.6),
    ]
    panels = draw(tmp_path, monkeypatch, records, more=["--chance", "0.125"])
    [drawn] = panels_under(panels, "token accuracy, held out").values()
    chance = drawn.popitem()[1]
    assert drawn == {"near": [(0, 0.1), (1, 0.7), (2, 1)], "far": [(0, 0.2), (2, 0.6)]}
    assert [y for _, y in chance] == [0.125, 0.125]
    assert panels_under(panels, "loss by position, held out near") == {"": {"all": [(0, 5), (2, 3)]}}
    [axes] = [axes for axes in panels if axes.get_ylabel() == "share of supervised tokens"]
    assert axes.get_ylim()[0] <= 0 and axes.get_ylim()[1] >= 1
    assert [text.get_text() for text in axes.texts] == ["chance 0.125"]


def test_token_accuracy_of_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel for each set, and none for loss by position, which no run has."""
    a = [held_out(step, 5.0, set=name) | accuracy(step / 4) for step in (0, 1) for name in ("near", "far")]
    b = [held_out(step, 5.0, set="far") | accuracy(step / 2) for step in (0, 1)]
    panels = draw(tmp_path, monkeypatch, a, b)
    assert len(panels) == 4 + 2
    assert panels_under(panels, "token accuracy, held out") == {
        "near": {"a": [(0, 0), (1, 0.25)]},
        "far": {"a": [(0, 0), (1, 0.25)], "b": [(0, 0), (1, 0.5)]},
    }


@pytest.mark.parametrize("chance", ["1.5", "nan", "half"])
def test_chance_is_a_share(chance: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "runs/demo", "--chance", chance]) == 2
    assert f"must be a number from 0 to 1, got '{chance}'" in capsys.readouterr().err


@pytest.mark.parametrize("more", [{}, by_position(near=None)])
def test_no_panel_without_loss_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict) -> None:
    panels = draw(tmp_path, monkeypatch, [train(1, 5.5) | more, held_out(1, 5.2) | more, held_out(2, 5.2) | more])
    titles = [axes.get_title("left") for axes in panels]
    assert titles == ["loss", "gradient norm", "learning rate", "throughput"]


def test_a_run_that_cannot_be_drawn_gets_one_paragraph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """test_compare_runs.py tests other faults of a run; both commands read runs by the same code."""
    assert main(["plot", str(write(tmp_path / "demo", START))]) == 2
    output = capsys.readouterr()
    assert output.out == "" and not (tmp_path / "demo" / "plot.png").exists()
    assert output.err.startswith("RunError: ") and "has no step and no evaluation" in output.err
    assert output.err.count("\n") == 1


def test_the_legend_covers_no_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [[held_out(0, 5.0, set="near"), train(1, 5.5), held_out(1, 4.0, set="far")]] * 2
    panels = draw(tmp_path, monkeypatch, *runs)
    [losses] = [axes for axes in panels if axes.get_title("left") == "loss"]
    part = losses.get_figure(root=False)
    losses.get_figure(root=True).draw_without_rendering()
    [legend] = part.legends
    assert [text.get_text() for text in legend.get_texts()][1:3] == ["a: held out near 5.000 to 5.000"] + [
        "a: held out far 4.000 to 4.000"
    ]
    assert losses.get_legend() is None and len(legend.get_texts()) == 6
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in panels)
    assert box.x1 < part.bbox.x1
