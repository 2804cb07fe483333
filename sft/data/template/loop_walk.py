"""Compares the iterations of a loop with those of an earlier rendering of the chat.

Decides how many of the first iterations have the same result.  `lookahead.py` finds how many messages they read ahead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

from sft.data.template.rendering import Run


class Result(NamedTuple):
    """The result of a statement: its text at position `start` of the rendering, the text's runs, and the values that
    the statement left in the namespaces and lists that it changed."""

    start: int
    text: str
    runs: list[Run]
    left: list[Any]


@dataclass
class LoopPass:
    """The first iterations of a loop in a rendering.

    items  the items of the loop
    lists  the other lists of which the iterations read items
    steps  the key and the result of each iteration
    """

    items: list[Any]
    lists: tuple[list[Any], ...]
    steps: list[tuple[tuple[Any, ...], Result]] = field(default_factory=list)

    def num_equal(self, items: list[Any], lists: tuple[list[Any], ...], reach: int) -> int:
        """The number of first iterations that have the same results for these items and lists."""
        pairs = zip((self.items, *self.lists), (items, *lists), strict=True)
        return min(len(self.steps), *(num_same(left, right) - reach for left, right in pairs))


class Walk:
    """A loop over a list that may skip items.

    num_equal  number of first iterations that have the same results as in `earlier`
    behind     number of first iterations that are compared one by one
    """

    def __init__(self, items: list[Any]) -> None:
        self.items, self.iterator = items, iter(items)
        self.position = -1  # the index of the current iteration
        self.now: LoopPass | None = None  # the iterations of this rendering
        self.earlier: LoopPass | None = None  # the iterations of another rendering with the same start
        self.num_equal = self.behind = 0

    def __iter__(self) -> Iterator[Any]:
        return self.iterator

    def __len__(self) -> int:
        return len(self.items)


def moved(result: Result, start: int) -> Result:
    """The result as if it was written at position `start`."""
    moved = start - result.start
    runs = [
        tuple.__new__(Run, (a + moved, b + moved, source, writer, first, last))
        for a, b, source, writer, first, last in result.runs
    ]
    return result._replace(start=start, runs=runs)


def num_same(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The length of the shorter list if the other begins with it, and 0 otherwise."""
    return min(len(left), len(right)) if all(map(is_, left, right)) else 0
