"""Draws one or several runs: loss, gradient norm, learning rate, tokens per second, token accuracy, loss by position.

The faint line shows every step; the strong line shows the mean over a twentieth of the run around each step.  Markers
show evaluations; each held-out set has its own marker.  Needs matplotlib.

Token accuracy is drawn for held-out sets with two evaluations.  If a run has loss by position, it is drawn for the
first held-out set if there are two evaluations, otherwise for training.  For one run, a panel has a line for each
held-out set or bucket.  For several runs, each held-out set and each bucket has a panel with all runs.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator

from sft.metrics.results.curves import Curves, PlottedRun, accuracies, held_out, names_of, positions, smoothed

PANELS = [  # metric, title, unit
    ("lm loss", "loss", "nats per supervised token"),
    ("grad-norm", "gradient norm", "before clipping"),
    ("learning-rate", "learning rate", ""),
    ("tokens-per-second", "throughput", "real tokens per second, all ranks"),
]
MARKS = "osD^vP*X"  # markers of held-out sets
COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f"]
COLUMNS = 4  # largest number of columns of bucket panels


def series(records: list[dict], key: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Steps and values of one metric, and the text "FIRST to LAST" with two of its values.  Absent values and null are
    NaN."""
    values = np.array([entry.get(key) for entry in records], dtype=float)
    known = values[np.isfinite(values)]
    span = f"{known[0]:.3f} to {known[-1]:.3f}" if len(known) else "no values"
    return np.array([entry["step"] for entry in records]), values, span


def draw_run(panels: Sequence[Axes], run: PlottedRun, color: str, held_out_color: str, width: float) -> None:
    """Draws the metrics of PANELS of one run, and its held-out losses."""
    for axes, (key, _, _) in zip(panels, PANELS, strict=True):
        steps, values, span = series(run.train, key)
        strong = values if key == "learning-rate" else smoothed(values)
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, strong, color=color, linewidth=width, label=f"{run.name}: train {span}")
    for i, (name, records) in enumerate(run.eval.items()):
        steps, values, span = series(records, "lm loss")
        label, mark = f"{run.name}: {held_out(name)} {span}", MARKS[i % len(MARKS)]
        panels[0].plot(steps, values, f"{mark}--", color=held_out_color, mec="white", ms=7, lw=1, label=label)


def grid(num_runs: int, num_buckets: int) -> tuple[int, int]:
    """The number of rows and columns of panels.

    0 buckets -> (0, 0); one run -> (1, 1); several runs with 3 buckets -> (1, 3), with 5 buckets -> (2, 3)
    """
    if num_runs == 1 or not num_buckets:
        return (1, 1) if num_buckets else (0, 0)
    rows = -(-num_buckets // COLUMNS)
    return rows, -(-num_buckets // rows)


def draw_lines(
    figure: FigureBase, runs: Sequence[PlottedRun], curves_of: Sequence[Curves], widths: Sequence[float], unit: str
) -> Sequence[Axes]:
    """Draws curves.  For one run, one panel has a line for each bucket.  For several, each bucket has a panel with a
    line for each run.

    widths: line width of each run; unit: label of the y axis.  Returns the panels.
    """
    buckets = names_of(curves_of)
    is_one = len(runs) == 1
    panels = figure.subplots(*grid(len(runs), len(buckets)), sharex=True, sharey=True, squeeze=False)
    for i, bucket in enumerate(buckets):
        axes = panels.flat[0 if is_one else i]
        for j, curves in enumerate(curves_of):
            if bucket not in curves:
                continue
            steps, values = curves[bucket]
            color = colormaps["viridis"](0.9 * i / max(1, len(buckets) - 1)) if is_one else COLORS[j % len(COLORS)]
            marker = "o" if len(steps) <= 40 else ""
            label = bucket if is_one else runs[j].name
            axes.plot(steps, values, marker=marker, mec="white", ms=6, lw=widths[j], color=color, label=label)
        finish(axes, "" if is_one else bucket, unit if axes in panels[:, 0] else "")
        axes.tick_params(labelbottom=True)
    for axes in panels.flat[1 if is_one else len(buckets) :]:
        axes.remove()
    if is_one:
        panels[0, 0].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return list(panels.flat)[: 1 if is_one else len(buckets)]


def draw_accuracy(
    figure: FigureBase,
    runs: Sequence[PlottedRun],
    curves_of: Sequence[Curves],
    widths: Sequence[float],
    chance: float | None,
) -> None:
    """Draws the token accuracy of held-out sets, and a line at the accuracy of a guess."""
    figure.suptitle("token accuracy, held out", x=0.012, ha="left", fontweight="bold")
    for axes in draw_lines(figure, runs, curves_of, widths, "share of supervised tokens"):
        axes.set_ylim(-0.03, 1.03)
        if chance is not None:
            axes.axhline(chance, color="black", linestyle=":", linewidth=1.2)
            where, shift = (0.99, chance), (0, 3)  # right end of the panel; 3 points above the line
            axes.annotate(f"chance {chance:g}", where, shift, ("axes fraction", "data"), "offset points", ha="right")


def finish(axes: Axes, title: str, unit: str) -> None:
    """Gives a panel its title, units and grid."""
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw(runs: Sequence[PlottedRun], out: Path, chance: float | None = None) -> None:
    """Draws all runs into one picture: PNG, SVG or PDF, by its ending.

    Earlier runs have wider lines, so equal curves remain visible.

    chance  token accuracy of a guess; None: not drawn
    """
    widths = [1.6 + 2.4 * (len(runs) - 1 - i) / max(1, len(runs) - 1) for i in range(len(runs))]
    data, positions_of = positions(runs)
    accuracies_of = [accuracies(run) for run in runs]
    heights = [3.2 * grid(len(runs), len(names_of(curves)))[0] for curves in (accuracies_of, positions_of)]  # inches
    shown = [7.5, *filter(None, heights)]
    figure = Figure(figsize=(12, sum(shown)), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    top, *more = figure.subfigures(len(shown), 1, squeeze=False, height_ratios=shown).flat
    if heights[0]:
        draw_accuracy(more[0], runs, accuracies_of, widths, chance)
    if heights[1]:
        more[-1].suptitle(f"loss by position, {data}", x=0.012, ha="left", fontweight="bold")
        draw_lines(more[-1], runs, positions_of, widths, "nats per supervised token")
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
    # Below the panels, because curves could cross a legend inside one.
    top.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside lower left", ncols=min(len(runs), 3))
    figure.savefig(out, dpi=120, format=out.suffix[1:])
