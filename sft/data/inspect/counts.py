"""Counts rows, tokens and lengths of data files; rows that are cut, windowed, dropped or skipped; and rows that fit.

Decides the buckets of the histogram, the definition of a quantile, and the values of seq_length that are compared.  A
length is that of a whole row, counted once for any number of windows.  `cache/row_report.py` counts losses.
Does not read tokens (`findings.py`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sft.data.cache.corpus import Corpus, file_names
from sft.data.cache.omissions import FileOmission, add_up
from sft.parallel.alignment import aligned

# Fields of a row report that are added up under their own names.
_ADDED = (
    *("rows", "samples", "tokens_repeated", "rows_cut", "rows_windowed", "samples_windowed", "tokens_cut"),
    *("supervised_cut", "rows_dropped", "tokens_dropped", "supervised_dropped", "rows_skipped", "chats"),
)


class DataSet(NamedTuple):
    """Files that are prepared together."""

    part: str  # train, or the name of a held-out set
    paths: list[Path]
    sources: list[str] | None  # of each file; None where data.train names none, and for held-out files
    corpus: Corpus
    rows: list[np.ndarray]  # LINE [rows] of each file: one for each row but the skipped, with its whole length


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Rows of at_least <= length < below, and the tokens in them."""

    at_least: int
    below: int
    rows: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rows that fit into one seq_length without being cut, as numbers and as shares of all rows."""

    seq_length: int
    is_recipe: bool
    rows: int
    tokens: int
    supervised: int
    rows_share: float
    tokens_share: float
    supervised_share: float


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The rows of one data file, or of several.

    samples, tokens, supervised          what training sees; tokens_repeated of them are windows' context, seen before
    full_tokens, p50, p90, p99, longest  of whole rows, but the skipped
    rows_cut ... supervised_dropped      what data.over_long does; tokens are cut of windowed rows too
    rows_skipped, reasons                what data.on_bad_row does, and why, most frequent first
    """

    name: str  # of a file; `all` for several
    path: str | None  # null for several
    part: str  # train, or the name of a held-out set
    source: str | None  # null where data.train names none, and for all training files
    rows: int  # also those that were skipped
    samples: int
    tokens: int
    tokens_repeated: int
    supervised: int
    supervised_share: float
    full_tokens: int
    p50: int
    p90: int
    p99: int
    longest: int
    rows_cut: int
    rows_windowed: int
    samples_windowed: int
    tokens_cut: int
    supervised_cut: int
    rows_dropped: int
    tokens_dropped: int
    supervised_dropped: int
    rows_skipped: int
    reasons: tuple[tuple[str, int], ...]
    histogram: tuple[Bucket, ...]
    chats: int  # rows that are chats
    omitted: tuple[FileOmission, ...]  # what the chat template leaves out of them; of several files without rows


def of_files(data: DataSet) -> list[Counts]:
    """Each file, in order."""
    sources: Sequence[str | None] = data.sources or [None] * len(data.paths)
    return [
        counts_of(data, [i], name=name, path=str(data.paths[i]), source=sources[i])
        for i, name in enumerate(file_names(data.paths))
    ]


def of_sources(data: DataSet) -> list[Counts]:
    """Each named source, in order, with all of its files."""
    sources = data.sources or []
    return [
        counts_of(data, [i for i, source in enumerate(sources) if source == name], source=name)
        for name in dict.fromkeys(sources)
    ]


def counts_of(
    data: DataSet, chosen: Sequence[int], *, name: str = "all", path: str | None = None, source: str | None = None
) -> Counts:
    """The files of these numbers together."""
    reports = [data.corpus.row_reports[data.paths[i]] for i in chosen]
    full = np.concatenate([data.rows[i]["full_tokens"] for i in chosen])
    p50, p90, p99 = quantiles(full)
    tokens = sum(report.tokens_kept for report in reports)
    supervised = sum(report.supervised_kept for report in reports)
    omitted = [omission for report in reports for omission in report.omitted]
    reasons: Counter[str] = Counter()
    for report in reports:
        reasons.update(dict(report.reasons))
    return Counts(
        name=name,
        path=path,
        part=data.part,
        source=source,
        tokens=tokens,
        supervised=supervised,
        supervised_share=supervised / max(1, tokens),
        full_tokens=int(full.sum()),
        p50=p50,
        p90=p90,
        p99=p99,
        longest=int(full.max()),
        reasons=tuple(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        histogram=histogram(full),
        omitted=reports[0].omitted if len(reports) == 1 else add_up(omitted, rows_listed=0),
        **{field: sum(getattr(report, field) for report in reports) for field in _ADDED},
    )


def quantiles(lengths: np.ndarray) -> tuple[int, int, int]:
    """p50, p90, p99: each the smallest length that so large a share of the rows does not exceed.

    1 2 3 4 5 6 7 8 9 10 -> 5, 9, 10
    """
    middle, high, highest = np.quantile(lengths, [0.5, 0.9, 0.99], method="inverted_cdf")
    return int(middle), int(high), int(highest)


def histogram(lengths: np.ndarray) -> tuple[Bucket, ...]:
    """Powers of two from the shortest row's to the longest's, empty ones between them included.

    5 6 17 -> 4 to 8: 2 rows of 11 tokens, 8 to 16: none, 16 to 32: 1 of 17
    """
    powers = np.frexp(lengths)[1] - 1  # floor of log2, exact for every length below 2 ** 53
    return tuple(
        Bucket(
            at_least=1 << power,
            below=2 << power,
            rows=int(np.count_nonzero(powers == power)),
            tokens=int(lengths[powers == power].sum()),
        )
        for power in range(int(powers.min()), int(powers.max()) + 1)
    )


def retention(rows: np.ndarray, *, doc_multiple: int, seq_length: int) -> tuple[Retention, ...]:
    """The share of `rows`, LINE [n], that fits whole: at the recipe's seq_length, powers of two and half-way between.

    lengths 30 40 90, each padded to a multiple of 32 -> 32 64 96
    seq_length 32: 1 of 3 rows, 30 of 160 tokens; 48: the same; 64: 2 rows, 70 tokens; 96: all
    """
    lengths, supervised = rows["full_tokens"], rows["full_supervised"]
    padded = aligned(lengths, doc_multiple)
    points = []
    for size in sorted({*_candidates(int(padded.min()), int(padded.max())), seq_length}):
        fits = padded <= size
        tokens, labels = int(lengths[fits].sum()), int(supervised[fits].sum())
        points.append(
            Retention(
                seq_length=size,
                is_recipe=size == seq_length,
                rows=int(fits.sum()),
                tokens=tokens,
                supervised=labels,
                rows_share=float(fits.mean()),
                tokens_share=tokens / int(lengths.sum()),
                supervised_share=labels / max(1, int(supervised.sum())),
            )
        )
    return tuple(points)


def _candidates(shortest: int, longest: int) -> list[int]:
    """From the first that holds the shortest to the first that holds the longest.  30, 90 -> 32 48 64 96"""
    sizes = sorted(size for power in range(1, longest.bit_length() + 1) for size in (1 << power, 3 << (power - 1)))
    first, last = np.searchsorted(sizes, [shortest, longest])
    return sizes[first : last + 1]
