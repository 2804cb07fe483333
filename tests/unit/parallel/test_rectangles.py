"""The calls in which branches attend to their parents: every pair once, and no row twice in a call."""

from collections import Counter

import numpy as np
import pytest

from sft.parallel.branches import Branches
from sft.parallel.rectangles import Rectangle, rectangles
from tests.trees import random_tree, rows_before


def test_the_example_of_the_module() -> None:
    found = rectangles(Branches.of([-1, 0, 0, 0], [0, 1, 3, 6]))
    assert found == [[Rectangle((2, 3), 0, 0, 3)], [Rectangle((1,), 0, 0, 1), Rectangle((3,), 0, 3, 6)]]


@pytest.mark.parametrize("seed", range(12))
def test_each_document_meets_each_token_of_its_path_once(seed: int) -> None:
    cu_seqlens, branches = random_tree(seed, multiple=1, count=40)
    seen: list[Counter[int]] = [Counter() for _ in range(len(branches))]
    for call in rectangles(branches):
        queries = [document for rectangle in call for document in rectangle.branches]
        keys = Counter[int]()
        for rectangle in call:
            start = int(cu_seqlens[rectangle.parent])
            rows = range(start + rectangle.start, start + rectangle.stop)
            keys.update(rows)
            for document in rectangle.branches:
                seen[document].update(rows)
        assert len(set(queries)) == len(queries) and max(keys.values()) == 1
    for document, rows_seen in enumerate(seen):
        assert rows_seen == Counter(rows_before(cu_seqlens, branches, document))


@pytest.mark.parametrize(
    "parents, forks, calls",
    [
        ([-1, -1], [0, 0], 0),
        ([-1, 0], [0, 5], 1),
        ([-1] + [0] * 30, [0] + [5] * 30, 1),  # one fork with 30 branches
        ([-1] + [0] * 3, [0, 1, 2, 3], 2),
        ([-1] + [0] * 30, [0, *range(1, 31)], 5),  # 30 forks: log2(31) = 4.95
        ([-1] + [0] * 31, [0, *range(1, 32)], 5),
        ([-1] + [0] * 32, [0, *range(1, 33)], 6),
        ([-1, 0, 1, 2], [0, 1, 1, 1], 3),  # three generations with one fork each
        ([-1, -1, 0, 1, 1, 1, 5], [0, 0, 4, 1, 2, 3, 9], 3),  # forks of both roots share calls
    ],
)
def test_number_of_calls(parents: list[int], forks: list[int], calls: int) -> None:
    assert len(rectangles(Branches.of(np.array(parents), np.array(forks)))) == calls
