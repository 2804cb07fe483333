"""Draws the memory and the time of proposals as stacked bars.  Importing it needs matplotlib (the extra `plot`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from sft.estimate.gpus import GIB
from sft.planner.reasons import counted, named, part_name
from sft.planner.report import Report

_COLORS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#e377c2", "#7f7f7f", "#bcbd22", "#d62728"),
    *("#aec7e8", "#ffbb78", "#98df8a", "#c5b0d5", "#ff9896"),
)
_MEMORY_COLORS = ("#08306b", "#2171b5", "#6baed6", "#fd8d3c", "#fdd0a2", "#74c476", "#238b45", "#9e9ac8", "#54278f")
_LIMIT = "#d62728"
_SMALL = 0.002  # parts below this share of the longest bar are not drawn
_MOST_LETTERS = 34  # letters in a line of a label


def draw(reports: Sequence[Report], out: Path) -> None:
    """Write the picture as PNG or SVG, by the ending of its name.  Each report gets a pair of panels."""
    heights = [1.9 + 0.62 * max(1, len(report.proposals)) for report in reports]
    figure = Figure(figsize=(13, sum(heights)), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.12))
    panels = figure.subplots(len(reports), 2, squeeze=False, height_ratios=heights)
    for (memory, time), report in zip(panels, reports, strict=True):
        _memory(memory, report)
        _time(time, report)
    figure.savefig(out, dpi=120, format=out.suffix[1:])


def _memory(axes: Axes, report: Report) -> None:
    bars = [{name: value / GIB for name, value in proposal.memory.items().items()} for proposal in report.proposals]
    _stack(axes, [_label(named(proposal)) for proposal in report.proposals], bars, _MEMORY_COLORS)
    task = report.task
    axes.set_title(
        f"{task.name} on {counted(report.num_gpus, 'GPU')} {task.hardware.gpu.name}", loc="left", fontweight="bold"
    )
    axes.set_xlabel("GiB of a rank, predicted")
    if report.proposals:
        usable = report.proposals[0].usable
        axes.axvline(usable.bytes / GIB, color=_LIMIT, linestyle="--", linewidth=1.2)
        axes.axvline(usable.capacity / GIB, color=_LIMIT, linewidth=1.2)
        axes.set_xlim(0, usable.capacity / GIB * 1.03)
        axes.text(
            usable.bytes / GIB, -0.62, "usable ", color=_LIMIT, ha="right", va="bottom", fontsize=8
        )  # above the first bar
    _legend(axes)


def _time(axes: Axes, report: Report) -> None:
    bars = [{part_name(name): value for name, value in proposal.time.parts.items()} for proposal in report.proposals]
    _stack(axes, [f"{proposal.time.mfu:.0%} MFU" for proposal in report.proposals], bars)
    config = report.task.config
    packs, length = config.train.global_batch_size, config.data.seq_length
    axes.set_title(f"{packs} packs of {length:,} tokens a step", loc="left")
    axes.set_xlabel("seconds of a step, predicted")
    _legend(axes)


def _stack(
    axes: Axes, labels: Sequence[str], bars: Sequence[Mapping[str, float]], colors: Sequence[str] = _COLORS
) -> None:
    """Draw one horizontal bar for each proposal, the best one at the top."""
    longest = max((sum(bar.values()) for bar in bars), default=0.0)
    names = [
        name
        for name in dict.fromkeys(name for bar in bars for name in bar)
        if any(bar.get(name, 0.0) > _SMALL * longest for bar in bars)
    ]
    left = [0.0] * len(bars)
    for name, color in zip(names, colors, strict=False):
        widths = [bar.get(name, 0.0) for bar in bars]
        axes.barh(range(len(bars)), widths, left=left, color=color, label=name, height=0.66)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, end in enumerate(left):
        axes.text(end, row, f" {end:.1f}", va="center", ha="left", fontsize=8)
    axes.set_yticks(range(len(bars)), labels, fontsize=8)
    axes.set_ylim(len(bars) - 0.35, -0.65)
    axes.grid(alpha=0.25, axis="x")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if longest:
        axes.set_xlim(0, longest * 1.1)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


def _label(text: str) -> str:
    """The name of a proposal, broken into lines at commas."""
    lines = [""]
    for word in text.split(", "):
        longer = f"{lines[-1]}, {word}" if lines[-1] else word
        if len(longer) > _MOST_LETTERS and lines[-1]:
            lines[-1] += ","
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)
