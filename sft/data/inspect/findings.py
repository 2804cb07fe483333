"""What in the data deserves a look before training: counts of it, and where the first few are.

Decides which rows and samples count as unusable, too long, unlearnable, short, copied or unfinished.  None of it is an
error: the trainer takes such data, or leaves it out where the recipe says so.  `text.py` decides how a finding reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sft.config import DataConfig
from sft.data.cache.corpus import Corpus
from sft.data.cache.omissions import FileOmission
from sft.data.chat.encode_chat import Supervise
from sft.data.inspect.counts import whole_rows
from sft.data.inspect.message_counts import NUM_EXAMPLES, Messages
from sft.data.inspect.scan import Scan, copies, other_answers, sample_lines
from sft.data.read.rows import row_name
from sft.parallel.alignment import aligned

_SHORT = 2  # supervised tokens: one, and the end of turn


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`count` of `total`, and the first few places.  what: a name of docs/inspect.md; part: train or a held-out set;
    of: which texts, where it is about a kind of them: `system content`."""

    what: str
    part: str
    count: int
    total: int
    examples: tuple[str, ...]
    of: str | None = None


def of_rows(corpus: Corpus, paths: Sequence[Path], data: DataConfig) -> list[Finding]:
    """Rows that were skipped, and rows that, padded to doc_multiple, are longer than seq_length."""
    num_rows = num_skipped = num_long = 0
    skipped: list[str] = []
    long: list[str] = []
    for path, table in zip(paths, corpus.tables, strict=True):
        report, rows = corpus.row_reports[path], whole_rows(table)
        numbers = rows["row"][aligned(rows["full_tokens"], data.doc_multiple) > data.seq_length]
        num_rows, num_skipped, num_long = (
            num_rows + report.rows,
            num_skipped + report.rows_skipped,
            num_long + len(numbers),
        )
        skipped += [row_name(path, number) for number in report.skipped]
        long += [row_name(path, int(number)) for number in numbers[:NUM_EXAMPLES]]
    return [
        _finding("unusable", num_skipped, num_rows, skipped[:NUM_EXAMPLES]),
        _finding("too_long", num_long, num_rows - num_skipped, long[:NUM_EXAMPLES]),
    ]


def of_template(corpus: Corpus, paths: Sequence[Path], part: str = "train") -> list[Finding]:
    """Chats of which the chat template leaves texts out, for each role and kind."""
    total = sum(corpus.row_reports[path].chats for path in paths)
    by_name: dict[str, list[tuple[Path, FileOmission]]] = {}
    for path in paths:
        for omission in corpus.row_reports[path].omitted:
            by_name.setdefault(omission.name, []).append((path, omission))
    findings = []
    for name, files in by_name.items():
        count = sum(omission.chats for _, omission in files)
        examples = [row_name(path, row) for path, omission in files for row in omission.rows[:NUM_EXAMPLES]]
        findings.append(replace(_finding("omitted", count, total, examples[:NUM_EXAMPLES], part), of=name))
    return findings or ([replace(_finding("omitted", 0, total, []), of="texts")] if part == "train" else [])


def of_samples(corpus: Corpus, scanned: Scan, supervise: Supervise) -> list[Finding]:
    """From tokens and masks.  A window of few supervised tokens is short only if the whole row is, and where all
    is supervised nothing separates one turn from the next."""
    lines, total = sample_lines(corpus), len(corpus)
    answered = np.where(lines["windows"] > 1, lines["full_supervised"], lines["supervised"])
    nothing, short = np.flatnonzero(answered == 0), np.flatnonzero((answered > 0) & (answered <= _SHORT))
    same, alike = copies(scanned.wholes), other_answers(scanned.prompts, scanned.openings)
    unfinished = _finding(
        "unfinished_turns", scanned.unfinished_runs, scanned.num_runs, _names(corpus, scanned.unfinished)
    )
    return [
        _finding("nothing_supervised", len(nothing), total, _names(corpus, nothing)),
        _finding("short_answers", len(short), total, _names(corpus, short)),
        *([] if supervise == "all" else [unfinished]),
        _finding("copies", len(same), total, _pairs(corpus, corpus, same)),
        _finding("same_prompts", len(alike), total, _pairs(corpus, corpus, alike)),
    ]


def of_messages(messages: Messages) -> list[Finding]:
    """From the rows as written."""
    empty, unanswered = messages.empty_user_turns, messages.unanswered_ends
    return [
        _finding("empty_user_turns", empty.count, messages.num_user_turns, empty.examples),
        _finding("unanswered_ends", unanswered.count, messages.num_chats, unanswered.examples),
    ]


def held_out(name: str, corpus: Corpus, scanned: Scan, train: Corpus, trained: Scan) -> list[Finding]:
    """Samples of a held-out set that training sees too: the same tokens, or the same prompt with another answer."""
    same, alike = _shared(scanned.wholes, trained.wholes), _shared(scanned.prompts, trained.prompts)
    alike = alike[~np.isin(alike[:, 0], _shared(scanned.openings, trained.openings)[:, 0])]
    return [
        _finding("held_out_copies", len(same), len(corpus), _pairs(corpus, train, same), name),
        _finding("held_out_prompts", len(alike), len(corpus), _pairs(corpus, train, alike), name),
    ]


def _shared(held_out: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Which held-out digest equals which of training, int64 [k, 2]: held out c a, training a b -> (1, 0)"""
    pairs = copies(np.concatenate([train, held_out])) - np.array([len(train), 0])
    return pairs[(pairs[:, 0] >= 0) & (pairs[:, 1] < len(train))]


def _finding(name: str, count: int, total: int, examples: Sequence[str], part: str = "train") -> Finding:
    return Finding(what=name, part=part, count=count, total=total, examples=tuple(examples))


def _names(corpus: Corpus, ids: Sequence[int] | np.ndarray) -> list[str]:
    return [corpus.name(int(i)) for i in ids[:NUM_EXAMPLES]]


def _pairs(corpus: Corpus, other: Corpus, pairs: np.ndarray) -> list[str]:
    """`a.jsonl:7 = a.jsonl:1`"""
    return [f"{corpus.name(int(i))} = {other.name(int(j))}" for i, j in pairs[:NUM_EXAMPLES]]
