"""Defines the record of what far context gives: the loss of the same tokens in whole documents and in their ends.

`data/long/context.py` decides which tokens are scored.  The gain of a group of documents is the difference of the mean
losses; its interval is that of a ratio of two sums over independent documents (the delta method).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

from sft.metrics.paired import CONFIDENCE

FORMAT = "sft context 1"
_NORMAL = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, kw_only=True)
class DocumentScore:
    """The losses of one document.

    source   name of the held-out set; with several files in a set, "set/file"
    row      name of the document's row, for messages
    length   tokens of the document
    tokens   scored tokens
    whole    sum of their -log p after the whole document before them, in nats
    nearest  the same after the last quarter of the document only
    """

    source: str
    row: str
    length: int
    tokens: int
    whole: float
    nearest: float


class Gain(NamedTuple):
    """The mean losses of some documents in nats per token, and the half width of the interval of their difference.

    margin: None for a single document
    """

    documents: int
    tokens: int
    whole: float
    nearest: float
    margin: float | None

    @property
    def gain(self) -> float:
        """The decrease of the loss of the last 1/8 of a document because of its first 3/4."""
        return self.nearest - self.whole


def gain_of(documents: Sequence[DocumentScore]) -> Gain:
    """The gain of far context over these documents, at least one."""
    count, tokens = len(documents), sum(d.tokens for d in documents)
    whole, nearest = (sum(getattr(d, name) for d in documents) / tokens for name in ("whole", "nearest"))
    gain = nearest - whole
    squares = sum((d.nearest - d.whole - gain * d.tokens) ** 2 for d in documents)
    margin = _NORMAL * math.sqrt(squares * count / (count - 1)) / tokens if count > 1 else None
    return Gain(count, tokens, whole, nearest, margin)


def longest_of(length: int) -> int:
    """The largest length of the documents with which one of this length is shown: the next power of 2."""
    return 1 << (length - 1).bit_length()


def to_json(documents: Sequence[DocumentScore]) -> dict[str, Any]:
    return {"format": FORMAT, "documents": [asdict(document) for document in documents]}


def table(documents: Sequence[DocumentScore]) -> list[str]:
    """Lines of a table: a row for each source and power of 2 of the length, and one for all lengths of a source."""
    head = ["source", "length", "documents", "tokens", "whole", "last quarter", "gain"]
    rows = [head, *_rows(_by_source(documents))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width) for i, (text, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ] + [
        f"whole, last quarter: perplexity of the last eighth of documents.  gain: difference in nats per token, with "
        f"its {CONFIDENCE:.0%} interval over documents; above 0, the first 3/4 help."
    ]


def _by_source(documents: Sequence[DocumentScore]) -> Mapping[str, list[DocumentScore]]:
    groups: dict[str, list[DocumentScore]] = {}
    for document in documents:
        groups.setdefault(document.source, []).append(document)
    return groups


def _rows(groups: Mapping[str, list[DocumentScore]]) -> Iterator[list[str]]:
    for source, documents in groups.items():
        lengths = sorted({longest_of(document.length) for document in documents})
        for length in lengths:
            chosen = [document for document in documents if longest_of(document.length) == length]
            yield _row(source, f"to {length:,}", gain_of(chosen))
        if len(lengths) > 1:
            yield _row(source, "all", gain_of(documents))


def _row(source: str, length: str, gain: Gain) -> list[str]:
    margin = "" if gain.margin is None else f" +- {gain.margin:.4f}"
    perplexities = [f"{math.exp(min(loss, 700.0)):.3f}" for loss in (gain.whole, gain.nearest)]
    return [source, length, f"{gain.documents:,}", f"{gain.tokens:,}", *perplexities, f"{gain.gain:+.4f}{margin}"]
