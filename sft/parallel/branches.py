"""Describes which documents of a pack continue which, so that tokens with which several texts begin are stored once.

In numpy, without torch.  A document that continues another one is a branch.  Its parent is an earlier document of the
pack, and its fork is the number of the parent's tokens that come before the first token of the branch.  A token of a
branch attends to tokens of the branch and to the tokens before the branch.  The depth of a document is the position of
its first token:

    document 0          s0 s1 s2 s3 s4 s5 s6     no parent, depth 0
    document 1                   a0 a1 a2        parent 0, fork 3, depth 3: the text s0 s1 s2 a0 a1 a2
    document 2                      b0 b1        parent 1, fork 1, depth 4: the text s0 s1 s2 a0 b0 b1

In every other respect a branch is a document: it is padded to data.doc_multiple, and context parallelism cuts it into
2 * cp chunks.  So each rank computes the same number of (query, key) pairs of a branch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np


class Ancestor(NamedTuple):
    """The first `length` tokens of a document, which come before a branch.  depth: position of the first token"""

    document: int
    length: int
    depth: int


@dataclass(frozen=True, eq=False)
class Branches:
    """The parents of all documents of a pack, in the order of the pack.

    parents  int64 [documents], index of each document's parent, which is lower; -1: it has none
    forks    int64 [documents], number of the parent's real tokens before the document, at least 1; 0: no parent
    """

    parents: np.ndarray
    forks: np.ndarray

    @staticmethod
    def of(parents: Sequence[int] | np.ndarray, forks: Sequence[int] | np.ndarray) -> "Branches":
        """Make Branches.  Asserts that parents come before their branches, and that only branches have a fork."""
        branches = Branches(np.asarray(parents, dtype=np.int64), np.asarray(forks, dtype=np.int64))
        is_branch, numbers = branches.parents >= 0, np.arange(len(branches.parents))
        assert branches.parents.shape == branches.forks.shape, "each document needs a parent and a fork"
        assert (branches.parents >= -1).all() and (branches.parents < numbers).all(), f"parents {branches.parents}"
        assert ((branches.forks >= 1) == is_branch).all(), f"forks {branches.forks} of parents {branches.parents}"
        return branches

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> np.ndarray:
        """int64 [documents], position of each document's first token."""
        depths = np.zeros(len(self), dtype=np.int64)
        for document in np.flatnonzero(self.parents >= 0).tolist():  # parents come first
            depths[document] = depths[self.parents[document]] + self.forks[document]
        return depths

    @cached_property
    def in_tree(self) -> np.ndarray:
        """bool [documents]: whether a document is a branch or has branches."""
        is_branch = self.parents >= 0
        return is_branch | np.isin(np.arange(len(self)), self.parents[is_branch])

    def cuts(self, padded: np.ndarray, chunks: int) -> np.ndarray:
        """int64 [documents], number of different forks of a document that are not at an end of one of its chunks.

        padded: padded lengths of the documents, each a multiple of `chunks`
        chunks: number of equal chunks of each document
        """
        ends = np.unique(np.stack([self.parents, self.forks], axis=1)[self.parents >= 0], axis=0)
        parents, forks = ends[ends[:, 1] % (padded[ends[:, 0]] // chunks) != 0].T
        return np.bincount(parents, minlength=len(self))

    def path(self, document: int) -> list[Ancestor]:
        """The ancestors of a document, the oldest first.  Document 2 of the example -> (0, 3, 0), (1, 1, 3)"""
        pieces: list[Ancestor] = []
        while self.parents[document] >= 0:
            parent, fork = int(self.parents[document]), int(self.forks[document])
            pieces.append(Ancestor(parent, fork, int(self.depths[parent])))
            document = parent
        return pieces[::-1]
