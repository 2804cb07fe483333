"""The picture of a step: where its blocks are."""

import re

import pytest

from sft.data.inspect import cp_picture
from sft.data.inspect.cp_picture import svg
from sft.data.packing.cp_timeline import TimedPack
from tools import pages, plot_dynamic_cp

BLOCK = re.compile(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" fill="(#\w+)"')
SPAN = cp_picture.WIDTH - cp_picture.LEFT - cp_picture.RIGHT


def blocks(picture: str) -> list[tuple[float, float, float, float, str]]:
    """Time in steps of the fixed cp, first rank, duration, ranks and colour of each block and background."""
    found = []
    for x, y, width, height, fill in BLOCK.findall(picture):
        left, top = float(x) - cp_picture.LEFT, float(y) - cp_picture.TOP
        found.append((round(left / SPAN, 2), top / cp_picture.ROW, round(float(width) / SPAN, 2),
                      float(height) / cp_picture.ROW, fill))  # fmt: skip
    return found


def test_blocks_by_hand() -> None:
    """Two ranks: at cp 2 a pack of 8 s; with dynamic CP 4 s together, then 1 s and 2 s apart, the latter filler."""
    light, dark = cp_picture.SHADES[0], cp_picture.SHADES[-1]
    whole = [TimedPack(0, 2, 0, (0, 1), 0, 8 * 10**9)]
    apart = [
        TimedPack(0, 2, 0, (0,), 0, 4 * 10**9),
        TimedPack(0, 1, 1, (1,), 4 * 10**9, 5 * 10**9),
        TimedPack(1, 1, 1, (), 4 * 10**9, 6 * 10**9),
    ]
    picture = svg(whole, apart, num_ranks=2, cp_sizes=(1, 2))
    of_fixed, of_dynamic = blocks(picture)[:2], blocks(picture)[2:6]
    assert of_fixed == [(0, 0, 1, 2, cp_picture.IDLE), (0, 0, 1, 2, dark)]
    second = (cp_picture.TOP + 20) / cp_picture.ROW + 2  # the panel below
    assert [(x, round(rank - second, 6), *rest) for x, rank, *rest in of_dynamic] == [
        (0, 0, 0.75, 2, cp_picture.IDLE),
        (0, 0, 0.5, 2, dark),
        (0.5, 0, 0.12, 1, light),
        (0.5, 1, 0.25, 1, cp_picture.FILLER),
    ]
    assert re.findall(r">([^<>\n]+)</text>", picture) == [
        *("cp 2: every pack on 2 ranks; ranks busy 100%", "rank 0", "rank 1"),
        *("dynamic CP: 0.75 of this time; ranks busy 92%", "rank 0", "rank 1"),  # (4 x 2 + 1 + 2) / (6 x 2)
        *("0", "1", "2", "3", "4", "5", "6", "7", "8", "s, predicted"),
        *("1 rank", "2 ranks", "filler", "waits"),
    ]


@pytest.mark.parametrize("num_ranks,labels", [(2, 2), (64, 16), (256, 32)])
def test_labels_do_not_overlap(num_ranks: int, labels: int) -> None:
    packs = [TimedPack(rank, 1, 0, (rank,), 0, 10**6) for rank in range(num_ranks)]
    assert svg(packs, packs, num_ranks=num_ranks, cp_sizes=(1, 2)).count(">rank ") == 2 * labels


def test_the_picture_of_the_docs_is_that_of_the_tool() -> None:
    page = pages.DOCS / "pictures/dynamic-cp.svg"
    assert plot_dynamic_cp.picture() == page.read_text(encoding="utf-8"), "`make pages` draws it again"
