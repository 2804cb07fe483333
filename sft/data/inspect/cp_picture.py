"""Draws a step with fixed and with dynamic CP as SVG: ranks against time, each pack a block coloured by its CP size.

Decides axes, colours and labels.  `packing/cp_timeline.py` predicts when packs begin and end; nothing is measured.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from sft.config import Config
from sft.data.cache.corpus import Corpus
from sft.data.loader import make_loader
from sft.data.packing.cp_cost import CpCost
from sft.data.packing.cp_grid import Grid, fixed
from sft.data.packing.cp_timeline import TimedPack, timeline
from sft.parallel.layout import Layout

WIDTH, LEFT, RIGHT, TOP, HEIGHT = 760, 64, 14, 30, 260  # HEIGHT: of the rows of a panel, up to 130 ranks
ROW, LABEL = 18, 12  # heights of a rank, at most, and of its label
NARROW = 3.0  # blocks below this width have no border, which would hide their colour
SHADES = ("#cfe1f2", "#9ecae1", "#6aaed6", "#3787c0", "#1c5fa5", "#08306b")  # by CP size, the largest last
FILLER, IDLE, END = "#a6a6a6", "#e9e9e9", "#c00000"


def draw_step(path: Path, config: Config, layout: Layout, corpus: Corpus, step: int = 0) -> str:
    """Writes the picture of a step of a run with dynamic CP to `path`.  Returns a line about it."""
    loader, cost = make_loader(config, layout, corpus, pad_id=0), CpCost.of(config)
    grids: list[Grid] = [fixed(loader.slots(step), layout.cp), loader.grid(step)]
    panels = [timeline(grid, corpus.lengths, doc_multiple=layout.doc_multiple, cost=cost) for grid in grids]
    path.write_text(svg(*panels, num_ranks=layout.dp * layout.cp, cp_sizes=layout.cp_sizes), encoding="utf-8")
    return f"step {step + 1} with cp {layout.cp} and with dynamic CP, {layout.dp * layout.cp} ranks of dp x cp"


def svg(
    fixed_packs: Sequence[TimedPack], dynamic: Sequence[TimedPack], *, num_ranks: int, cp_sizes: Sequence[int]
) -> str:
    """The picture.  cp_sizes: in increasing order; the last is the fixed cp, whose groups are the rows of the grid"""
    cp, ends = cp_sizes[-1], [max(pack.end_ns for pack in packs) for packs in (fixed_packs, dynamic)]
    row = min(ROW, max(2, HEIGHT // num_ranks))
    panel = row * num_ranks + TOP + 20
    scale = (WIDTH - LEFT - RIGHT) / max(1, *ends)
    title = f"dynamic CP: {ends[1] / max(1, ends[0]):.2f} of this time"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * panel + 64}" font-family="sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_panel(f"cp {cp}: every pack on {cp} ranks", fixed_packs, num_ranks, cp_sizes, scale, row, TOP),
        *_panel(title, dynamic, num_ranks, cp_sizes, scale, row, TOP + panel),
        *_axis(max(ends), scale, 2 * panel + 2),
        *_legend(cp_sizes, 2 * panel + 50),
    ]
    return "\n".join([*parts, "</svg>\n"])


def _panel(
    title: str, packs: Sequence[TimedPack], num_ranks: int, cp_sizes: Sequence[int], scale: float, row: int, top: int
) -> Iterator[str]:
    """The rows of all ranks, and a line at the end of the step."""
    height, end = row * num_ranks, max(pack.end_ns for pack in packs)
    busy = sum((pack.end_ns - pack.start_ns) * pack.cp_size for pack in packs) / max(1, end * num_ranks)
    yield f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}; ranks busy {busy:.0%}</text>'
    yield f'<rect x="{LEFT}" y="{top}" width="{end * scale:.1f}" height="{height}" fill="{IDLE}"/>'
    for pack in packs:
        fill = _shade(pack.cp_size, cp_sizes) if pack.samples else FILLER
        yield _block(pack.start_ns * scale, (pack.end_ns - pack.start_ns) * scale, pack, fill, row, top)
    for rank in range(cp_sizes[-1], num_ranks, cp_sizes[-1]):  # between the rows of the grid
        line = f"M{LEFT} {top + row * rank}h{end * scale:.1f}"
        yield f'<path d="{line}" stroke="white" stroke-width="{row / 10 + 0.6:g}"/>'
    for rank in range(0, num_ranks, next(1 << bit for bit in range(16) if row << bit >= LABEL)):
        yield f'<text x="{LEFT - 6}" y="{top + row * rank + row / 2 + 4:g}" text-anchor="end">rank {rank}</text>'
    yield f'<path d="M{LEFT + end * scale:.1f} {top - 4}v{height + 8}" stroke="{END}" stroke-width="1.5"/>'


def _block(left: float, width: float, pack: TimedPack, fill: str, row: int, top: int) -> str:
    border = f' stroke="white" stroke-width="{min(1.0, row / 8):.2f}"' if width >= NARROW else ""
    return (
        f'<rect x="{LEFT + left:.1f}" y="{top + row * pack.rank}" width="{width:.1f}" '
        f'height="{row * pack.cp_size}" fill="{fill}"{border}/>'
    )


def _axis(end_ns: int, scale: float, y: int) -> Iterator[str]:
    """Ticks at 1, 2 or 5 times a power of ten of the unit, at most eight of them."""
    unit, name = next((size, name) for size, name in ((10**9, "s"), (10**6, "ms"), (1000, "µs")) if end_ns >= size)
    tick = next(k * 10**power for power in range(12) for k in (1, 2, 5) if end_ns <= 8 * k * 10**power)
    for time in range(0, end_ns + 1, tick):
        x = LEFT + time * scale
        yield f'<path d="M{x:.1f} {y - 10}v4" stroke="black" stroke-width="0.8"/>'
        yield f'<text x="{x:.1f}" y="{y + 6}" text-anchor="middle">{time / unit:g}</text>'
    yield f'<text x="{LEFT}" y="{y + 22}">{name}, predicted</text>'


def _legend(cp_sizes: Sequence[int], y: int) -> Iterator[str]:
    names = [(_shade(size, cp_sizes), f"{size} rank{'s' * (size > 1)}") for size in cp_sizes]
    names += [(FILLER, "filler"), (IDLE, "waits")]
    wide = min(100, (WIDTH - LEFT - RIGHT) // len(names))
    for index, (fill, name) in enumerate(names):
        x = LEFT + wide * index
        yield f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{fill}" stroke="#888" stroke-width="0.5"/>'
        yield f'<text x="{x + 16}" y="{y}">{name}</text>'


def _shade(cp_size: int, cp_sizes: Sequence[int]) -> str:
    """Dark for the largest size, light for the smallest; more than six sizes share the lightest colours."""
    return SHADES[max(0, len(SHADES) - len(cp_sizes) + cp_sizes.index(cp_size))] if cp_size > 1 else SHADES[0]
