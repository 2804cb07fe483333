"""Counts the rows and tokens of data files by length, and the rows that fit uncut into different seq_lengths.

Decides the buckets of the histogram, the definition of a quantile, and the values of seq_length that are compared.
Every length is the length of an uncut row, whatever samples are made of the row.  `cache/row_report.py` counts cut,
windowed, dropped and skipped rows for each file; this module adds these counts up.  `findings.py` reads tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sft.data.cache.corpus import Corpus, file_names
from sft.data.cache.omissions import FileOmission, add_up
from sft.data.cache.unused_keys import KeyCounter
from sft.data.read.rows import DataFile
from sft.data.work import Work
from sft.parallel.alignment import aligned

# Fields of a row report that `counts_of` adds up.
_ADDED = (
    *("rows", "samples", "tokens_repeated", "rows_cut", "rows_windowed", "samples_windowed", "tokens_cut"),
    *("supervised_cut", "rows_dropped", "tokens_dropped", "supervised_dropped", "rows_skipped", "chats"),
    *("rows_unwanted", "rows_packed", "documents", "rows_padded", "tokens_padding"),
    *("documents_unsupervised", "tokens_unsupervised", "trees", "texts", "tokens_rendered", "tokens_of_trees"),
    "supervised_repeated",
)


class DataSet(NamedTuple):
    """The training files, or the files of one held-out set, with their corpus."""

    part: str  # train, or the name of a held-out set
    paths: list[DataFile]
    sources: list[str] | None  # source of each file; None for held-out files, and if data.train names no sources
    corpus: Corpus
    rows: list[np.ndarray]  # for each file, LINE [rows]: one line of the store per row (`survey.whole_rows`)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The number of rows with at_least <= length < below, and the sum of their tokens."""

    at_least: int
    below: int
    rows: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The rows that fit uncut into one seq_length: their number, their tokens and their supervised labels.

    is_recipe  whether this is the recipe's seq_length
    x_share    x divided by its value for all rows
    """

    seq_length: int
    is_recipe: bool
    rows: int
    tokens: int
    supervised: int
    rows_share: float
    tokens_share: float
    supervised_share: float


@dataclass(frozen=True, kw_only=True)
class FileCounts:
    """Counts of the rows of one data file, or of several.

    samples, tokens, supervised          samples made of the rows, their tokens, and their supervised labels
    supervised_share                     share of the tokens that are supervised, however many texts of a tree do it
    tokens_repeated                      tokens that an earlier window of the same row also contains; part of `tokens`
    full_tokens, p50, p90, p99, longest  sum and quantiles of the lengths that rows have before they are cut or dropped
    rows_cut ... supervised_dropped      what data.over_long changed; tokens_cut includes tokens that no window contains
    rows_skipped, reasons                rows that data.on_bad_row = skip left out; (reason, number of rows), the most
                                         frequent reason first
    rows_packed, documents               packed rows of token ids, and the documents into which they were cut

    Lengths, rows_cut, rows_windowed and rows_dropped count each document as a row.
    """

    name: str  # name of the file; `all` for several files
    path: str | None  # null for several files
    part: str  # train, or the name of a held-out set
    source: str | None  # null if data.train names no sources, and for the sum of all training files
    rows: int  # including skipped rows
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
    omitted: tuple[FileOmission, ...]  # texts that the chat template leaves out; several files: without row numbers
    rows_unwanted: int  # rows that are dropped by their label
    rows_packed: int
    documents: int  # number of documents of all packed rows
    documents_unsupervised: int  # documents of packed rows that are dropped: they have no supervised token
    tokens_unsupervised: int  # tokens of these documents
    rows_padded: int  # rows of tokens of which padding was dropped
    tokens_padding: int  # tokens of this padding; counted nowhere else
    trees: int  # samples with several texts (data.turns = each)
    texts: int  # texts of these samples
    tokens_rendered: int  # tokens of these texts, as separate samples
    tokens_of_trees: int  # stored tokens of these samples
    supervised_repeated: int  # labels beyond the first of a token; included in `supervised`
    unused: tuple[tuple[str, int], ...]  # (key that nothing reads, number of rows with it), the most frequent first
    unused_others: int  # sum of the numbers of rows of all further keys
    spelled: tuple[tuple[str, int], ...]  # (control token that stayed text, with its role; number of such rows)
    work: Work | None  # of tokenising the files in this call; null: all were in the cache


def of_files(data: DataSet) -> list[FileCounts]:
    """The counts of each file, in order."""
    sources: Sequence[str | None] = data.sources or [None] * len(data.paths)
    return [
        counts_of(data, [i], name=name, path=str(data.paths[i]), source=sources[i])
        for i, name in enumerate(file_names(data.paths))
    ]


def of_sources(data: DataSet) -> list[FileCounts]:
    """The counts of each named source, over all files of the source, in order."""
    sources = data.sources or []
    return [
        counts_of(data, [i for i, source in enumerate(sources) if source == name], source=name)
        for name in dict.fromkeys(sources)
    ]


def counts_of(
    data: DataSet, chosen: Sequence[int], *, name: str = "all", path: str | None = None, source: str | None = None
) -> FileCounts:
    """The counts of the files data.paths[i] for all i in `chosen`, added up."""
    reports = [data.corpus.row_reports[data.paths[i]] for i in chosen]
    full = np.concatenate([data.rows[i]["full_tokens"] for i in chosen])
    p50, p90, p99 = quantiles(full)
    tokens = sum(report.tokens_kept for report in reports)
    supervised = sum(report.supervised_kept for report in reports)
    supervised_tokens = sum(report.supervised_tokens for report in reports)
    omitted = [omission for report in reports for omission in report.omitted]
    reasons: Counter[str] = Counter()
    unused = KeyCounter()
    spelled: Counter[str] = Counter()
    for report in reports:
        reasons.update(dict(report.reasons))
        unused.add(report.unused)
        spelled.update(dict(report.spelled))
    return FileCounts(
        name=name,
        path=path,
        part=data.part,
        source=source,
        tokens=tokens,
        supervised=supervised,
        supervised_share=supervised_tokens / max(1, tokens),
        full_tokens=int(full.sum()),
        p50=p50,
        p90=p90,
        p99=p99,
        longest=int(full.max()),
        reasons=tuple(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        histogram=histogram(full),
        omitted=reports[0].omitted if len(reports) == 1 else add_up(omitted, rows_listed=0),
        unused=unused.listed,
        spelled=tuple(sorted(spelled.items(), key=lambda item: (-item[1], item[0]))),
        work=_sum([data.corpus.work.get(data.paths[i]) for i in chosen]),
        unused_others=unused.others + sum(report.unused_others for report in reports),
        **{field: sum(getattr(report, field) for report in reports) for field in _ADDED},
    )


def _sum(works: Sequence[Work | None]) -> Work | None:
    known = [work for work in works if work is not None]
    return sum(known, Work()) if known else None


def quantiles(lengths: np.ndarray) -> tuple[int, int, int]:
    """p50, p90, p99: the smallest length that 50%, 90%, 99% of the rows do not exceed.

    1 2 3 4 5 6 7 8 9 10 -> 5, 9, 10
    """
    middle, high, highest = np.quantile(lengths, [0.5, 0.9, 0.99], method="inverted_cdf")
    return int(middle), int(high), int(highest)


def histogram(lengths: np.ndarray) -> tuple[Bucket, ...]:
    """The number and tokens of rows by length, in buckets between powers of two.

    The first bucket holds the shortest row, the last the longest; buckets between them may be empty.

    lengths 5 6 17 -> 4 to 8: 2 rows, 11 tokens; 8 to 16: 0 rows; 16 to 32: 1 row, 17 tokens
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
    """Counts the rows of `rows`, LINE [n], that fit uncut into each of several sizes, in rising order of sizes.

    The sizes are the recipe's seq_length, powers of two, and the values half-way between powers of two.

    lengths 30 40 90, doc_multiple 32: padded lengths 32 64 96
    -> sizes 32 and 48 hold 1 of 3 rows and 30 of 160 tokens; 64 holds 2 rows and 70 tokens; 96 holds all rows
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
    """Powers of two and the values half-way between them, from the smallest size that holds the shortest row to the
    smallest size that holds the longest row.

    shortest 30, longest 90 -> [32, 48, 64, 96]
    """
    sizes = sorted(size for power in range(1, longest.bit_length() + 1) for size in (1 << power, 3 << (power - 1)))
    first, last = np.searchsorted(sizes, [shortest, longest])
    return sizes[first : last + 1]
