"""Draws a survey in three panels: the lengths of rows, the share of rows that fit uncut, and the supervised share of
each file.

If data.train names sources, the picture shows sources instead of training files.  Decides panels, axes and colours.
Importing this module without matplotlib (the extra `plot`) raises ImportError.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from sft.data.inspect.counts import FileCounts
from sft.data.inspect.survey import Survey

_COLORS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#e377c2", "#7f7f7f"]
_CURVES = [  # share, name, colour
    ("rows_share", "rows", "#1f77b4"),
    ("tokens_share", "tokens", "#7f7f7f"),
    ("supervised_share", "supervised tokens", "#2ca02c"),
]
_MOST_BARS = 16
_RECIPE = "#d62728"


def draw(survey: Survey, out: Path) -> None:
    """Draws the survey into the PNG file `out`."""
    bars = _shown(survey)
    heights = [3.2, 3.2, 0.8 + 0.32 * len(bars)]  # inches
    figure = Figure(figsize=(11, sum(heights) + 1), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    figure.suptitle(f"data of {survey.recipe}", x=0.012, ha="left", fontweight="bold")
    panels = figure.subplots(3, 1, height_ratios=heights)
    for axes, draw_panel in zip(panels, (_lengths, _fits), strict=False):
        draw_panel(axes, survey)
        _token_axis(axes, survey)
    _share(panels[2], bars, _kind(survey))
    for axes in panels:
        axes.grid(alpha=0.25, axis="x" if axes is panels[2] else "both")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=120, format="png")


def _lengths(axes: Axes, survey: Survey) -> None:
    """Draws the number of rows by length: stacked bars, one colour for each training file or source.

    The smallest files or sources share one colour if there are more than colours.
    """
    shown = sorted(_trained(survey), key=lambda counts: -counts.rows)
    buckets = survey.total.histogram
    starts = np.log2([bucket.at_least for bucket in buckets])
    below = np.zeros(len(buckets))
    groups = [[counts] for counts in shown[: len(_COLORS) - 1]] + [shown[len(_COLORS) - 1 :]]
    for group, color in zip(filter(None, groups), _COLORS, strict=False):
        rows = {bucket.at_least: 0 for bucket in buckets}
        for counts in group:
            for bucket in counts.histogram:
                rows[bucket.at_least] += bucket.rows
        heights = np.array(list(rows.values()))
        label = _short(_name(group[0])) if len(group) == 1 else f"{len(group)} other {_kind(survey)}s"
        named = label if len(shown) > 1 else None
        axes.bar(starts, heights, 1, below, align="edge", color=color, edgecolor="white", linewidth=0.6, label=named)
        below += heights
    axes.set_title("lengths of rows", loc="left", fontweight="bold")
    axes.set_ylabel("rows")
    axes.set_ylim(0, 1.05 * max(bucket.rows for bucket in buckets))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens of a whole row")


def _fits(axes: Axes, survey: Survey) -> None:
    sizes = np.log2([point.seq_length for point in survey.retention])
    for share, label, color in _CURVES:
        shares = [getattr(point, share) for point in survey.retention]
        axes.plot(sizes, shares, "o-", color=color, label=label, mec="white", ms=6, lw=1.8)
    axes.set_title("rows that fit uncut", loc="left", fontweight="bold")
    axes.set(xlabel="data.seq_length, tokens", ylabel="share of all", ylim=(-0.03, 1.05))
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _share(axes: Axes, bars: list[FileCounts], kind: str) -> None:
    shares = [counts.supervised_share for counts in bars]
    names = [_short(_name(counts)) + ("" if counts.part == "train" else f" ({counts.part})") for counts in bars]
    axes.barh(range(len(bars)), shares, 0.7, color="#2ca02c")
    for i, counts in enumerate(bars):
        text = f" {100 * counts.supervised_share:.1f}% of {counts.tokens:,} tokens"
        axes.text(counts.supervised_share, i, text, va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.32 * max([*shares, 0.01]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"share of supervised tokens, by {kind}", loc="left", fontweight="bold")
    axes.set_xlabel(f"supervised tokens, share of a {kind}'s tokens")


def _shown(survey: Survey) -> list[FileCounts]:
    """The files or sources in the lowest panel: all, or the 16 with the most tokens."""
    bars = [*_trained(survey), *(counts for counts in survey.files if counts.part != "train")]
    return bars if len(bars) <= _MOST_BARS else sorted(bars, key=lambda counts: -counts.tokens)[:_MOST_BARS]


def _trained(survey: Survey) -> list[FileCounts]:
    return list(survey.sources) or [counts for counts in survey.files if counts.part == "train"]


def _kind(survey: Survey) -> str:
    return "source" if survey.sources else "file"


def _name(counts: FileCounts) -> str:
    """The name of the source; for a file without a source, the name of the file."""
    return counts.source or counts.name


def _token_axis(axes: Axes, survey: Survey) -> None:
    """Gives a panel an x axis in tokens, logarithmic with labels 512, 1K, 2K, ..., and marks data.seq_length.

    The legend is right of the panel, because curves and bars could cross a legend inside the panel.
    """
    low = np.log2(survey.total.histogram[0].at_least)
    high = np.log2(max(survey.total.histogram[-1].below, survey.seq_length))
    powers = np.arange(low, np.floor(high) + 1)
    axes.xaxis.set_major_locator(FixedLocator(list(powers)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda power, _: _tokens(round(2**power))))
    axes.set_xlim(min(low, np.log2(survey.seq_length)) - 0.1, high + 0.1)
    label = f"data.seq_length {survey.seq_length:,}"
    axes.axvline(np.log2(survey.seq_length), color=_RECIPE, linestyle="--", linewidth=1.4, label=label)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=9, borderpad=0)


def _tokens(count: int) -> str:
    """512 -> 512, 2048 -> 2K, 1048576 -> 1M"""
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K" if count >= 1 << 10 else str(count)


def _short(name: str, limit: int = 40) -> str:
    return name if len(name) <= limit else f"...{name[3 - limit:]}"
