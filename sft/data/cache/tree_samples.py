"""Splits a tree that is too large for a pack into samples, each with the tree of some of its texts.

Decides which texts share a sample: consecutive texts, as many as fit.  A tree fits if its documents, each padded to a
multiple of data.doc_multiple, have at most data.seq_length tokens.  Each sample contains its texts from their first
token on, so samples repeat beginnings, and no token is lost.  data.over_long decides what happens to a text that does
not fit by itself, as for a chat (`truncation.py`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sft.batch import Tree
from sft.config import DataConfig
from sft.data.cache.truncation import excerpts
from sft.data.chat.tree import Grown, TreeText, grow, text_positions, texts_of
from sft.parallel.alignment import aligned


class TreePart(NamedTuple):
    """A sample made of a tree.

    tree       the tree of the sample's texts; None: the sample is one text
    positions  int64 [m], rising: indices, in the whole tree, of the tokens that the sample contains
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
    held = np.unique(np.concatenate([positions[number] for number in group]))
    if len(group) == 1:
        tokens, weights = texts[group[0]]
        return TreePart(tokens, weights, None, held, _num_labels(weights))
    grown = grow([texts[number] for number in group])
    return TreePart(*grown, held, num_labels_of(grown.tree))


def _of_long_text(text: TreeText, positions: np.ndarray, data: DataConfig) -> Iterator[TreePart]:
    made = excerpts(text.weights, seq_length=data.seq_length, doc_multiple=data.doc_multiple, over_long=data.over_long)
    for chosen, weights in made:
        yield TreePart(text.tokens[chosen], weights, None, positions[chosen], _num_labels(weights))


def _num_labels(weights: np.ndarray) -> int:
    return int(np.count_nonzero(weights[1:] > 0))
