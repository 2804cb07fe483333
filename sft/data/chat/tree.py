"""Makes a tree of texts, which stores tokens with which several texts begin once, and finds the tokens of a text in it.

Decides the order of the documents.  Texts share the tokens of their longest common beginnings.  Where texts first
differ, the longest text stays in its document, and each other continuation is a branch (`sft/parallel/branches.py`).
Equal tokens after a difference are stored once per text, because the tokens before them differ.

    texts a b c d e,  a b x,  a b c y      ->      documents a b c d e,  x after a b,  y after a b c

Works on tokens only.  `encode_chat.py` renders chats, and `cache/tree_samples.py` splits trees that are too large.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sft.batch import Tree
from sft.parallel.branches import Branches


class TreeText(NamedTuple):
    """The tokens of a text, int32 [n], and their weights in the loss, float32 [n]."""

    tokens: np.ndarray
    weights: np.ndarray


class Grown(NamedTuple):
    """The tokens of a tree, int32 [n], their weights, float32 [n], and the tree.

    weights: the weight of each token in the first text that supervises it; 0 if no text does
    """

    tokens: np.ndarray
    weights: np.ndarray
    tree: Tree


@dataclass
class _Document:
    """A document of a tree that is not yet complete.

    fork    number of tokens of the parent that come before the document
    first   number of the first text that contains the document
    number  index of the document in the finished tree
    """

    tokens: np.ndarray
    fork: int
    first: int
    branches: "list[_Document]" = field(default_factory=list)
    number: int = -1


def grow(texts: Sequence[TreeText]) -> Grown:
    """The tree of some texts.  The branches of a document come after it, in the order of their forks; branches with the
    same fork are in the order of their first texts."""
    above = _Document(np.empty(0, dtype=np.int32), 0, -1)  # the parent of all documents without a parent
    ends: dict[int, tuple[_Document, int]] = {}
    longest_first = sorted(range(len(texts)), key=lambda number: -len(texts[number].tokens))
    for number in longest_first:  # so the longest text stays in its document where texts differ
        ends[number] = _insert(texts[number].tokens, number, above)
    documents: list[_Document] = []
    parents: list[int] = []
    waiting = [(document, -1) for document in _in_order(above)]
    while waiting:
        document, parent = waiting.pop()
        document.number = len(documents)
        documents.append(document)
        parents.append(parent)
        waiting += [(branch, document.number) for branch in _in_order(document)]
    text_ends = np.array([(ends[i][0].number, ends[i][1]) for i in range(len(texts))], dtype=np.int64)
    starts = np.cumsum([0, *(len(document.tokens) for document in documents)])
    branches = Branches.of(parents, [document.fork for document in documents])
    bare = Tree(starts, branches, text_ends, np.empty((0, 3), np.int64), np.empty(0, np.float32))
    spans = [spans_of(number, text.weights, text_positions(bare, number)) for number, text in enumerate(texts)]
    weights = np.zeros(int(starts[-1]), dtype=np.float32)
    of_spans = np.concatenate([weight for _, weight in spans])
    bounds = np.concatenate([bound for bound, _ in spans])
    for (_, start, stop), weight in zip(bounds.tolist(), of_spans, strict=True):
        weights[start:stop] = np.where(weights[start:stop] > 0, weights[start:stop], weight)
    tokens = np.concatenate([document.tokens for document in documents]).astype(np.int32)
    return Grown(tokens, weights, Tree(starts, branches, text_ends, bounds, of_spans))


def text_positions(tree: Tree, text: int) -> np.ndarray:
    """int64 [n]: for each token of a text, its index in the tokens of the sample."""
    document, count = tree.ends[text].tolist()
    pieces = [(piece.document, piece.length) for piece in tree.branches.path(document)] + [(document, count)]
    return np.concatenate([np.arange(length) + tree.starts[number] for number, length in pieces])


def texts_of(grown: Grown) -> list[TreeText]:
    """The texts of a tree, in their order, with the weights that each gives."""
    tree, texts = grown.tree, []
    for number in range(len(tree.ends)):
        weights = np.zeros(len(grown.tokens), dtype=np.float32)
        chosen = tree.spans[:, 0] == number
        for (_, start, stop), weight in zip(tree.spans[chosen].tolist(), tree.span_weights[chosen], strict=True):
            weights[start:stop] = weight
        of_text = text_positions(tree, number)
        texts.append(TreeText(grown.tokens[of_text], weights[of_text]))
    return texts


def _insert(tokens: np.ndarray, number: int, above: _Document) -> tuple[_Document, int]:
    """Adds a text below `above`.  No text that was added before is shorter.

    Returns the document in which the text ends, and the number of this document's tokens that belong to the text.
    """
    document, shared = above, 0
    while True:
        tokens = tokens[shared:]
        if not len(tokens):
            return document, shared
        same = (b for b in document.branches if b.fork == shared and b.tokens[0] == tokens[0])
        branch = next(same, None)
        if branch is None:
            branch = _Document(tokens, shared, number)
            document.branches.append(branch)
            return branch, len(tokens)
        branch.first = min(branch.first, number)
        document, shared = branch, _num_shared(branch.tokens, tokens)


def _num_shared(left: np.ndarray, right: np.ndarray) -> int:
    """The length of the longest common beginning."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def _in_order(document: _Document) -> list[_Document]:
    """The branches of a document in reverse order, because `grow` takes them from the end of a list."""
    return sorted(document.branches, key=lambda branch: (branch.fork, branch.first), reverse=True)


def spans_of(number: int, weights: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The spans of a text's supervised tokens, int64 [spans, 3], and their weights, float32 [spans], as in `Tree`.

    positions: int64 [n], of the text's tokens in the sample
    """
    edges = np.flatnonzero((np.diff(weights) != 0) | (np.diff(positions) != 1)) + 1
    starts, stops = np.concatenate([[0], edges]), np.concatenate([edges, [len(weights)]])
    used = weights[starts] > 0
    starts, stops = starts[used], stops[used]
    bounds = np.stack([np.full(len(starts), number), positions[starts], positions[stops - 1] + 1], axis=1)
    return bounds.astype(np.int64), weights[starts].astype(np.float32)
