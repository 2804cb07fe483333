"""One picture of one or several runs: loss, gradient norm, learning rate, tokens per second, loss by position.

    python tools/plot_run.py runs/demo                        -> runs/demo/plot.png
    python tools/plot_run.py runs/a runs/b --out compare.png  -> both runs in each panel

Reads metrics.jsonl (schema 1 to 5) from each run folder; needs matplotlib (pip install -e '.[plot]').  Every step
is a point of the faint line; the strong one is a centred mean over SMOOTH of the run; evaluations are dots, each
held-out set with a mark of its own (before schema 3 there is one set, `eval`).
A resumed run may repeat steps: the last record of a step counts.

Loss by position is drawn where a run tells it: of the first held-out set if there are two evaluations, else of
training.
One run: a line for each bucket.  Several: a panel for each bucket, in which the runs meet.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator

SCHEMAS = (1, 2, 3, 4, 5)
SMOOTH = 0.05
COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f"]
PANELS = [  # metric, title, unit
    ("lm loss", "loss", "nats per supervised token"),
    ("grad-norm", "gradient norm", "before clipping"),
    ("learning-rate", "learning rate", ""),
    ("tokens-per-second", "throughput", "real tokens per second, all ranks"),
]
MARKS = "osD^vP*X"  # of held-out sets
BY_POSITION = "loss by position"  # {bucket: {"loss": nats per supervised token or null, "tokens": count}}
COLUMNS = 4  # of panels of buckets, at most

Curves = dict[str, np.ndarray]  # bucket -> steps and losses, [2, points]


class PlotError(Exception):
    """A run that cannot be drawn: one paragraph for the user, exit code 2."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Records of one run in the order of their steps; each has "step" and its metrics by name.

    eval  by held-out set, in the order of the file
    """

    name: str
    train: list[dict]
    eval: dict[str, list[dict]]


def read_run(folder: Path) -> Run:
    """The run in `folder`; PlotError where its metrics.jsonl is missing, empty, damaged or of another schema."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise PlotError(f"{path} does not exist. Give the folder of a run (run.dir of its recipe), like runs/demo.")
    lines = path.read_text().splitlines()
    records = [record(path, number, number == len(lines), line) for number, line in enumerate(lines, 1)]
    kept = [entry for entry in records if entry]
    if kept and kept[0].get("schema") not in SCHEMAS:
        raise PlotError(
            f"{path} has schema {kept[0].get('schema')}; this tool reads {SCHEMAS[0]} to {SCHEMAS[-1]}. "
            "Use the plot_run.py of the version that made the run."
        )
    train, evaluations = by_step([r for r in kept if r.get("kind") == "train"]), dict[str, list[dict]]()
    for entry in kept:
        if entry.get("kind") == "eval":
            evaluations.setdefault(entry.get("set", "eval"), []).append(entry)
    if not train and not evaluations:
        raise PlotError(f"{path} has no step and no evaluation: the run has only begun, or ended before its first.")
    return Run(
        name=folder.resolve().name, train=train, eval={name: by_step(found) for name, found in evaluations.items()}
    )


def record(path: Path, number: int, is_last: bool, line: str) -> dict | None:
    """One line of metrics.jsonl; None for a last line that a killed run left half written."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        if is_last:
            return None
        raise PlotError(f"{path}:{number} is not JSON ({error.msg}): the file is damaged; remove that line.") from error
    if not isinstance(entry, dict) or (number > 1 and not {"step", "kind"} <= entry.keys()):
        raise PlotError(f"{path}:{number} is not a record with a step and a kind: not the metrics of a run of sft.")
    return entry


def by_step(records: list[dict]) -> list[dict]:
    """Each step once, in the order of steps."""
    found = {entry["step"]: entry for entry in records}
    return [found[step] for step in sorted(found)]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred mean over SMOOTH of all values, one-sided at both ends; gaps (NaN) are left out.

    20 values or fewer: the values themselves
    """
    reach = round(SMOOTH * len(values)) // 2
    is_known = np.isfinite(values)
    sums = np.cumsum(np.append(0.0, np.where(is_known, values, 0.0)))
    counts = np.cumsum(np.append(0, is_known))
    middle = np.arange(len(values))
    low, high = np.maximum(middle - reach, 0), np.minimum(middle + reach + 1, len(values))
    count = counts[high] - counts[low]
    return np.divide(sums[high] - sums[low], count, out=np.full(len(values), np.nan), where=count > 0)


def series(records: list[dict], key: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Steps, values (a metric that is absent or null is a gap) and "first to last" of one metric."""
    values = np.array([entry.get(key) for entry in records], dtype=float)
    known = values[np.isfinite(values)]
    span = f"{known[0]:.3f} to {known[-1]:.3f}" if len(known) else "without a value"
    return np.array([entry["step"] for entry in records]), values, span


def draw_run(panels: Sequence[Axes], run: Run, color: str, held_out_color: str, width: float) -> None:
    """Draws one run into the four panels."""
    for axes, (key, _, _) in zip(panels, PANELS, strict=True):
        steps, values, span = series(run.train, key)
        strong = values if key == "learning-rate" else smoothed(values)
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, strong, color=color, linewidth=width, label=f"{run.name}: train {span}")
    for i, (name, records) in enumerate(run.eval.items()):
        steps, values, span = series(records, "lm loss")
        label, mark = f"{run.name}: {held_out(name)} {span}", MARKS[i % len(MARKS)]
        panels[0].plot(steps, values, f"{mark}--", color=held_out_color, mec="white", ms=7, lw=1, label=label)


def held_out(name: str) -> str:
    """eval -> held out; code -> held out code"""
    return "held out" if name == "eval" else f"held out {name}"


def by_position(records: Sequence[dict]) -> Curves:
    """Steps and losses of each bucket where it has tokens; a bucket that never has any is left out."""
    points: dict[str, list[tuple[int, float]]] = {}
    for entry in records:
        for bucket, part in (entry.get(BY_POSITION) or {}).items():
            points.setdefault(bucket, []).extend([(entry["step"], part["loss"])] if part["tokens"] else [])
    return {bucket: np.array(found, dtype=float).T for bucket, found in points.items() if found}


def positions(runs: Sequence[Run]) -> tuple[str, list[Curves]]:
    """Which data, the same for all runs that tell any, and the curves of each run; those of training smoothed."""
    first = next((name for run in runs for name in run.eval), "eval")
    apart, train = [by_position(run.eval.get(first, [])) for run in runs], [by_position(run.train) for run in runs]
    is_curve = [any(curve.shape[1] > 1 for curve in curves.values()) for curves in apart]
    if all(long or not any(both) for long, *both in zip(is_curve, apart, train, strict=True)):
        return held_out(first), apart
    return "train", [
        {bucket: np.stack([steps, smoothed(losses)]) for bucket, (steps, losses) in curves.items()} for curves in train
    ]


def grid(num_runs: int, num_buckets: int) -> tuple[int, int]:
    """Rows and columns of panels: 0 buckets -> (0, 0); one run -> (1, 1); 3 buckets -> (1, 3); 5 -> (2, 3)"""
    if num_runs == 1 or not num_buckets:
        return (1, 1) if num_buckets else (0, 0)
    rows = -(-num_buckets // COLUMNS)
    return rows, -(-num_buckets // rows)


def draw_positions(figure: FigureBase, runs: Sequence[Run], found: Sequence[Curves], widths: Sequence[float]) -> None:
    """Draws one panel with a line for each bucket (one run), or a panel for each bucket with a line for each run."""
    buckets = names_of(found)
    is_one = len(runs) == 1
    panels = figure.subplots(*grid(len(runs), len(buckets)), sharex=True, sharey=True, squeeze=False)
    for i, bucket in enumerate(buckets):
        axes = panels.flat[0 if is_one else i]
        for j, curves in enumerate(found):
            if bucket not in curves:
                continue
            steps, losses = curves[bucket]
            color = colormaps["viridis"](0.9 * i / max(1, len(buckets) - 1)) if is_one else COLORS[j % len(COLORS)]
            marker = "o" if len(steps) <= 40 else ""
            label = bucket if is_one else runs[j].name
            axes.plot(steps, losses, marker=marker, mec="white", ms=6, lw=widths[j], color=color, label=label)
        finish(axes, "" if is_one else bucket, PANELS[0][2] if axes in panels[:, 0] else "")
        axes.tick_params(labelbottom=True)
    for axes in panels.flat[1 if is_one else len(buckets) :]:
        axes.remove()
    if is_one:
        panels[0, 0].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def names_of(found: Sequence[Curves]) -> list[str]:
    """Buckets of all runs, in the order of the records."""
    return list(dict.fromkeys(bucket for curves in found for bucket in curves))


def finish(axes: Axes, title: str, unit: str) -> None:
    """Gives a panel its title, units and grid."""
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw(runs: Sequence[Run], out: Path) -> None:
    """Draws all runs into one PNG.  Earlier runs are wider, so that equal curves all show."""
    widths = [1.6 + 2.4 * (len(runs) - 1 - i) / max(1, len(runs) - 1) for i in range(len(runs))]
    data, found = positions(runs)
    more = 3.2 * grid(len(runs), len(names_of(found)))[0]  # inches
    figure = Figure(figsize=(12, 7.5 + more), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    top: FigureBase = figure
    if more:
        top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=[7.5, more]).flat
        bottom.suptitle(f"loss by position, {data}", x=0.012, ha="left", fontweight="bold")
        draw_positions(bottom, runs, found, widths)
    panels = list(top.subplots(2, 2).flat)
    for i, run in enumerate(runs):
        color = COLORS[i % len(COLORS)]
        draw_run(panels, run, color, color if len(runs) > 1 else COLORS[1], widths[i])
    for axes, (key, title, unit) in zip(panels, PANELS, strict=True):
        finish(axes, title, unit)
        if key == "tokens-per-second":
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        if key != "lm loss":
            axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (with metrics.jsonl)")
    parser.add_argument("--out", type=Path, help="PNG to write; default: plot.png in the first run's folder")
    arguments = parser.parse_args(argv)
    out = arguments.out or arguments.runs[0] / "plot.png"
    try:
        draw([read_run(folder) for folder in arguments.runs], out)
    except PlotError as error:
        print(f"PlotError: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
