"""Computes the documents of samples with trees in a pack: their parents, and the targets of tokens before a branch.

Decides which token predicts the first token of a branch, and the weight of a token that several texts supervise.  A
sample without a tree is a tree of one document here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sft.batch import BranchTargets, Sample, Tree
from sft.parallel import context_parallel
from sft.parallel.branches import Branches


class PackTargets(NamedTuple):
    """The targets of a pack to which samples are added.

    labels, weights, counts  [t]: as `Pack.labels`, `Pack.loss_weights` and `Pack.label_counts`
    others                   further targets: (row, label, weight, count), as in `BranchTargets`
    """

    labels: np.ndarray
    weights: np.ndarray
    counts: np.ndarray
    others: list[tuple[int, int, np.float32, int]]

    @staticmethod
    def none(total: int, pad_id: int) -> "PackTargets":
        """The targets of a pack of `total` tokens without samples."""
        labels = np.full(total, pad_id, dtype=np.int32)
        return PackTargets(labels, np.zeros(total, dtype=np.float32), np.zeros(total, dtype=np.int32), [])

    def add(
        self, tree: Tree, starts: np.ndarray, positions: np.ndarray, tokens: np.ndarray, supervised: "Supervision"
    ) -> None:
        """Adds the labels of a sample: each token is the label of the token before it in its document or parent.

        tree       the sample's tree (`tree_of`)
        starts     for each document of the sample, the index of its first token in the pack
        positions  for each token of the sample, its index in the pack
        tokens     the sample's tokens
        """
        weights, counts = supervised
        is_first = np.zeros(len(positions), dtype=bool)
        is_first[tree.starts[:-1]] = True
        labels = np.flatnonzero(~is_first)
        rows = positions[labels] - 1
        self.labels[rows], self.weights[rows], self.counts[rows] = (
            tokens[labels],
            weights[labels],
            counts[labels],
        )
        parents, forks = tree.branches.parents, tree.branches.forks
        for branch in np.flatnonzero((parents >= 0) & (weights[tree.starts[:-1]] > 0)).tolist():
            row, label = int(starts[parents[branch]] + forks[branch] - 1), int(tree.starts[branch])
            target = int(tokens[label]), weights[label], int(counts[label])
            if self.weights[row] > 0:
                self.others.append((row, *target))
            else:
                self.labels[row], self.weights[row], self.counts[row] = target

    def further(self) -> BranchTargets:
        """The further targets, in rising order of rows."""
        rows, labels, weights, counts = np.array(self.others, dtype=np.float64).reshape(-1, 4).T
        order = np.argsort(rows, kind="stable")
        return BranchTargets(
            rows=rows[order].astype(np.int64),
            labels=labels[order].astype(np.int64),
            weights=weights[order].astype(np.float32),
            counts=counts[order].astype(np.int32),
        )


def tree_of(sample: Sample) -> Tree:
    """The sample's tree; for a sample without one, the tree of a single document."""
    if sample.tree is not None:
        return sample.tree
    count, none = len(sample.tokens), np.zeros((0, 3), dtype=np.int64)
    return Tree(np.array([0, count]), Branches.of([-1], [0]), np.array([[0, count]]), none, np.zeros(0, np.float32))


def predicting_rows(tree: Tree, starts: np.ndarray) -> np.ndarray:
    """int64 [n]: for each token of a sample, the index in the pack of the token that predicts it; -1: none does.

    starts: for each document of the sample, the index of its first token in the pack
    """
    starts = starts.astype(np.int64)
    rows = context_parallel.runs(starts, np.diff(tree.starts)) - 1
    parents = tree.branches.parents
    rows[tree.starts[:-1]] = np.where(parents < 0, -1, starts[parents] + tree.branches.forks - 1)
    return rows


class Supervision(NamedTuple):
    """For each token of a sample, its weight in the loss, float32, and the number of texts that supervise it, int32."""

    weights: np.ndarray
    counts: np.ndarray


def supervision(sample: Sample, reduction: str, shared: str) -> Supervision:
    """The weights and counts of a sample's tokens.

    reduction  `loss.reduction`, which is applied to each text by itself
    shared     `loss.shared`: "each" adds the weights of all texts that supervise a token; "once" takes only the first

    Two texts of 2 supervised tokens each share one of them, reduction "sample", shared "each" -> weights 1/2 1 1/2,
    counts 1 2 1; shared "once" -> weights 1/2 1/2 1/2, counts 1 1 1.  If each is a sample of its own, because both do
    not fit into a pack: "each" -> 1/2 1/2 and 1/2 1/2; "once" -> 1/2 1/2 and 0 1/2
    """
    if sample.tree is None:
        weights = sample.weights * token_weight(sample.num_supervised, reduction)
        return Supervision(weights, (weights > 0).astype(np.int32))
    weights, counts = np.zeros(len(sample.tokens), np.float32), np.zeros(len(sample.tokens), np.int32)
    texts, starts, stops = sample.tree.spans.T
    of_text = np.bincount(texts, weights=stops - starts, minlength=len(sample.tree.ends))
    repeated = np.zeros(len(texts), bool) if sample.tree.repeated is None else sample.tree.repeated
    for text, start, stop, weight, is_repeated in zip(texts, starts, stops, sample.tree.span_weights, repeated):
        is_counted = ((counts[start:stop] == 0) & (not is_repeated)) | (shared == "each")
        weights[start:stop] += is_counted * weight * token_weight(int(of_text[text]), reduction)
        counts[start:stop] += is_counted
    return Supervision(weights, counts)


class PackDocuments(NamedTuple):
    """The documents of a pack with trees; `Pack` describes the arrays."""

    branches: Branches
    firsts: np.ndarray
    texts: np.ndarray

    @staticmethod
    def of(trees: Sequence[Tree], num_filler: int) -> "PackDocuments":
        """The documents of all trees, one tree after the other, and then filler documents."""
        counts = [len(tree.branches) for tree in trees]
        starts = np.cumsum([0, *counts])
        parents, forks = np.full(starts[-1] + num_filler, -1), np.zeros(starts[-1] + num_filler, dtype=np.int64)
        for tree, first, stop in zip(trees, starts, starts[1:]):
            of_tree = tree.branches.parents
            parents[first:stop], forks[first:stop] = np.where(of_tree < 0, -1, of_tree + first), tree.branches.forks
        return PackDocuments(
            branches=Branches.of(parents, forks),
            firsts=np.concatenate([np.repeat(starts[:-1], counts), np.arange(starts[-1], len(parents))]),
            texts=np.concatenate([tree.ends + [first, 0] for tree, first in zip(trees, starts)]),
        )


def token_weight(num_supervised: int, reduction: str) -> np.float32:
    """The weight of each supervised token of a sample with `num_supervised` such tokens; reduction: `loss.reduction`.

    num_supervised 4 -> "token" 1, "sample" 1/4, "sqrt" 1/2
    """
    exponent = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}[reduction]
    return np.float32(max(num_supervised, 1) ** exponent)
