"""Draws a step with a fixed cp, and with dynamic CP: the x axis is time, the y axis is the rank, and each pack is a
block whose colour shows its CP size.

Decides panels, axes and colours.  All times are predictions of `packing/cp_grid.py`, not measurements.
Importing this module without matplotlib (the extra `plot`) raises ImportError.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator

from sft.data.loader import Loader
from sft.data.packing.cp_grid import TimedPack, fixed, timeline

SHADES = ("#cfe1f2", "#9ecae1", "#6aaed6", "#3787c0", "#1c5fa5", "#08306b")  # by CP size, the largest last
FILLER, IDLE, END = "#a6a6a6", "#e9e9e9", "#c00000"


def draw_step(out: Path, loader: Loader) -> str:
    """Draws the first step of a run with dynamic CP into the PNG file `out`.  Returns a line about the picture."""
    layout, cost = loader.layout, loader.cp_cost
    assert cost is not None
    grids = (fixed(loader.slots(0), layout.cp), loader.grid(0))
    panels = [timeline(grid, loader.corpus.shapes, cost) for grid in grids]
    figure = drawn(*panels, num_ranks=layout.dp * layout.cp, cp_sizes=layout.cp_sizes)
    figure.savefig(out, dpi=120, format="png")
    return f"step 1 with cp {layout.cp} and with dynamic CP, {layout.dp * layout.cp} ranks of dp x cp"


def drawn(
    fixed_packs: Sequence[TimedPack], dynamic: Sequence[TimedPack], *, num_ranks: int, cp_sizes: Sequence[int]
) -> Figure:
    """The picture with two panels.  cp_sizes: the CP sizes of packs in rising order; the last is the fixed cp"""
    cp, ends = cp_sizes[-1], [max(pack.end_ns for pack in packs) for packs in (fixed_packs, dynamic)]
    titles = (f"cp {cp}: every pack on {cp} ranks", f"dynamic CP: {ends[1] / max(1, ends[0]):.2f} of this time")
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, title, packs in zip(panels, titles, (fixed_packs, dynamic)):
        _panel(axes, title, packs, num_ranks, cp_sizes)
    panels[1].set(xlabel="time, predicted", xlim=(0, 1.02 * max(1, *ends) / 1e9))
    names = {_shade(size, cp_sizes): f"{size} rank{'s' * (size > 1)}" for size in reversed(cp_sizes)}
    names |= {FILLER: "filler", IDLE: "waits"}
    figure.legend(handles=[Patch(color=color, label=name) for color, name in names.items()], loc="outside right center")
    return figure


def _panel(axes: Axes, title: str, packs: Sequence[TimedPack], num_ranks: int, cp_sizes: Sequence[int]) -> None:
    """Draws the packs of each rank in a row of their own, and a line at the end of the step."""
    end_s = max(1, *(pack.end_ns for pack in packs)) / 1e9
    busy_s = sum((pack.end_ns - pack.start_ns) * pack.cp_size for pack in packs) / 1e9
    axes.add_patch(Rectangle((0, 0), end_s, num_ranks, color=IDLE))
    for pack in packs:
        color = _shade(pack.cp_size, cp_sizes) if pack.samples else FILLER
        corner, width = (pack.start_ns / 1e9, pack.rank), (pack.end_ns - pack.start_ns) / 1e9
        axes.add_patch(Rectangle(corner, width, pack.cp_size, facecolor=color, edgecolor="white", linewidth=0.5))
    axes.axvline(end_s, color=END)
    axes.set_title(f"{title}; ranks busy {busy_s / (end_s * num_ranks):.0%}", loc="left", fontweight="bold")
    axes.set_ylim(num_ranks, 0)
    axes.set_ylabel("rank of dp x cp")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(EngFormatter("s"))


def _shade(cp_size: int, cp_sizes: Sequence[int]) -> str:
    """The colour of a CP size.  The largest has the darkest; if there are more sizes than colours, the smallest sizes
    have the lightest."""
    return SHADES[max(0, len(SHADES) - len(cp_sizes) + cp_sizes.index(cp_size))] if cp_size > 1 else SHADES[0]
