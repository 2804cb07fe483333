"""Draws the scores of a long-context evaluation: a heat map of length and depth for each task.  Needs matplotlib."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine

from sft.console import short_count
from sft.metrics.long import LongScores

_COLUMNS = 5  # largest number of panels in a row
_PANEL = (2.6, 2.4)  # inches
_COLORS = "RdYlGn"  # red 0, green 1


def shares(scores: LongScores, task: str) -> np.ndarray:
    """The share of right answers, float64 [depths, lengths]; NaN without a question."""
    cells = [[scores.of(task, length, depth) for length in scores.lengths] for depth in scores.depths]
    return np.array(
        [[np.mean([q.right for q in cell]) if cell else np.nan for cell in row] for row in cells], dtype=np.float64
    )


def draw_heat_map(axes: Axes, scores: LongScores, task: str, title: str) -> AxesImage:
    """Draw the shares of right answers of a task, depth by length."""
    values = shares(scores, task)
    image = axes.imshow(values, cmap=_COLORS, vmin=0, vmax=1, aspect="auto")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xticks(range(len(scores.lengths)), [short_count(length) for length in scores.lengths], fontsize=8)
    axes.set_yticks(range(len(scores.depths)), [f"{depth:.0%}" for depth in scores.depths], fontsize=8)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7)
    return image


def draw(scores: LongScores, out: Path) -> None:
    """Write the picture, in the format of the name's ending."""
    columns = min(_COLUMNS, len(scores.tasks))
    rows = -(-len(scores.tasks) // columns)
    size = (columns * _PANEL[0] + 1, rows * _PANEL[1] + 0.5)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine())
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[len(scores.tasks) :]:
        axes.set_visible(False)
    for axes, task in zip(panels.flat, scores.tasks):
        image = draw_heat_map(axes, scores, task, task)
    figure.colorbar(image, ax=panels, label="right answers", shrink=0.8)
    figure.supxlabel("length in tokens", fontsize=9)
    figure.supylabel("depth of the evidence", fontsize=9)
    figure.savefig(out, dpi=120, format=out.suffix[1:].lower())
