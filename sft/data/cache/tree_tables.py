"""Converts trees of samples to four tables, and reads trees from these tables.

    trees      TREE [samples]        numbers of documents, texts and spans of each sample
    documents  DOCUMENT [documents]  the documents of all samples, in order
    texts      TEXT [texts]          the texts of all samples, in order
    spans      SPAN [spans]          the supervised spans of all texts, in order; `text` is ~number of the text if an
                                     earlier sample of the row supervises the span

A sample without a tree has one document, no text and no span.

Decides the form of a tree on disk; `sft/batch.py` describes the fields.  A store has these tables only if it was made
with data.turns = each.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sft.batch import Tree
from sft.parallel.branches import Branches

_INT = np.int64
TREE = np.dtype([("documents", _INT), ("texts", _INT), ("spans", _INT)])
DOCUMENT = np.dtype([("length", _INT), ("parent", _INT), ("fork", _INT), ("depth", _INT)])
TEXT = np.dtype([("document", _INT), ("tokens", _INT)])
SPAN = np.dtype([("text", _INT), ("start", _INT), ("stop", _INT), ("weight", np.float32)])


class TreeTables(NamedTuple):
    """The trees of consecutive samples."""

    trees: np.ndarray
    documents: np.ndarray
    texts: np.ndarray
    spans: np.ndarray


DTYPES = TREE, DOCUMENT, TEXT, SPAN


class TreeCounts(NamedTuple):
    """Numbers of the samples that are trees, of their texts, of the tokens of all texts, and of their stored tokens.

    repeated  number of labels beyond the first of each token: further texts of the row supervise the same token
    """

    trees: int = 0
    texts: int = 0
    rendered: int = 0
    stored: int = 0
    repeated: int = 0


def to_tables(trees: Sequence[Tree | None], lengths: Sequence[int]) -> TreeTables:
    """The tables of some samples.  trees: the tree of each sample, or None; lengths: the number of tokens of each"""
    counts: list[tuple[int, ...]] = []
    documents: list[tuple[int, ...]] = []
    texts: list[tuple[int, ...]] = []
    spans: list[tuple[float, ...]] = []
    for tree, length in zip(trees, lengths, strict=True):
        if tree is None:
            counts.append((1, 0, 0))
            documents.append((length, -1, 0, 0))
            continue
        counts.append((len(tree.branches), len(tree.ends), len(tree.spans)))
        branches = tree.branches
        documents += zip(np.diff(tree.starts).tolist(), branches.parents, branches.forks, branches.depths, strict=True)
        texts += map(tuple, tree.ends.tolist())
        of_texts = tree.spans.copy()
        if tree.repeated is not None:
            of_texts[tree.repeated, 0] = ~of_texts[tree.repeated, 0]
        spans += [(*span, weight) for span, weight in zip(of_texts.tolist(), tree.span_weights, strict=True)]
    rows = counts, documents, texts, spans
    return TreeTables(*(np.array(table, dtype=dtype) for table, dtype in zip(rows, DTYPES, strict=True)))


class Trees:
    """Reads the trees of a store."""

    def __init__(self, tables: TreeTables) -> None:
        self.tables = tables

    def tree(self, index: int) -> Tree | None:
        """The tree of a sample of the store; None: the sample is one text."""
        bounds = [(int(starts[index]), int(starts[index + 1])) for starts in self._starts]
        (first, stop), (first_text, stop_text), (first_span, stop_span) = bounds
        if first_text == stop_text:
            return None
        documents = self.tables.documents[first:stop]
        texts, spans = self.tables.texts[first_text:stop_text], self.tables.spans[first_span:stop_span]
        repeated = spans["text"] < 0
        return Tree(
            starts=np.cumsum([0, *documents["length"]]),
            branches=Branches.of(documents["parent"], documents["fork"]),
            ends=np.stack([texts["document"], texts["tokens"]], axis=1),
            spans=np.stack([np.where(repeated, ~spans["text"], spans["text"]), spans["start"], spans["stop"]], axis=1),
            span_weights=np.ascontiguousarray(spans["weight"]),
            repeated=repeated,
        )

    def counts(self) -> TreeCounts:
        """The counts of the samples that are trees."""
        has_tree = self.tables.trees["texts"] > 0
        firsts, _, _ = self._starts
        of_text = np.repeat(firsts[:-1], self.tables.trees["texts"]) + self.tables.texts["document"]
        rendered = self.tables.documents["depth"][of_text] + self.tables.texts["tokens"]
        lengths = self.tables.documents["length"][np.repeat(has_tree, self.tables.trees["documents"])]
        repeated = int(self.repeated.sum())
        return TreeCounts(int(has_tree.sum()), len(of_text), int(rendered.sum()), int(lengths.sum()), repeated)

    @cached_property
    def repeated(self) -> np.ndarray:
        """int64 [samples]: number of labels beyond the first of each token, which count only with loss.shared = each.

        Spans 2 to 6 and 4 to 9 of two texts -> 2;  if an earlier sample supervises 4 to 9 -> 5
        """
        spans, num_samples = self.tables.spans, len(self.tables.trees)
        sample = np.repeat(np.arange(num_samples), self.tables.trees["spans"])
        lengths = spans["stop"] - spans["start"]
        is_first = spans["text"] >= 0
        sample, start, stop = sample[is_first], spans["start"][is_first], spans["stop"][is_first]
        shift = sample * (int(spans["stop"].max(initial=0)) + 1)  # spans of different samples do not overlap
        order = np.lexsort((start, sample))
        start, stop, sample = (start + shift)[order], (stop + shift)[order], sample[order]
        before = np.maximum.accumulate(np.concatenate([[0], stop]))[:-1]  # the end of all earlier spans
        once = np.bincount(sample, np.maximum(stop - np.maximum(start, before), 0), minlength=num_samples)
        labels = np.bincount(np.repeat(np.arange(num_samples), self.tables.trees["spans"]), lengths, num_samples)
        return (labels - once).astype(_INT)

    @cached_property
    def _starts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Three arrays int64 [samples + 1]: the index of the first document, text and span of each sample, then the
        number of all."""
        trees = self.tables.trees
        documents, texts, spans = (np.concatenate([[0], np.cumsum(trees[name])]) for name in TREE.names or ())
        return documents, texts, spans
