"""Trees for tests: a sample with branches, and the same texts as separate samples."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sft.batch import Sample, Tree
from sft.parallel.branches import Branches


def tree_and_texts(
    lengths: Sequence[int],
    parents: Sequence[int],
    forks: Sequence[int],
    ends: Sequence[tuple[int, int]],
    supervised: Sequence[tuple[int, int]],
    *,
    seed: int,
    vocab: int,
    sample_id: int = 0,
) -> tuple[Sample, list[Sample]]:
    """A sample of random tokens with a tree, and its texts as samples of their own.

    lengths     of the documents; parents and forks are those of `Branches`
    ends        for each text its last document and the number of its tokens in it
    supervised  for each text the first and the last supervised position, exclusive
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, size=sum(lengths), dtype=np.int32)
    starts = np.cumsum([0, *lengths])
    branches = Branches.of(parents, forks)
    spans, texts, weights = [], [], np.zeros(len(tokens), dtype=np.float32)
    for number, ((document, count), (first, stop)) in enumerate(zip(ends, supervised, strict=True)):
        pieces = [(piece.document, piece.length) for piece in branches.path(document)]
        stored = np.concatenate([starts[owner] + np.arange(length) for owner, length in [*pieces, (document, count)]])
        chosen = stored[first:stop]
        edges = [0, *np.flatnonzero(np.diff(chosen) != 1) + 1, len(chosen)]
        spans += [(number, chosen[a], chosen[b - 1] + 1) for a, b in pairwise(edges)]
        weights[chosen] += 1
        mask = np.isin(np.arange(len(stored)), np.arange(first, stop)).astype(np.float32)
        texts.append(Sample(sample_id=sample_id, tokens=tokens[stored], weights=mask))
    tree = Tree(starts, branches, np.array(ends), np.array(spans), np.ones(len(spans), dtype=np.float32))
    return Sample(sample_id=sample_id, tokens=tokens, weights=weights, tree=tree), texts


def nested(seed: int, vocab: int) -> tuple[Sample, list[Sample]]:
    """A trunk with three branches, two of them at one fork, a branch of a branch, and a text that ends in the trunk.

    Two texts supervise the same tokens of the trunk, and two texts the same tokens of a branch.
    """
    return tree_and_texts(
        lengths=[90, 20, 33, 7, 41],
        parents=[-1, 0, 0, 2, 0],
        forks=[0, 30, 30, 9, 71],
        ends=[(1, 20), (2, 33), (3, 7), (0, 90), (0, 40), (4, 41)],
        supervised=[(30, 50), (31, 63), (35, 46), (60, 90), (35, 40), (65, 100)],
        seed=seed,
        vocab=vocab,
    )
