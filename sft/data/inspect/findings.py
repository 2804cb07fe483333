"""Finds rows and samples that a user should look at before training, counts them, and names the first few.

Decides which rows and samples count as unusable, too long, unsupervised, short, copied or unfinished.  A finding is not
an error: the trainer uses such data, or leaves the data out if the recipe says so.  `report.py` has the words for each
finding.

One pass over the tokens of all samples finds similar samples, unfinished answers, and the longest answer.  Two samples
are similar if their tokens are equal, or if their prompts are equal and their answers differ.  An answer that continues
in the next window of its row is counted in that window.  Tokens are hashed while they are read, so each sample needs
three digests of 16 bytes in memory, however long it is (blake2b: among a billion samples, the probability that two
different ones share a digest is 1e-21).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from sft.batch import Sample
from sft.config import DataConfig
from sft.console import Console
from sft.data.cache.corpus import Corpus
from sft.data.cache.omissions import FileOmission
from sft.data.cache.truncation import turns
from sft.data.chat.tree import text_positions
from sft.data.inspect.counts import DataSet
from sft.data.read.rows import DataFile, row_name
from sft.parallel.alignment import aligned

NUM_EXAMPLES = 5
_SHORT = 2  # supervised tokens of a short answer: one token and the end of turn
_DIGEST_BYTES = 16
_KIND = np.dtype(f"S{_DIGEST_BYTES}")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding in `count` of `total` rows or samples, with the names of the first few of them."""

    what: str  # the name of the finding in docs/how-to/inspect.md
    part: str  # train, or the name of a held-out set
    count: int
    total: int
    examples: tuple[str, ...]
    of: str | None = None  # the kind of texts that the finding is about, e.g. `system content`


def finding(
    what: str, count: int, total: int, examples: Sequence[str], part: str = "train", of: str | None = None
) -> Finding:
    """A finding with the first few of `examples`."""
    return Finding(what=what, part=part, count=count, total=total, examples=tuple(examples[:NUM_EXAMPLES]), of=of)


class Scan(NamedTuple):
    """The results of one pass over a corpus of n samples.  A run is an unbroken stretch of supervised tokens.

    wholes    S16 [n], for each sample the digest of all its tokens
    prompts   S16 [n], the digest of the tokens before the first run
    openings  S16 [n], the digest of the tokens up to the end of the first run

    A sample with fewer than two tokens before its first run has the digest of all its tokens in all three arrays, and
    so has a window that is not the first of its row.
    """

    wholes: np.ndarray
    prompts: np.ndarray
    openings: np.ndarray
    num_runs: int  # number of runs; a run that continues in the next window counts only there
    unfinished_runs: int  # number of runs that do not end with the end-of-turn token
    unfinished: list[int]  # ids of the first samples with unfinished runs
    longest_run: int  # length of the longest run in tokens
    longest_sample: int  # id of the sample with the longest run


def scan(corpus: Corpus, ends_of_turn: Sequence[int], console: Console) -> Scan:
    """Reads every token of a corpus once, and computes the digests and counts of a `Scan`.

    ends_of_turn: ids of the tokens that can end a turn or a plain text
    """
    digests = bytearray()
    num_runs = unfinished_runs = longest_run = longest_sample = 0
    unfinished: list[int] = []
    lines = _sample_lines(corpus)
    windows = zip(lines["window"].tolist(), lines["windows"].tolist(), strict=True)
    with console.track("reading samples", len(corpus), "samples") as progress:
        for sample_id, (window, of) in enumerate(windows):
            sample = corpus.sample(sample_id)
            starts, ends, sizes = _turns_of(sample)
            digests += _digests(sample, starts, ends, has_prompt=window == 1)
            is_open = ~np.isin(sample.tokens[ends - 1], ends_of_turn)
            if window < of and sample.tree is None and len(ends) and ends[-1] == len(sample.tokens) and is_open[-1]:
                is_open = is_open[:-1]  # the turn continues in the next window and is counted there
            if is_open.any() and len(unfinished) < NUM_EXAMPLES:
                unfinished.append(sample_id)
            unfinished_runs += int(is_open.sum())
            num_runs += len(is_open)
            longest = int(sizes.max(initial=0))
            if longest > longest_run:
                longest_run, longest_sample = longest, sample_id
            progress.advance(1)
    wholes, prompts, openings = np.frombuffer(digests, dtype=_KIND).reshape(-1, 3).T
    return Scan(wholes, prompts, openings, num_runs, unfinished_runs, unfinished, longest_run, longest_sample)


def _turns_of(sample: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, end and number of tokens of each run of supervised tokens: three arrays int64 [runs].

    In a tree, the tokens that one text supervises are a run; start and end are those of the last span of the text.
    """
    if sample.tree is None:
        starts, ends = np.array(turns(sample.weights), dtype=np.int64).reshape(-1, 2).T
        return starts, ends, ends - starts
    texts, starts, ends = sample.tree.spans.T
    lasts = np.flatnonzero(np.diff(texts, append=-1))
    return starts[lasts], ends[lasts], np.bincount(texts, weights=ends - starts)


def _sample_lines(corpus: Corpus) -> np.ndarray:
    """LINE [n]: for each sample, its line in the table of the store."""
    return np.concatenate([table[table["tokens"] > 0] for table in corpus.tables])


def _digests(sample: Sample, starts: np.ndarray, ends: np.ndarray, *, has_prompt: bool) -> bytes:
    """The three digests of a sample, concatenated, in the order of `Scan`.

    The prompt and the opening of a tree are those of its first text.
    """
    if sample.tree is not None and has_prompt:
        in_sample = text_positions(sample.tree, 0)
        _, first, stop = sample.tree.spans[0].tolist()
        start = int(np.flatnonzero(in_sample == first)[0])
        of_text = sample.tokens[in_sample[: start + stop - first]]
        parts = sample.tokens, of_text[:start], of_text
        return b"".join(blake2b(np.ascontiguousarray(part).data, digest_size=_DIGEST_BYTES).digest() for part in parts)
    start, end = (int(starts[0]), int(ends[0])) if len(starts) else (0, 0)
    digest = blake2b(sample.tokens[:start].data, digest_size=_DIGEST_BYTES)
    prompt = digest.digest()
    digest.update(sample.tokens[start:end].data)
    opening = digest.digest()
    digest.update(sample.tokens[end:].data)
    whole = digest.digest()
    return whole + prompt + opening if has_prompt and start > 1 else 3 * whole


def copies(digests: np.ndarray) -> np.ndarray:
    """int64 [k, 2]: the index of each digest that equals an earlier digest, and the index of the first equal digest.

    a b a c a -> (2, 0), (4, 0)
    """
    _, firsts, inverse = np.unique(digests, return_index=True, return_inverse=True)
    originals = firsts[inverse]
    later = np.flatnonzero(originals != np.arange(len(digests)))
    return np.stack([later, originals[later]], axis=1)


def other_answers(prompts: np.ndarray, openings: np.ndarray) -> np.ndarray:
    """int64 [k, 2]: each sample whose prompt equals that of an earlier sample, but whose first answer is new for this
    prompt, and the first sample with this prompt.

    prompts p p q p, openings pa pb qa pa -> (1, 0); sample 3 is not listed, because it has the answer of sample 0
    """
    distinct = np.sort(np.unique(openings, return_index=True)[1])
    return distinct[copies(prompts[distinct])]


def of_rows(data: DataSet, config: DataConfig) -> list[Finding]:
    """Findings about rows that were skipped, and about rows whose padded length exceeds data.seq_length."""
    reports = [data.corpus.row_reports[path] for path in data.paths]
    num_rows, num_skipped = sum(report.rows for report in reports), sum(report.rows_skipped for report in reports)
    num_used = sum(map(len, data.rows))
    num_long = 0
    skipped: list[str] = []
    long: list[str] = []
    for path, rows, report in zip(data.paths, data.rows, reports, strict=True):
        numbers = rows["row"][aligned(rows["full_tokens"], config.doc_multiple) > config.seq_length]
        num_long += len(numbers)
        skipped += [row_name(path, number) for number in report.skipped]
        long += [row_name(path, int(number)) for number in numbers[:NUM_EXAMPLES]]
    return [finding("unusable", num_skipped, num_rows, skipped), finding("too_long", num_long, num_used, long)]


def of_template(data: DataSet) -> list[Finding]:
    """Findings about chats from which the chat template omits texts, for each role and kind of text."""
    total = sum(data.corpus.row_reports[path].chats for path in data.paths)
    by_name: dict[str, list[tuple[DataFile, FileOmission]]] = {}
    for path in data.paths:
        for omission in data.corpus.row_reports[path].omitted:
            by_name.setdefault(omission.name, []).append((path, omission))
    findings = []
    for name, files in by_name.items():
        count = sum(omission.chats for _, omission in files)
        examples = [row_name(path, row) for path, omission in files for row in omission.rows[:NUM_EXAMPLES]]
        findings.append(finding("omitted", count, total, examples, data.part, of=name))
    return findings or ([finding("omitted", 0, total, [], of="texts")] if data.part == "train" else [])


def of_samples(corpus: Corpus, scanned: Scan, supervise: str) -> list[Finding]:
    """Findings about samples without supervised tokens, short answers, unfinished turns, and similar samples.

    Whether a window has short answers depends on the supervised labels of its whole row.  With supervise = all,
    unfinished turns are not counted, because the mask does not show where a turn ends.
    """
    lines, total = _sample_lines(corpus), len(corpus)
    answered = np.where(lines["windows"] > 1, lines["full_supervised"], lines["supervised"])
    nothing, short = np.flatnonzero(answered == 0), np.flatnonzero((answered > 0) & (answered <= _SHORT))
    same, alike = copies(scanned.wholes), other_answers(scanned.prompts, scanned.openings)
    open_ends = _names(corpus, scanned.unfinished)
    unfinished = finding("unfinished_turns", scanned.unfinished_runs, scanned.num_runs, open_ends)
    return [
        finding("nothing_supervised", len(nothing), total, _names(corpus, nothing)),
        finding("short_answers", len(short), total, _names(corpus, short)),
        *([] if supervise == "all" else [unfinished]),
        finding("copies", len(same), total, _pairs(corpus, corpus, same)),
        finding("same_prompts", len(alike), total, _pairs(corpus, corpus, alike)),
    ]


def of_held_out(data: DataSet, scanned: Scan, train: Corpus, trained: Scan) -> list[Finding]:
    """Findings about a held-out set: texts that the chat template omits, samples that are also in the training data,
    and samples whose prompt is in the training data with another answer."""
    same, alike = _shared(scanned.wholes, trained.wholes), _shared(scanned.prompts, trained.prompts)
    alike = alike[~np.isin(alike[:, 0], _shared(scanned.openings, trained.openings)[:, 0])]
    corpus, part = data.corpus, data.part
    return [
        *of_template(data),
        finding("held_out_copies", len(same), len(corpus), _pairs(corpus, train, same), part),
        finding("held_out_prompts", len(alike), len(corpus), _pairs(corpus, train, alike), part),
    ]


def _shared(held_out: np.ndarray, train: np.ndarray) -> np.ndarray:
    """int64 [k, 2]: the index of each held-out digest that is also a training digest, and the index of the latter.

    held out c a, training a b -> (1, 0)
    """
    pairs = copies(np.concatenate([train, held_out])) - np.array([len(train), 0])
    return pairs[(pairs[:, 0] >= 0) & (pairs[:, 1] < len(train))]


def _names(corpus: Corpus, ids: Sequence[int] | np.ndarray) -> list[str]:
    return [corpus.name(int(i)) for i in ids[:NUM_EXAMPLES]]


def _pairs(corpus: Corpus, other: Corpus, pairs: np.ndarray) -> list[str]:
    """The names of the first few pairs of samples: `a.jsonl:7 = a.jsonl:1`"""
    return [f"{corpus.name(int(i))} = {other.name(int(j))}" for i, j in pairs[:NUM_EXAMPLES]]
