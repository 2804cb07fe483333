"""Gathers the facts that a user should know about a recipe's data before training.  Prints only progress and notes.

Decides which rows or samples each count covers.  Lengths, histogram and retention cover uncut rows.  Samples, tokens,
copies and previews cover the training samples: data.over_long is applied, and every window is a sample.  Each named
source has counts over all its files.  The shares of a mixture are not applied (`sft data plan` applies them).
Held-out files are counted and compared with data.train; all other results cover data.train only.  If the trainer
would refuse rows that are too long, the survey covers uncut samples and contains the trainer's error message.

`report.py` and `picture.py` decide how a survey looks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sft.config import DataConfig, Input
from sft.console import Console
from sft.data.cache.corpus import Corpus
from sft.data.cache.prepare import prepare
from sft.data.cache.tokenizer_notes import say_notes
from sft.data.chat.tokenizer import BYTE_CONTROL, ByteTokenizer, ChatTokenizer
from sft.data.inspect import findings
from sft.data.inspect.counts import DataSet, FileCounts, Retention, counts_of, of_files, of_sources, retention
from sft.data.inspect.findings import Finding, Scan, scan
from sft.data.inspect.preview import Preview, preview
from sft.data.inspect.roles import Role, count_messages
from sft.errors import DataError

SCHEMA = 1
_NO_LIMIT = 1 << 40


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """The facts about a tokenizer and its template that decide ends of turns, padding and loss masks."""

    name: str
    vocab_size: int
    end_of_turn: str | None  # null without a chat template
    end_of_turn_id: int | None
    end_of_turn_ids: tuple[int, ...]  # end_of_turn_id, then other tokens that can end a turn, e.g. after a tool call
    eos: str | None  # null for the byte tokenizer, which has no EOS token
    eos_id: int | None
    pad_id: int
    masks: str  # how loss masks are made: `built in`, `sources of characters`, or `no template`


@dataclass(frozen=True, kw_only=True)
class Survey:
    """All facts about the data; `sft data inspect --json` prints these fields."""

    schema: int
    recipe: str
    seq_length: int
    doc_multiple: int
    over_long: str
    on_bad_row: str
    refused: str | None  # why the trainer would refuse the data; null if it would accept them
    files: tuple[FileCounts, ...]  # counts of files of data.train, then of the held-out sets
    sources: tuple[FileCounts, ...]  # counts of each source that data.train names; empty without named sources
    total: FileCounts  # counts over all training files
    retention: tuple[Retention, ...]
    roles: tuple[Role, ...]
    roles_exact: bool
    rows_of_text: int  # number of rows that are plain texts; `roles` does not count them
    rows_of_tokens: int  # number of rows that are token ids; `roles` does not count them
    tokenizer: TokenizerFacts
    findings: tuple[Finding, ...]
    previews: tuple[Preview, ...]


def take_survey(
    recipe: str, data: DataConfig, tokenizer: ChatTokenizer, cache_dir: Path, num_previews: int, console: Console
) -> Survey:
    """Tokenises rows that the cache lacks, then reads all rows once and all tokens once.

    Raises DataError if `prepare` refuses the data, except for over-long rows.
    """
    prepared = [
        _prepare_any(part, files, data, tokenizer, cache_dir, console)
        for part, files in {"train": data.train_files, **data.eval_sets}.items()
    ]
    train, *held_out = [data_set for data_set, _ in prepared]
    say_notes(tokenizer, train.paths, console)
    facts = tokenizer_facts(tokenizer)
    ends = [*facts.end_of_turn_ids, *([] if facts.eos_id is None else [facts.eos_id])]  # eos ends a plain text
    scanned, *scans = [scan(data_set.corpus, ends, console) for data_set, _ in prepared]
    messages = count_messages(train, tokenizer, data.supervise, console)
    return Survey(
        schema=SCHEMA,
        recipe=recipe,
        seq_length=data.seq_length,
        doc_multiple=data.doc_multiple,
        over_long=data.over_long,
        on_bad_row=data.on_bad_row,
        refused=next((refusal for _, refusal in prepared if refusal), None),
        files=tuple(counts for data_set, _ in prepared for counts in of_files(data_set)),
        sources=tuple(of_sources(train)),
        total=counts_of(train, range(len(train.paths))),
        retention=retention(np.concatenate(train.rows), doc_multiple=data.doc_multiple, seq_length=data.seq_length),
        roles=messages.roles,
        roles_exact=messages.is_exact,
        rows_of_text=messages.num_texts,
        rows_of_tokens=messages.num_tokenised,
        tokenizer=facts,
        findings=(
            *findings.of_rows(train, data),
            *findings.of_template(train),
            *findings.of_samples(train.corpus, scanned, data.supervise),
            *messages.findings,
            *(
                finding
                for others in zip(held_out, scans)
                for finding in findings.of_held_out(*others, train.corpus, scanned)
            ),
        ),
        previews=tuple(_previews(train.corpus, scanned, tokenizer, num_previews)),
    )


def _prepare_any(
    part: str, inputs: list[Input], data: DataConfig, tokenizer: ChatTokenizer, cache_dir: Path, console: Console
) -> tuple[DataSet, str | None]:
    """Returns a data set, and the error message with which training would refuse the data; None if it would not.

    If rows are too long for training, the data set contains all rows uncut.  Texts that a chat template omits do not
    stop the survey, whatever data.on_omitted is.
    """
    sources = data.train_names if part == "train" else None
    reporting = data.model_copy(update={"on_omitted": "report"})
    refused = None
    try:
        corpus = prepare(inputs, reporting, tokenizer, cache_dir, console, sources)
    except DataError as error:
        # If rows are too long, the second `prepare` accepts them.  If the error has another cause, it raises it again.
        console.say("training would refuse these data; tokenising them again without a length limit")
        whole = reporting.model_copy(update={"seq_length": _NO_LIMIT, "over_long": "error"})
        corpus, refused = prepare(inputs, whole, tokenizer, cache_dir, console, sources), str(error)
    try:
        corpus.check_omitted(data, tokenizer)
    except DataError as error:
        refused = refused or str(error)
    rows = [whole_rows(table) for table in corpus.tables]
    return DataSet(part, corpus.files, sources, corpus, rows), refused


def whole_rows(table: np.ndarray) -> np.ndarray:
    """LINE [rows]: of a store's table, the first line of each row, which contains the row's uncut length.

    Each document of a packed row counts as a row.  Skipped rows have no line.

    windows 1 1 2 3 0 1 of rows 1 2 2 2 3 4  ->  the lines with windows 1 1 0 1, of rows 1 2 3 4
    """
    return np.asarray(table[table["window"] <= 1])


def tokenizer_facts(tokenizer: ChatTokenizer) -> TokenizerFacts:
    """The facts about a tokenizer and its chat template."""
    ends: tuple[int, ...] = ()
    eos, eos_id, masks = None, None, "no template"
    if isinstance(tokenizer, ByteTokenizer):
        ends, masks = (BYTE_CONTROL[tokenizer.end_of_turn],), "built in"
    else:
        eos, eos_id = tokenizer.files.special_tokens.get("eos_token"), tokenizer.files.eos_id
        if tokenizer.chat_template is not None:
            usual = tokenizer.end_of_turn
            names = dict.fromkeys((usual, *tokenizer.habits.ends))  # the usual end of a turn first
            ends = tuple(tokenizer.ids[end] for end in names if end in tokenizer.ids)
            masks = "sources of characters"
    return TokenizerFacts(
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        end_of_turn=tokenizer.end_of_turn if ends else None,
        end_of_turn_id=ends[0] if ends else None,
        end_of_turn_ids=ends,
        eos=eos,
        eos_id=eos_id,
        pad_id=tokenizer.pad_id,
        masks=masks,
    )


def _previews(corpus: Corpus, scanned: Scan, tokenizer: ChatTokenizer, num_first: int) -> Iterator[Preview]:
    """Yields previews of the first `num_first` samples and of the sample with the longest answer; none if it is 0."""
    chosen = {sample_id: "first" for sample_id in range(min(num_first, len(corpus)))}
    if num_first:
        is_first = scanned.longest_sample in chosen
        chosen[scanned.longest_sample] = "first, longest answer" if is_first else "longest answer"
    for sample_id, why in chosen.items():
        yield preview(corpus.sample(sample_id), corpus.name(sample_id), why, tokenizer)
