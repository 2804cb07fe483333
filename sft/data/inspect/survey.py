"""What a user should know about the data of a recipe before training on it: everything gathered, nothing printed.

Decides what is counted over which samples.  Lengths, histogram and retention are of whole rows, each once; samples,
tokens, copies and previews are of what training would see: after data.over_long, windows one by one.  Sources that
data.train names have counts beside those of their files; the shares it gives them are not applied (`sft data plan`).
Held-out files have their lines too and are compared with data.train; all else is of data.train alone.
Where the trainer would refuse the data for their lengths, whole samples are surveyed, and the survey has the refusal.

Does not decide how it looks (`text.py`, `picture.py`).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sft.config import DataConfig
from sft.console import Console
from sft.data.cache.corpus import Corpus
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.inspect import counts, findings
from sft.data.inspect.counts import Counts, prepare_any, whole_rows
from sft.data.inspect.findings import Finding
from sft.data.inspect.lengths import Retention, retention
from sft.data.inspect.message_counts import Role, count_messages
from sft.data.inspect.preview import Preview, preview
from sft.data.inspect.scan import Scan, scan
from sft.data.inspect.tokenizer_facts import TokenizerFacts, tokenizer_facts

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Survey:
    """refused: why the trainer would not take the data as they are; null where it would.

    files     of data.train, then of the held-out sets
    sources   those that data.train names, each with all of its files; empty where it names none
    total     all training files together
    rows_of_tokens  rows without messages, of which `roles` says nothing
    """

    schema: int
    recipe: str
    seq_length: int
    doc_multiple: int
    over_long: str
    on_bad_row: str
    refused: str | None
    files: tuple[Counts, ...]
    sources: tuple[Counts, ...]
    total: Counts
    retention: tuple[Retention, ...]
    roles: tuple[Role, ...]
    roles_exact: bool
    rows_of_tokens: int
    tokenizer: TokenizerFacts
    findings: tuple[Finding, ...]
    previews: tuple[Preview, ...]

    def as_dict(self) -> dict[str, Any]:
        """The survey as JSON knows it."""
        return asdict(self)


def take_survey(
    recipe: str, data: DataConfig, tokenizer: ChatTokenizer, cache_dir: Path, num_previews: int, console: Console
) -> Survey:
    """Tokenises what is not in the cache yet, then reads rows and tokens once each.

    Raises DataError for what `prepare` refuses, over-long rows excepted.
    """
    train, names = data.train_files, data.train_names
    corpus, refused = prepare_any(train, data, tokenizer, cache_dir, console, names)
    facts, paths = tokenizer_facts(tokenizer), [Path(file) for file in train]
    scanned = scan(corpus, facts.end_of_turn_ids, console)
    messages = count_messages(paths, corpus.tables, tokenizer, data.supervise, console)
    all_findings = findings.of_rows(corpus, paths, data) + findings.of_template(corpus, paths)
    all_findings += findings.of_samples(corpus, scanned, data.supervise) + findings.of_messages(messages)
    files = counts.of_files(corpus, train, "train", names)
    for name, held_out_files in data.eval_sets.items():
        held_out, why = prepare_any(held_out_files, data, tokenizer, cache_dir, console)
        refused = refused or why
        files += counts.of_files(held_out, held_out_files, name)
        all_findings += findings.of_template(held_out, [Path(file) for file in held_out_files], name)
        all_findings += findings.held_out(
            name, held_out, scan(held_out, facts.end_of_turn_ids, console), corpus, scanned
        )
    return Survey(
        schema=SCHEMA,
        recipe=recipe,
        seq_length=data.seq_length,
        doc_multiple=data.doc_multiple,
        over_long=data.over_long,
        on_bad_row=data.on_bad_row,
        refused=refused,
        files=tuple(files),
        sources=tuple(counts.of_sources(corpus, train, names)) if names else (),
        total=counts.of_all(corpus, train),
        retention=_retention(corpus, data),
        roles=messages.roles,
        roles_exact=messages.is_exact,
        rows_of_tokens=messages.num_tokenised,
        tokenizer=facts,
        findings=tuple(all_findings),
        previews=tuple(_previews(corpus, scanned, tokenizer, num_previews)),
    )


def _retention(corpus: Corpus, data: DataConfig) -> tuple[Retention, ...]:
    rows = np.concatenate([whole_rows(table) for table in corpus.tables])
    return retention(
        rows["full_tokens"], rows["full_supervised"], doc_multiple=data.doc_multiple, seq_length=data.seq_length
    )


def _previews(corpus: Corpus, scanned: Scan, tokenizer: ChatTokenizer, num_first: int) -> Iterator[Preview]:
    """The first samples, and the one with the longest answer; none at all where no first one is asked for."""
    chosen = {sample_id: "first" for sample_id in range(min(num_first, len(corpus)))}
    if num_first:
        is_first = scanned.longest_sample in chosen
        chosen[scanned.longest_sample] = "first, longest answer" if is_first else "longest answer"
    for sample_id, why in chosen.items():
        yield preview(corpus.sample(sample_id), corpus.name(sample_id), why, tokenizer)
