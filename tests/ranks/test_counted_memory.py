"""The predicted memory of a step against the bytes that torch's CPU allocator counts, in total and by category."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import counted_memory
from tests.ranks.pool import RankPool

QUICK = ("full", "cp", "ep")


def _param(name: str) -> Any:
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.grid)


@pytest.mark.parametrize("name", map(_param, counted_memory.ROWS))
def test_counted_bytes_are_predicted(ranks: Callable[[int], RankPool], name: str) -> None:
    row = counted_memory.measure(ranks(counted_memory.ROWS[name][1]), name)
    assert row.misses == [], row.as_json(1 << 20)
