"""Documents that continue other documents: depths, paths, and the parts of texts."""

import numpy as np
import pytest

from sft.parallel.branches import Branches
from sft.parallel.text_parts import TextParts

# Documents 0 and 4 begin by themselves.  Document 1 continues 0, document 2 continues 1, and document 3 continues 0.
EXAMPLE = Branches.of([-1, 0, 1, 0, -1], [0, 3, 1, 5, 0])


def test_depths_and_paths_written_out() -> None:
    assert EXAMPLE.depths.tolist() == [0, 3, 4, 5, 0]
    assert [tuple(piece) for piece in EXAMPLE.path(2)] == [(0, 3, 0), (1, 1, 3)]
    assert [tuple(piece) for piece in EXAMPLE.path(3)] == [(0, 5, 0)]
    assert EXAMPLE.path(4) == []


@pytest.mark.parametrize(
    "parents,forks",
    [([0], [1]), ([-1, 2, -1], [0, 1, 0]), ([-1, 0], [0, 0]), ([-1, -1], [0, 2]), ([-1, -2], [0, 0]), ([-1], [0, 0])],
    ids=["own parent", "later parent", "no fork", "no parent", "below -1", "two lengths"],
)
def test_refused(parents: list[int], forks: list[int]) -> None:
    with pytest.raises(AssertionError):
        Branches.of(parents, forks)


def test_parts_written_out() -> None:
    """Document 0 has 7 tokens.  Texts end after 6 of them, in document 1, and in document 2.

    Document 0 is cut at the forks 3 and 5 and at the end 6; document 1 at the fork 1.
    """
    parts = TextParts.of(EXAMPLE, np.array([[0, 6], [1, 4], [2, 2], [3, 1], [4, 2]]))
    documents = {0: [0, 3, 5, 6], 1: [0, 1, 4], 2: [0, 2], 3: [0, 1], 4: [0, 2]}
    assert list(zip(parts.documents, parts.starts)) == [
        (d, start) for d, starts in documents.items() for start in starts
    ]
    held = [[(parts.documents[i], parts.starts[i]) for i in np.flatnonzero(row)] for row in parts.in_text]
    assert held == [
        [(0, 0), (0, 3), (0, 5)],
        [(0, 0), (1, 0), (1, 1)],
        [(0, 0), (1, 0), (2, 0)],
        [(0, 0), (0, 3), (3, 0)],
        [(4, 0)],
    ]
    tokens = parts.of_tokens(np.array([0, 0, 0, 0, 1, 1, 2, 4]), np.array([0, 2, 3, 5, 0, 1, 1, 1]))
    assert tokens.tolist() == [0, 0, 1, 2, 4, 5, 7, 11]
