"""The positions of the blocks in the picture of a step."""

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from sft.data.inspect.cp_picture import FILLER, IDLE, SHADES, drawn
from sft.data.packing.cp_grid import TimedPack


def blocks(axes: Axes) -> list[tuple[float, float, float, float, str]]:
    """The start in seconds, first rank, duration, number of ranks and colour of the background and of each block."""
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [
        (*patch.get_xy(), patch.get_width(), patch.get_height(), to_hex(patch.get_facecolor())) for patch in patches
    ]


def test_blocks_by_hand() -> None:
    """Two ranks: a pack of 8 s at cp 2; with dynamic CP, a pack of 4 s on both, then packs of 1 s and 2 s on one each,
    the latter with filler."""
    light, dark = SHADES[0], SHADES[-1]
    whole = [TimedPack(0, 2, 0, (0, 1), 0, 8 * 10**9)]
    apart = [
        TimedPack(0, 2, 0, (0,), 0, 4 * 10**9),
        TimedPack(0, 1, 1, (1,), 4 * 10**9, 5 * 10**9),
        TimedPack(1, 1, 1, (), 4 * 10**9, 6 * 10**9),
    ]
    figure = drawn(whole, apart, num_ranks=2, cp_sizes=(1, 2))
    above, below = figure.axes
    assert blocks(above) == [(0, 0, 8, 2, IDLE), (0, 0, 8, 2, dark)]
    assert blocks(below) == [(0, 0, 6, 2, IDLE), (0, 0, 4, 2, dark), (4, 0, 1, 1, light), (4, 1, 2, 1, FILLER)]
    assert above.get_title(loc="left") == "cp 2: every pack on 2 ranks; ranks busy 100%"
    assert below.get_title(loc="left") == "dynamic CP: 0.75 of this time; ranks busy 92%"  # (4 x 2 + 1 + 2) / (6 x 2)
    assert above.get_ylim() == below.get_ylim() == (2, 0)  # rank 0 is on top
    assert above.get_xlim() == below.get_xlim() == (0, 8.16)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["2 ranks", "1 rank", "filler", "waits"]


@pytest.mark.parametrize("cp_sizes", [(1, 2), (1, 2, 4, 8, 16, 32, 64, 128)])
def test_the_largest_size_is_dark_and_one_rank_light(cp_sizes: tuple[int, ...]) -> None:
    packs = [TimedPack(0, size, number, (number,), 0, 10**6) for number, size in enumerate(cp_sizes)]
    colors = [color for *_, color in blocks(drawn(packs, packs, num_ranks=128, cp_sizes=cp_sizes).axes[0])[1:]]
    assert (colors[0], colors[-1]) == (SHADES[0], SHADES[-1])
