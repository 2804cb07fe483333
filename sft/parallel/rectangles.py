"""Divides attention of branches to their parents into calls of a kernel without a mask.  Without torch.

In one call, a kernel for packed sequences computes several sequences.  All queries of a sequence attend to all its
keys, and sequences of one call have no common query and no common key.  But branches of a document attend to different
numbers of its tokens (`branches.py`).  These (query, key) pairs form a staircase.  This module divides the staircase
into rectangles, and each rectangle is a sequence:

    forks 1, 3 and 6 of a document, each with one branch         keys    0   1 2   3 4 5
                                                                 fork 1  b
                                                                 fork 3  a   a
                                                                 fork 6  a   a     b
    call 1 has the rectangle a, call 2 has both rectangles b

With m different forks, the keys between two forks are m blocks.  The upper half of the forks attends to the lower half
of the blocks in one rectangle, and both halves are divided in the same way.  So a document takes ceil(log2(m + 1))
calls.  Rectangles of documents that have no common branch are in the same calls.  Documents without a parent are the
first generation, their branches the second, and so on.  A generation takes as many calls as its document with the most
calls, and the generations take calls one after the other.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from sft.parallel.branches import Branches


class Rectangle(NamedTuple):
    """All queries of `branches` attend to the keys start .. stop - 1 of the document `parent`."""

    branches: tuple[int, ...]
    parent: int
    start: int
    stop: int


def rectangles(branches: Branches) -> list[list[Rectangle]]:
    """The rectangles of each call.  Each pair of a branch and a token before it is in exactly one rectangle.

    parents -1 0 0 0, forks 0 1 3 6 -> [((2, 3), 0, 0, 3)], then [((1,), 0, 0, 1), ((3,), 0, 3, 6)]
    """
    generations: list[dict[int, dict[int, list[int]]]] = []  # generation -> parent -> fork -> branches at the fork
    for document in range(len(branches)):
        for generation, piece in enumerate(branches.path(document)):
            if generation == len(generations):
                generations.append(defaultdict(lambda: defaultdict(list)))
            generations[generation][piece.document][piece.length].append(document)
    calls = []
    for parents in generations:
        levels: dict[int, list[Rectangle]] = defaultdict(list)
        for parent, documents in parents.items():
            stairs = [(0, []), *sorted(documents.items())]
            for level, rectangle in _halved(parent, stairs, 0):
                levels[level].append(rectangle)
        calls += [levels[level] for level in sorted(levels)]
    return calls


def _halved(parent: int, stairs: list[tuple[int, list[int]]], level: int) -> Iterator[tuple[int, Rectangle]]:
    """Yield the rectangles of the stairs, each with its level.  Rectangles of one level are in the same call.

    stairs: (fork, branches at the fork), ascending.  Keys before the first fork are not part of the stairs
    """
    if len(stairs) == 1:
        return
    middle = len(stairs) // 2
    upper = tuple(document for _, documents in stairs[middle:] for document in documents)
    yield level, Rectangle(upper, parent, stairs[0][0], stairs[middle][0])
    yield from _halved(parent, stairs[:middle], level + 1)
    yield from _halved(parent, stairs[middle:], level + 1)
