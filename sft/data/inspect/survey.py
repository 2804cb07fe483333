"""Gathers all facts that a user should know about a recipe's data before training on it.  Prints nothing.

Decides what is counted over which samples.  Lengths, histogram and retention are of whole rows, each once; samples,
tokens, copies and previews are of what training would see: after data.over_long, windows one by one.  Sources that
data.train names have counts beside those of their files; the shares it gives them are not applied (`sft data plan`).
Held-out files have their lines too and are compared with data.train; all else is of data.train alone.
Where the trainer would refuse the data for their lengths, whole samples are surveyed, and the survey has the refusal.

Does not decide how it looks (`report.py`, `picture.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sft.config import DataConfig
from sft.console import Console
from sft.data.cache.corpus import Corpus
from sft.data.cache.prepare import prepare
from sft.data.chat.tokenizer import BYTE_CONTROL, ByteTokenizer, ChatTokenizer
from sft.data.inspect import findings
from sft.data.inspect.counts import Counts, DataSet, Retention, counts_of, of_files, of_sources, retention
from sft.data.inspect.findings import Finding, Scan, scan
from sft.data.inspect.preview import Preview, preview
from sft.data.inspect.roles import Role, count_messages
from sft.errors import DataError

SCHEMA = 1
_NO_LIMIT = 1 << 40


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What a tokenizer and its template say about ends of turns, padding, and how masks are proven."""

    name: str
    vocab_size: int
    end_of_turn: str
    end_of_turn_id: int
    end_of_turn_ids: tuple[int, ...]  # that one first, then those of turns that end in another way (after a tool call)
    eos: str | None  # null for the byte tokenizer, which has no end of sequence
    eos_id: int | None
    pad_id: int
    masks: str  # `built in`, `generation markers` or `differences`


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What JSON has of the data."""

    schema: int
    recipe: str
    seq_length: int
    doc_multiple: int
    over_long: str
    on_bad_row: str
    refused: str | None  # why the trainer would not take the data as they are; null where it would
    files: tuple[Counts, ...]  # of data.train, then of the held-out sets
    sources: tuple[Counts, ...]  # those that data.train names, each with all of its files; empty where it names none
    total: Counts  # all training files together
    retention: tuple[Retention, ...]
    roles: tuple[Role, ...]
    roles_exact: bool
    rows_of_tokens: int  # rows without messages, of which `roles` says nothing
    tokenizer: TokenizerFacts
    findings: tuple[Finding, ...]
    previews: tuple[Preview, ...]


def take_survey(
    recipe: str, data: DataConfig, tokenizer: ChatTokenizer, cache_dir: Path, num_previews: int, console: Console
) -> Survey:
    """Tokenises what is not in the cache yet, then reads rows and tokens once each.

    Raises DataError for what `prepare` refuses, over-long rows excepted.
    """
    prepared = [
        _prepare_any(part, files, data, tokenizer, cache_dir, console)
        for part, files in {"train": data.train_files, **data.eval_sets}.items()
    ]
    train, *held_out = [data_set for data_set, _ in prepared]
    facts = tokenizer_facts(tokenizer)
    scanned, *scans = [scan(data_set.corpus, facts.end_of_turn_ids, console) for data_set, _ in prepared]
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
    part: str, files: list[str], data: DataConfig, tokenizer: ChatTokenizer, cache_dir: Path, console: Console
) -> tuple[DataSet, str | None]:
    """The corpus that training would use; where it is refused for its lengths, the whole one and the refusal.  What a
    chat template leaves out is no reason not to look at the rest."""
    sources = data.train_names if part == "train" else None
    reporting = data.model_copy(update={"on_omitted": "report"})
    refused = None
    try:
        corpus = prepare(files, reporting, tokenizer, cache_dir, console, sources)
    except DataError as error:
        # Some rows or all of them are too long, or a row is wrong: then this raises the same again.
        console.say("the data cannot be trained on as they are; once more, whatever the lengths")
        whole = reporting.model_copy(update={"seq_length": _NO_LIMIT, "over_long": "error"})
        corpus, refused = prepare(files, whole, tokenizer, cache_dir, console, sources), str(error)
    try:
        corpus.check_omitted(data, tokenizer)
    except DataError as error:
        refused = refused or str(error)
    rows = [whole_rows(table) for table in corpus.tables]
    return DataSet(part, [Path(file) for file in files], sources, corpus, rows), refused


def whole_rows(table: np.ndarray) -> np.ndarray:
    """LINE [rows]: the first line of each row, which says how long it is; rows that were skipped have none.

    windows 1 1 2 3 0 1 of rows 1 2 2 2 3 4  ->  those of rows 1 2 3 4
    """
    return np.asarray(table[table["window"] <= 1])


def tokenizer_facts(tokenizer: ChatTokenizer) -> TokenizerFacts:
    """Those of the tokenizer that a recipe names."""
    if isinstance(tokenizer, ByteTokenizer):
        ends: tuple[int, ...] = (BYTE_CONTROL[tokenizer.end_of_turn],)
        eos, eos_id, masks = None, None, "built in"
    else:
        ends = tuple(tokenizer.ids[end] for end in tokenizer.delimiters.ends)
        eos, eos_id = tokenizer.hf.eos_token, tokenizer.hf.eos_token_id
        masks = "generation markers" if tokenizer.template.has_markers else "differences"
    return TokenizerFacts(
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        end_of_turn=tokenizer.end_of_turn,
        end_of_turn_id=ends[0],
        end_of_turn_ids=ends,
        eos=eos,
        eos_id=eos_id,
        pad_id=tokenizer.pad_id,
        masks=masks,
    )


def _previews(corpus: Corpus, scanned: Scan, tokenizer: ChatTokenizer, num_first: int) -> Iterator[Preview]:
    """The first samples, and the one with the longest answer; none at all where no first one is asked for."""
    chosen = {sample_id: "first" for sample_id in range(min(num_first, len(corpus)))}
    if num_first:
        is_first = scanned.longest_sample in chosen
        chosen[scanned.longest_sample] = "first, longest answer" if is_first else "longest answer"
    for sample_id, why in chosen.items():
        yield preview(corpus.sample(sample_id), corpus.name(sample_id), why, tokenizer)
