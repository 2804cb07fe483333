"""Data files as numbers: how many rows and tokens, how long, what is cut, windowed, dropped and skipped.

Decides that a survey goes on where the trainer stops because of lengths, and that a length is a whole row's, counted
once however many windows the row makes.  `cache/row_report.py` says what became of rows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np

from sft.config import DataConfig
from sft.console import Console
from sft.data.cache.corpus import Corpus, file_names
from sft.data.cache.omissions import FileOmission, sum_omissions
from sft.data.cache.prepare import prepare
from sft.data.cache.row_report import RowReport
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.inspect.lengths import Bucket, histogram, quantiles
from sft.errors import DataError

_NO_LIMIT = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The rows of one data file, or of several.

    name, path   of a file; `all` and null for several
    part         train, or the name of a held-out set
    source       to which source of data.train they belong; null where it names none, and for all training files
    rows         also those that were skipped
    samples, tokens, supervised          what training sees; tokens_repeated of them are windows' context, seen before
    full_tokens, p50, p90, p99, longest  of whole rows, but the skipped
    rows_cut ... supervised_dropped      what data.over_long does; tokens are cut of windowed rows too
    rows_skipped, reasons                what data.on_bad_row does, and why, most frequent first
    chats, omitted                       rows that are chats, and what the chat template leaves out of them, by role
                                         and kind; of several files without rows
    """

    name: str
    path: str | None
    part: str
    source: str | None
    rows: int
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
    chats: int
    omitted: tuple[FileOmission, ...]


def prepare_any(
    files: Sequence[str],
    data: DataConfig,
    tokenizer: ChatTokenizer,
    cache_dir: Path,
    console: Console,
    names: Sequence[str] | None = None,
) -> tuple[Corpus, str | None]:
    """The corpus that training would use; where it is refused for its lengths, the whole one and the refusal.  What a
    chat template leaves out is no reason not to look at the rest."""
    refused = None
    if data.on_omitted == "error":
        data = data.model_copy(update={"on_omitted": "report"})
        corpus, refused = prepare_any(files, data, tokenizer, cache_dir, console, names)
        try:
            corpus.check_omitted(data.model_copy(update={"on_omitted": "error"}), tokenizer)
        except DataError as error:
            refused = refused or str(error)
        return corpus, refused
    try:
        return prepare(files, data, tokenizer, cache_dir, console, names), None
    except DataError as error:
        # Some rows or all of them are too long, or a row is wrong: then this raises the same again.
        console.say("the data cannot be trained on as they are; once more, whatever the lengths")
        whole = data.model_copy(update={"seq_length": _NO_LIMIT, "over_long": "error"})
        return prepare(files, whole, tokenizer, cache_dir, console, names), str(error)


def of_files(corpus: Corpus, files: Sequence[str], part: str, sources: Sequence[str] | None = None) -> list[Counts]:
    """Each file of the corpus, in order; `sources` are those of each file."""
    paths = [Path(file) for file in files]
    return [
        _counts([corpus.row_reports[path]], [table], name=name, path=str(path), part=part, source=source)
        for path, name, table, source in zip(
            paths, file_names(paths), corpus.tables, sources or repeat(None, len(paths)), strict=True
        )
    ]


def of_sources(corpus: Corpus, files: Sequence[str], sources: Sequence[str]) -> list[Counts]:
    """Each named source of data.train, in order."""
    return [
        _sum(corpus, files, [i for i, source in enumerate(sources) if source == name], source=name)
        for name in dict.fromkeys(sources)
    ]


def of_all(corpus: Corpus, files: Sequence[str]) -> Counts:
    """All training files together."""
    return _sum(corpus, files, range(len(files)), source=None)


def whole_rows(table: np.ndarray) -> np.ndarray:
    """LINE [rows]: the first line of each row, which says how long it is; rows that were skipped have none.

    windows 1 1 2 3 0 1 of rows 1 2 2 2 3 4  ->  those of rows 1 2 3 4
    """
    return np.asarray(table[table["window"] <= 1])


def _sum(corpus: Corpus, files: Sequence[str], chosen: Sequence[int], *, source: str | None) -> Counts:
    reports = [corpus.row_reports[Path(files[i])] for i in chosen]
    tables = [corpus.tables[i] for i in chosen]
    return _counts(reports, tables, name="all", path=None, part="train", source=source)


def _counts(
    reports: Sequence[RowReport],
    tables: Sequence[np.ndarray],
    *,
    name: str,
    path: str | None,
    part: str,
    source: str | None,
) -> Counts:
    def added(field: str) -> int:
        return sum(getattr(report, field) for report in reports)

    full = np.concatenate([whole_rows(table)["full_tokens"] for table in tables])
    p50, p90, p99 = quantiles(full)
    reasons: Counter[str] = Counter()
    for report in reports:
        reasons.update(dict(report.reasons))
    return Counts(
        name=name,
        path=path,
        part=part,
        source=source,
        rows=added("rows"),
        samples=added("samples"),
        tokens=added("tokens_kept"),
        tokens_repeated=added("tokens_repeated"),
        supervised=added("supervised_kept"),
        supervised_share=added("supervised_kept") / max(1, added("tokens_kept")),
        full_tokens=int(full.sum()),
        p50=p50,
        p90=p90,
        p99=p99,
        longest=int(full.max()),
        rows_cut=added("rows_cut"),
        rows_windowed=added("rows_windowed"),
        samples_windowed=added("samples_windowed"),
        tokens_cut=added("tokens_cut"),
        supervised_cut=added("supervised_cut"),
        rows_dropped=added("rows_dropped"),
        tokens_dropped=added("tokens_dropped"),
        supervised_dropped=added("supervised_dropped"),
        rows_skipped=added("rows_skipped"),
        reasons=tuple(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        histogram=histogram(full),
        chats=added("chats"),
        omitted=reports[0].omitted if len(reports) == 1 else sum_omissions(report.omitted for report in reports),
    )
