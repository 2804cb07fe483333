"""Panels of loss by position: one run, a line for each bucket; several runs, a panel for each bucket."""

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import MaxNLocator

from tools.plotted_run import Curves, PlottedRun, names_of

COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f"]
COLUMNS = 4  # of panels of buckets, at most


def grid(num_runs: int, num_buckets: int) -> tuple[int, int]:
    """Rows and columns of panels: 0 buckets -> (0, 0); one run -> (1, 1); 3 buckets -> (1, 3); 5 -> (2, 3)"""
    if num_runs == 1 or not num_buckets:
        return (1, 1) if num_buckets else (0, 0)
    rows = -(-num_buckets // COLUMNS)
    return rows, -(-num_buckets // rows)


def draw_positions(
    figure: FigureBase, runs: Sequence[PlottedRun], curves_of: Sequence[Curves], widths: Sequence[float]
) -> None:
    """Draws one panel with a line for each bucket (one run), or a panel for each bucket with a line for each run."""
    buckets = names_of(curves_of)
    is_one = len(runs) == 1
    panels = figure.subplots(*grid(len(runs), len(buckets)), sharex=True, sharey=True, squeeze=False)
    for i, bucket in enumerate(buckets):
        axes = panels.flat[0 if is_one else i]
        for j, curves in enumerate(curves_of):
            if bucket not in curves:
                continue
            steps, losses = curves[bucket]
            color = colormaps["viridis"](0.9 * i / max(1, len(buckets) - 1)) if is_one else COLORS[j % len(COLORS)]
            marker = "o" if len(steps) <= 40 else ""
            label = bucket if is_one else runs[j].name
            axes.plot(steps, losses, marker=marker, mec="white", ms=6, lw=widths[j], color=color, label=label)
        finish(axes, "" if is_one else bucket, "nats per supervised token" if axes in panels[:, 0] else "")
        axes.tick_params(labelbottom=True)
    for axes in panels.flat[1 if is_one else len(buckets) :]:
        axes.remove()
    if is_one:
        panels[0, 0].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def finish(axes: Axes, title: str, unit: str) -> None:
    """Gives a panel its title, units and grid."""
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
