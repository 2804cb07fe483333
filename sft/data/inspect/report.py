"""Formats a survey as text: tables, bars, findings, and samples with supervised text in green.

Decides the layout, and the words for each finding.  The caller decides whether text is coloured; without colour, [[ ]]
encloses supervised text.  `survey.py` gathers the facts.
"""

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby

from sft.data.cache.row_report import describe_packed, describe_padding, describe_trees
from sft.data.cache.unused_keys import describe_spelled, describe_unused
from sft.data.inspect.counts import FileCounts
from sft.data.inspect.findings import Finding
from sft.data.inspect.preview import Preview, TokenRun
from sft.data.inspect.survey import Survey, TokenizerFacts

_BAR = 40
_WIDTH = 112
_REASONS = 3
_GLUE = "\N{NO-BREAK SPACE}"  # keeps `a = b` on one line
_GREEN, _DIM, _BOLD, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_SIGNS = {"\n": "⏎\n", "\t": "⇥", "\r": "\\x0d"}

# How loss masks are made, by `TokenizerFacts.masks`.
_MASKS = {
    "built in": "written by the built-in ChatML template, which marks the assistant's text",
    "sources of characters": "known for each character: each comes from a message or from the template",
    "no template": "not made from chats, because the tokenizer has no chat template",
}

# Name of a finding: the unit of its count, what the report says about it, and why it matters.
_WORDS = {
    "unusable": ("rows", "are unusable", "data.on_bad_row leaves them out"),
    "too_long": ("rows", "are longer than data.seq_length", "trees are split, data.over_long decides about other rows"),
    "omitted": ("chats", "lose {of} to the chat template", "the model does not see it"),
    "nothing_supervised": ("samples", "lack a supervised token", "they cost time and have no loss"),
    "short_answers": ("samples", "have only 1 or 2 supervised tokens", "is an answer cut off?"),
    "unfinished_turns": (
        "answers",
        "lack the end-of-turn token at their end",
        "the model does not learn to stop there",
    ),
    "copies": ("samples", "are copies of an earlier one", "training uses every copy"),
    "same_prompts": (
        "samples",
        "give a new answer to the prompt of an earlier one",
        "alternatives, or contradictions?",
    ),
    "empty_user_turns": ("user turns", "are empty", "the model learns to answer without a question"),
    "unanswered_ends": ("chats", "end without an answer", "text after the last answer is never supervised"),
    "held_out_copies": ("samples", "are also in data.train", "they make the held-out loss too good"),
    "held_out_prompts": ("samples", "have a prompt of data.train and another answer", "the question is not new"),
}


def survey_lines(survey: Survey, *, color: bool) -> Iterator[str]:
    """The lines of the whole survey, section by section."""
    sections = [
        (f"data of {survey.recipe}", _head(survey)),
        ("files", _files(survey)),
        ("lengths: tokens of whole rows", _lengths(survey.total)),
        (f"retention: samples that fit uncut, padded to a multiple of {survey.doc_multiple}", _retention(survey)),
        (f"roles: tokens of message texts{'' if survey.roles_exact else ', estimated'}", _roles(survey)),
        ("tokenizer", _tokenizer(survey.tokenizer)),
        ("findings", _findings(survey.findings)),
    ]
    for title, lines in sections:
        yield f"{_BOLD}{title}{_RESET}" if color else title
        yield from (f"  {line}" for line in lines)
        yield ""
    if survey.previews:
        legend = f"{_GREEN}green{_RESET}{_BOLD}" if color else "in [[ ]]"
        title = f"previews: supervised text is {legend}, all other text is only context; ⏎ is a newline"
        yield f"{_BOLD}{title}{_RESET}" if color else title
    for shown in survey.previews:
        yield from preview_lines(shown, color=color)
        yield ""


def preview_lines(preview: Preview, *, color: bool) -> Iterator[str]:
    """The lines of the preview of one sample.  Without colour:

    a.jsonl:1 (first): 23 tokens, 2 supervised
      <|im_start|>user⏎
      a<|im_end|>⏎
      <|im_start|>assistant⏎
      [[b<|im_end|>]]⏎
    """
    yield f"  {preview.name} ({preview.why}): {preview.tokens:,} tokens, {preview.supervised:,} supervised"
    yield from (f"    {line}" for line in preview.tree)
    kinds = groupby(preview.pieces, key=lambda piece: piece.is_supervised)
    texts = [("".join(map(_shown, pieces)), is_supervised) for is_supervised, pieces in kinds]
    text = "".join(_marked(text, is_supervised=is_supervised, color=color) for text, is_supervised in texts if text)
    yield from (f"    {line}" for line in text.removesuffix("\n").split("\n"))


def visible(text: str) -> str:
    """The text without characters that a terminal interprets or hides: newlines become ⏎, tabs ⇥.  Control, format,
    private and unassigned characters, and separators of lines and paragraphs, become escapes.

    "a\\tb\\x1b[31m" -> "a⇥b\\\\x1b[31m"
    """
    hidden = {letter for letter in text if unicodedata.category(letter)[0] == "C" or letter in "\u2028\u2029"}
    replaced = {letter: letter.encode("unicode_escape").decode() for letter in hidden} | _SIGNS
    return "".join(replaced.get(letter, letter) for letter in text)


def percent(part: float, whole: float) -> str:
    """A share as text, with 0% and 100% only for exact values: 2999 of 3000 -> 99.9%, 1 of 3000 -> <0.1%"""
    if not whole or part in (0, whole):
        return "100%" if whole and part == whole else "0%"
    share = 100 * part / whole
    return "<0.1%" if share < 0.05 else f"{min(share, 99.9):.1f}%"


def _head(survey: Survey) -> Iterator[str]:
    yield (
        f"data.seq_length {survey.seq_length:,}, data.doc_multiple {survey.doc_multiple}, "
        f"data.over_long {survey.over_long}, data.on_bad_row {survey.on_bad_row}"
    )
    if survey.refused is not None:
        yield "sft train would refuse these data; the report below is about uncut rows of any length:"
        yield from (f"  {line}" for line in survey.refused.splitlines())


def _files(survey: Survey) -> Iterator[str]:
    """Lines of training files, grouped by source with sums, the sum of all training files, and held-out files."""
    train = [counts for counts in survey.files if counts.part == "train"]
    listed = []
    for source in survey.sources or (None,):
        files = [counts for counts in train if source is None or counts.source == source.source]
        listed += files if source is None or len(files) == 1 else [*files, source]
    listed += [survey.total] if len(train) > 1 else []
    listed += [counts for counts in survey.files if counts.part != "train"]
    header = ["file", "set", "rows", "samples", "tokens", "supervised", "p50", "p90", "p99", "longest"]
    body = [
        [
            counts.name,
            # `train`, `train.SOURCE` for named sources, or the name of the held-out set
            counts.part if counts.source is None else f"{counts.part}.{counts.source}",
            *(f"{count:,}" for count in (counts.rows, counts.samples, counts.tokens)),
            percent(counts.supervised - counts.supervised_repeated, counts.tokens),
            *(f"{length:,}" for length in (counts.p50, counts.p90, counts.p99, counts.longest)),
        ]
        for counts in listed
    ]
    yield from _table([header, *body], left=2)
    explained: set[str] = set()
    losses = [line for counts in survey.files for line in _losses(counts, explained)]
    yield from losses or (["nothing is cut, dropped or skipped"] if survey.refused is None else [])
    for counts in survey.files:
        if counts.unused:
            yield f"{_file(counts)}: {visible(describe_unused(counts.unused, counts.unused_others))}"
        if counts.spelled:
            yield f"{_file(counts)}: {visible(describe_spelled(counts.spelled))}"


def _losses(counts: FileCounts, explained: set[str]) -> Iterator[str]:
    """Lines about rows of a file of which not every token becomes one sample: trees, packed rows, padding, windows,
    cut, dropped and skipped rows, and texts that the chat template leaves out.

    explained: the reasons that earlier lines gave, which are not repeated; new ones are added
    """
    name = _file(counts)
    if counts.trees:
        saved = describe_trees(counts.trees, counts.texts, counts.tokens_rendered, counts.tokens_of_trees)
        yield f"{name}: data.turns = each {saved}"
    if counts.rows_packed:
        lost = counts.documents_unsupervised, counts.tokens_unsupervised
        yield f"{name}: {describe_packed(counts.rows_packed, counts.documents, *lost)}"
    if counts.tokens_padding:
        yield f"{name}: {describe_padding(counts.tokens_padding, counts.rows_padded)}"
    if counts.rows_windowed:
        made = f"{counts.samples_windowed:,} windows of {_rows(counts.rows_windowed)}"
        share = percent(counts.tokens_repeated, counts.tokens)
        repeated = f"{counts.tokens_repeated:,} tokens ({share} of the training tokens)"
        yield f"{name}: data.over_long makes {made}, which repeat {repeated}"
    for verb, rows, tokens, supervised in (
        ("cuts", counts.rows_cut, counts.tokens_cut, counts.supervised_cut),
        ("drops", counts.rows_dropped, counts.tokens_dropped, counts.supervised_dropped),
    ):
        if tokens:
            share = percent(tokens, counts.full_tokens)
            # Windowed rows also lose tokens; the number of windowed rows that do is unknown.
            where = "" if verb == "cuts" and counts.rows_windowed else f" of {_rows(rows)}"
            yield f"{name}: data.over_long {verb} {tokens:,} tokens ({share} of all, {supervised:,} supervised){where}"
    if counts.rows_skipped:
        reasons = "; ".join(f"{count:,} x {visible(reason)}" for reason, count in counts.reasons[:_REASONS])
        more = "; ..." if len(counts.reasons) > _REASONS else ""
        yield f"{name}: data.on_bad_row skips {_rows(counts.rows_skipped)}: {reasons}{more}"
    if counts.rows_unwanted:
        yield f"{name}: label false drops {_rows(counts.rows_unwanted)}"
    for omitted in counts.omitted:
        reason = "" if omitted.why in explained else f"; {visible(omitted.why)}"
        explained.add(omitted.why)
        yield f"{name}: the chat template leaves out {omitted.describe(counts.chats)}{reason}"


def _file(counts: FileCounts) -> str:
    return counts.name if counts.part == "train" else f"{counts.name} ({counts.part})"


def _rows(count: int) -> str:
    return f"{count:,} {'row' if count == 1 else 'rows'}"


def _lengths(total: FileCounts) -> Iterator[str]:
    most = max(bucket.rows for bucket in total.histogram)
    rows = [["from", "to", "rows", "", "tokens"]]
    for bucket in total.histogram:
        bar = "#" * -(-_BAR * bucket.rows // most)
        span = [f"{bucket.at_least:,}", f"{bucket.below - 1:,}", f"{bucket.rows:,}"]
        rows.append([*span, f"{bar:{_BAR}}", percent(bucket.tokens, total.full_tokens)])
    yield from _table(rows, left=0)


def _retention(survey: Survey) -> Iterator[str]:
    """The lines of the retention table.  Leaves out a size that holds as many rows as the next smaller size, unless it
    is the recipe's seq_length."""
    points = survey.retention
    held_before = [-1, *(point.rows for point in points)]
    shown = [p for p, held in zip(points, held_before, strict=False) if p.is_recipe or p.rows > held]
    everything = points[-1]  # the largest size holds the longest row, so all rows
    body = [
        [
            f"{point.seq_length:,}",
            percent(point.rows, everything.rows),
            percent(point.tokens, everything.tokens),
            percent(point.supervised, everything.supervised),
        ]
        for point in shown
    ]
    lines = _table([["seq_length", "rows", "tokens", "supervised tokens"], *body], left=0)
    marks = ["", *("   <- this recipe" if point.is_recipe else "" for point in shown)]
    yield from (line + mark for line, mark in zip(lines, marks, strict=True))


def _roles(survey: Survey) -> Iterator[str]:
    about = "" if survey.roles_exact else "~"
    rows = [["role", "messages", "tokens", "mean", "supervised"]]
    for role in survey.roles:
        sizes = [f"{about}{role.tokens:,}", f"{about}{role.mean_tokens:,.1f}"]
        rows.append([role.role, f"{role.messages:,}", *sizes, percent(role.supervised_share, 1)])
    if survey.roles:
        yield from _table(rows, left=1)
    if survey.rows_of_text:
        yield f"{_rows(survey.rows_of_text)} of plain text, without roles"
    if survey.rows_of_tokens:
        yield f"{_rows(survey.rows_of_tokens)} with token ids, without roles"


def _tokenizer(facts: TokenizerFacts) -> Iterator[str]:
    yield f"{facts.name}, {facts.vocab_size:,} ids"
    yield f"masks are {_MASKS[facts.masks]}"
    end = f"turns end with {facts.end_of_turn} (id {facts.end_of_turn_id})"
    if facts.end_of_turn is None:
        yield f"the tokenizer's eos is {facts.eos} (id {facts.eos_id})" if facts.eos else "the tokenizer names no eos"
    elif facts.eos is None:
        yield f"{end}; the tokenizer names no end of sequence (eos)"
    elif facts.eos_id == facts.end_of_turn_id:
        yield f"{end}, which is also the tokenizer's end of sequence (eos)"
    else:
        yield f"{end}, but the tokenizer's eos is {facts.eos} (id {facts.eos_id}): when generating, stop at both"
    same = facts.eos_id is not None and facts.pad_id == facts.eos_id
    yield f"padding is id {facts.pad_id}{', the same as eos; padding is not supervised' if same else ''}"


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines of the checks that found something, then of the checks that found nothing."""
    for finding in sorted(findings, key=lambda finding: not finding.count):
        noun, predicate, why = (words.format(of=finding.of) for words in _WORDS[finding.what])
        noun = noun if finding.part == "train" else f"held-out {noun} ({finding.part})"
        if not finding.count:
            yield f"- no {noun} {predicate}"
            continue
        share = percent(finding.count, finding.total)
        yield f"! {finding.count:,} of {finding.total:,} {noun} ({share}) {predicate}: {why}"
        more = ", ..." if finding.count > len(finding.examples) else ""
        examples = f"{', '.join(example.replace(' ', _GLUE) for example in finding.examples)}{more}"
        for line in textwrap.wrap(examples, _WIDTH, break_long_words=False, break_on_hyphens=False):
            yield f"    {line.replace(_GLUE, ' ')}"


def _table(rows: Sequence[Sequence[str]], *, left: int) -> Iterator[str]:
    """The lines of a table, columns two spaces apart; the first `left` columns are left-aligned, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{cell:<{w}}" if i < left else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _marked(text: str, *, is_supervised: bool, color: bool) -> str:
    if not color:
        return f"[[{text}]]" if is_supervised else text
    start = _GREEN if is_supervised else _DIM
    return "\n".join(f"{start}{line}{_RESET}" if line else "" for line in text.split("\n"))


def _shown(piece: TokenRun) -> str:
    """The text of a piece.  For a gap: its number of tokens, or the text that marks a branch."""
    return f"\n[{piece.text or f'... {piece.tokens:,} tokens ...'}]\n" if piece.is_gap else visible(piece.text)
