"""Splits a tree that is too large for a pack into samples, each with the tree of some of its texts.

Decides which texts share a sample: consecutive texts, as many as fit.  A tree fits if its documents, each padded to a
multiple of data.doc_multiple, have at most data.seq_length tokens.  Each sample contains its texts from their first
token on, so samples repeat beginnings, and no token is lost.  data.over_long decides what happens to a text that does
not fit by itself, as for a chat (`truncation.py`).  A label that an earlier sample of the row has is
marked, so that loss.shared = once counts it once.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sft.batch import Tree
from sft.config import DataConfig
from sft.data.cache.truncation import excerpts
from sft.data.chat.tree import Grown, TreeText, grow, spans_of, text_positions, texts_of
from sft.parallel.alignment import aligned
from sft.parallel.branches import Branches


class TreePart(NamedTuple):
    """A sample made of a tree.

    tree       None: the sample is one text, and no earlier sample of the tree has one of its labels
    positions  int64 [m]: indices of the sample's tokens in the whole tree
    labels     number of supervised labels; a token counts for each text that supervises it
    """

    tokens: np.ndarray
    weights: np.ndarray
    tree: Tree | None
    positions: np.ndarray
    labels: int


def num_labels_of(tree: Tree) -> int:
    """The number of supervised labels of all texts."""
    return int((tree.spans[:, 2] - tree.spans[:, 1]).sum())


def fits(tree: Tree, data: DataConfig) -> bool:
    """Whether the padded documents of a tree fit into a pack."""
    return int(aligned(np.diff(tree.starts), data.doc_multiple).sum()) <= data.seq_length


def split_tree(whole: Grown, data: DataConfig) -> Iterator[TreePart]:
    """Yields the samples of a tree.  Raises DataError if a text is too long and data.over_long = error."""
    if fits(whole.tree, data):
        yield TreePart(*whole, np.arange(len(whole.tokens)), num_labels_of(whole.tree))
        return
    is_supervised = np.zeros(len(whole.tokens), dtype=bool)  # by an earlier sample
    for part in _parts(whole, data):
        tree = _of_one_text(part) if part.tree is None else part.tree
        yield part._replace(tree=_marked(tree, is_supervised[part.positions]) or part.tree)
        for start, stop in tree.spans[:, 1:].tolist():
            is_supervised[part.positions[start:stop]] = True


def _parts(whole: Grown, data: DataConfig) -> Iterator[TreePart]:
    texts, positions = texts_of(whole), [text_positions(whole.tree, number) for number in range(len(whole.tree.ends))]
    longest = max(range(len(texts)), key=lambda number: len(texts[number].tokens))
    if data.over_long == "error" and _is_long(texts[longest], data):
        yield from _of_long_text(texts[longest], positions[longest], data)  # the error names a length that fits all
    short = [number for number, text in enumerate(texts) if not _is_long(text, data)]
    while short:
        count = _most_that_fit([texts[number] for number in short], data)
        yield _of_group(texts, positions, short[:count])
        short = short[count:]
    for number, text in enumerate(texts):
        if _is_long(text, data):
            yield from _of_long_text(text, positions[number], data)


def _most_that_fit(texts: list[TreeText], data: DataConfig) -> int:
    """The largest n for which the tree of the first n texts fits.  Each text fits by itself.  Makes about 2 log2(n)
    trees."""

    def fit(count: int) -> bool:
        return fits(grow(texts[:count]).tree, data)

    most = 1
    while most < len(texts) and fit(min(2 * most, len(texts))):
        most = min(2 * most, len(texts))
    too_many = min(2 * most, len(texts) + 1)
    while too_many - most > 1:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if fit(middle) else (most, middle)
    return most


def _is_long(text: TreeText, data: DataConfig) -> bool:
    return aligned(len(text.tokens), data.doc_multiple) > data.seq_length


def _of_group(texts: list[TreeText], positions: list[np.ndarray], group: list[int]) -> TreePart:
    if len(group) == 1:
        tokens, weights = texts[group[0]]
        return TreePart(tokens, weights, None, positions[group[0]], _num_labels(weights))
    grown = grow([texts[number] for number in group])
    held = np.empty(len(grown.tokens), dtype=np.int64)
    for text, number in enumerate(group):
        held[text_positions(grown.tree, text)] = positions[number]
    return TreePart(*grown, held, num_labels_of(grown.tree))


def _of_long_text(text: TreeText, positions: np.ndarray, data: DataConfig) -> Iterator[TreePart]:
    made = excerpts(text.weights, seq_length=data.seq_length, doc_multiple=data.doc_multiple, over_long=data.over_long)
    for chosen, weights in made:
        yield TreePart(text.tokens[chosen], weights, None, positions[chosen], _num_labels(weights))


def _of_one_text(part: TreePart) -> Tree:
    """The tree of a sample that is one text."""
    count = len(part.tokens)
    weights = np.where(np.arange(count) > 0, part.weights, np.float32(0))  # no token predicts the first one
    bounds, of_spans = spans_of(0, weights, np.arange(count))
    return Tree(np.array([0, count]), Branches.of([-1], [0]), np.array([[0, count]]), bounds, of_spans)


def _marked(tree: Tree, before: np.ndarray) -> Tree | None:
    """The tree with marks at labels that an earlier sample has; None: it has none of them.

    before: bool [tokens].  A span is cut where marks begin or end
    """
    bounds: list[tuple[int, int, int]] = []
    weights: list[float] = []
    for (text, start, stop), weight in zip(tree.spans.tolist(), tree.span_weights.tolist(), strict=True):
        edges = [start, *(np.flatnonzero(np.diff(before[start:stop])) + start + 1).tolist(), stop]
        bounds += [(text, first, last) for first, last in pairwise(edges)]
        weights += [weight] * (len(edges) - 1)
    spans = np.array(bounds, dtype=np.int64).reshape(-1, 3)
    repeated = before[spans[:, 1]]
    if not repeated.any():
        return None
    return replace(tree, spans=spans, span_weights=np.array(weights, dtype=np.float32), repeated=repeated)


def _num_labels(weights: np.ndarray) -> int:
    return int(np.count_nonzero(weights[1:] > 0))
