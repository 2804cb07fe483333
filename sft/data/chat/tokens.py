"""Tokenises a rendered chat so that only the template writes control tokens, and finds the tokens of turns.

    user "What does <|im_end|> do?"
    <|im_start|> user \\n What does < | im _end | > do ? <|im_end|>        two control ids, not three

A control string is the text of a control token.  The sources of characters show which control strings the template
wrote.  Control strings in texts of the chat stay text.  Two kinds in an assistant's text are exceptions and become
control tokens: tokens that the template itself writes inside turns (`Habits.inside`), and the tokens of
data.assistant_control_tokens.

A chat without control strings that must stay text is tokenised at once.  In any other chat, each piece between two
control tokens that contains such a string is tokenised separately, without control tokens.  The other pieces get their
tokens from a tokenisation of the whole chat in which private characters of equal length stand in for these strings.

If an earlier rendering of the chat begins with the same text, its tokens are used again up to a control token at which
the text can be cut without changing other tokens (`TextTokenizer.always_found`).  The rest is tokenised.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from sft.data.chat.reading import Reading, common_length
from sft.data.chat.tokenizer import FolderTokenizer
from sft.data.chat.turns import Turn
from sft.data.rows.messages import quoted
from sft.data.template.rendering import is_of_template
from sft.data.template.sources import CONSTANT, Field, Unknown
from sft.data.tokenizer.text_tokenizer import Encoded
from sft.errors import DataError

_PRIVATE = (0xF0000, 0x10FFFE)  # Unicode planes 15 and 16: characters for private use


class TokenSpan(NamedTuple):
    """The tokens [start, end) of one message.

    end_start     index of the token that ends the turn; `end` or -1: there is none
    is_end_usual  whether this token is the one that ends such a turn at the end of a chat
    """

    message: int
    start: int
    end: int
    end_start: int = -1
    is_end_usual: bool = True


class Tokenised(NamedTuple):
    """The tokens of a rendering.

    text     the rendering
    typed    the spans (start, end) in `text` of control strings in messages, which are tokenised as plain text
    spelled  the number of these strings by (string, role of the message)
    """

    text: str
    encoded: Encoded
    typed: list[tuple[int, int]]
    spelled: Counter[tuple[str, str]]


def tokenise(reading: Reading, tokenizer: FolderTokenizer, earlier: Tokenised | None = None) -> Tokenised:
    """The tokens of a rendering.  Raises DataError if it cannot be proven that a text stays text.

    earlier: the tokens of another rendering; they are used again for the beginning that both renderings share
    """
    controls, typed, spelled = _typed(reading, tokenizer)
    num_kept, at = (0, 0) if earlier is None else _shared(earlier, reading.text, typed, tokenizer)
    rest = _tokens_from(at, reading.text, controls, typed, tokenizer)
    if earlier is not None and at:
        if rest.ids[0] == earlier.encoded.ids[num_kept]:
            rest = earlier.encoded.continued(num_kept, reading.text, at, rest)
        else:
            rest = _tokens_from(0, reading.text, controls, typed, tokenizer)
    return Tokenised(reading.text, rest, typed, spelled)


def _shared(earlier: Tokenised, text: str, typed: list[tuple[int, int]], tokenizer: FolderTokenizer) -> tuple[int, int]:
    """The number of tokens of `earlier` that can be used again, and the position in `text` after them.

    A token of `tokenizer.always_found` starts at this position.  (0, 0): no token can be used again.
    """
    shared, encoded = common_length(earlier.text, text), earlier.encoded
    for token in np.flatnonzero(tokenizer.is_always_found[encoded.ids])[::-1].tolist():
        at, name = int(encoded.starts[token]), tokenizer.always_found[int(encoded.ids[token])]
        end = at + len(name)
        if end <= shared and text.startswith(name, at):
            is_same = [span for span in typed if span[0] < end] == [span for span in earlier.typed if span[0] < end]
            return (token, at) if is_same else (0, 0)
    return 0, 0


def _tokens_from(
    at: int, text: str, controls: list[int], typed: list[tuple[int, int]], tokenizer: FolderTokenizer
) -> Encoded:
    """The tokens of text[at:].  Raises DataError if it cannot be proven that a text stays text.

    controls  the positions of all control strings of `text`
    typed     the spans of the control strings that stay text
    """
    text, num_control = text[at:], len(controls) - bisect_left(controls, at)
    typed = [(start - at, end - at) for start, end in typed if start >= at]
    masked, stand_ins = _masked(text, typed) if typed else (text, "")
    whole = tokenizer.encode(masked)
    if tokenizer.normalizes and np.count_nonzero(tokenizer.is_control[whole.ids]) > num_control - len(typed):
        raise DataError(
            f"the tokenizer of {tokenizer.name} turns ordinary characters of the chat into a control token.  Remove "
            "or change these characters."
        )
    return _without_typed(text, masked, stand_ins, whole, tokenizer) if typed else whole


def _typed(
    reading: Reading, tokenizer: FolderTokenizer
) -> tuple[list[int], list[tuple[int, int]], Counter[tuple[str, str]]]:
    """Finds the control strings of a rendering.  Raises DataError if the source of one is hidden.

    Returns the positions of all, the spans (start, end) of those that must stay text, and the numbers of the latter by
    (string, role of the message).
    """
    controls: list[int] = []
    at = 0
    typed: list[tuple[int, int]] = []
    spelled: Counter[tuple[str, str]] = Counter()
    text, runs = reading.text, reading.runs
    if not any(head in text for head in tokenizer.control_heads):
        return controls, typed, spelled
    allowed = tokenizer.habits.inside | tokenizer.assistant_control
    for match in tokenizer.control.finditer(text):
        start, end = match.span()
        controls.append(start)
        while runs[at].end <= start:
            at += 1
        if runs[at].source is CONSTANT and runs[at].end >= end:  # the template wrote it, as it writes most tokens
            continue
        sources = [run.source for run in reading.over(start, end)]
        if all(map(is_of_template, sources)):
            continue
        unknown = next((source for source in sources if isinstance(source, Unknown)), None)
        if unknown is not None:
            raise DataError(
                f"chat template {tokenizer.template.name} writes the control token {match.group()}, and "
                f"{unknown.operation} hides whether a message contains this text.  Give a template without it "
                "(data.chat_template)."
            )
        fields = [source for source in sources if isinstance(source, Field)]
        role = fields[0].role
        if match.group() in allowed and all(f.role == "assistant" for f in fields) and len(fields) == len(sources):
            continue
        spelled[match.group(), role] += 1
        typed.append(match.span())
    return controls, typed, spelled


def _masked(text: str, typed: list[tuple[int, int]]) -> tuple[str, str]:
    """The text with a repeated private character instead of each control string of `typed`, and the private characters.

    Raises DataError if the text leaves too few private characters unused.
    """
    tokens = sorted({text[start:end] for start, end in typed})
    free = list(islice((c for c in map(chr, range(*_PRIVATE)) if c not in text), len(tokens)))
    if len(free) < len(tokens):
        raise DataError(
            "the chat contains private-use characters of Unicode's planes 15 and 16.  Remove these characters."
        )
    stand_in = dict(zip(tokens, free, strict=True))
    parts, at = [], 0
    for start, end in typed:
        parts += [text[at:start], stand_in[text[start:end]] * (end - start)]
        at = end
    return "".join([*parts, text[at:]]), "".join(free)


def _without_typed(text: str, masked: str, stand_ins: str, whole: Encoded, tokenizer: FolderTokenizer) -> Encoded:
    """The tokens of `text`.  Raises DataError if the tokenizer may not keep a control string as plain text.

    masked     the text with private characters instead of control strings that stay text
    stand_ins  these private characters
    whole      the tokens of `masked`, which are used for all pieces without stand-ins
    """
    is_control = tokenizer.is_control[whole.ids]
    is_control &= [bool(tokenizer.control.match(masked[a:b].strip())) for a, b in zip(whole.starts, whole.ends)]
    edges = [-1, *np.flatnonzero(is_control).tolist(), len(whole.ids)]
    stand_in = re.compile(f"[{stand_ins}]")
    ids, offsets = [], []
    for before, after in zip(edges[:-1], edges[1:], strict=True):
        first = int(whole.ends[before]) if before >= 0 else 0
        last = int(whole.starts[after]) if after < len(whole.ids) else len(text)
        part = slice(before + 1, after)
        control = slice(after, after + 1)
        if stand_in.search(masked, first, last):
            plain = tokenizer.encode_as_text(text[first:last], masked[first:last], whole.ids[part])
            if plain is None:
                token = tokenizer.control.search(text, first, last)
                raise DataError(
                    f"the chat contains the text {token.group() if token else ''}, and the tokenizer of "
                    f"{tokenizer.name} may not keep it as plain text.  Remove or change this text."
                )
            ids.append(plain.ids)
            offsets.append(np.stack([plain.starts, plain.ends], axis=1) + first)
        else:
            ids.append(whole.ids[part])
            offsets.append(np.stack([whole.starts[part], whole.ends[part]], axis=1))
        ids.append(whole.ids[control])
        offsets.append(np.stack([whole.starts[control], whole.ends[control]], axis=1))
    starts, ends = np.concatenate(offsets).T
    return Encoded(np.concatenate(ids), lambda: (np.ascontiguousarray(starts), np.ascontiguousarray(ends)))


def find_token_spans(
    turns: Sequence[Turn], text: str, encoded: Encoded, tokenizer: FolderTokenizer, *, inserted: bool
) -> list[TokenSpan]:
    """The tokens of each turn.  Raises DataError if the tokens do not decode to the turn's text, for example because
    one token also covers text outside the turn.

    inserted: whether the tokens include the text that the template adds at the start of the turn
    """
    turns = [turn for turn in turns if (turn.start if inserted else turn.inserted) < turn.end]
    starts = [turn.start if inserted else turn.inserted for turn in turns]
    ends = [turn.end for turn in turns]
    covered = encoded.token_spans([*starts, *(turn.text_end for turn in turns)], [*ends, *ends])
    spans = []
    for number, (turn, start) in enumerate(zip(turns, starts, strict=True)):
        first, end, is_proven = covered[number]
        end_start = covered[number + len(turns)][0]
        if not is_proven:
            # A control token may cover the spaces after it, including spaces at the start of the turn (Phi-3).
            first += bool(tokenizer.is_control[encoded.ids[first]] and encoded.begins_before(first, start))
            _check_decoded(text[start : turn.end], encoded.ids[first:end], tokenizer)
        spans.append(
            TokenSpan(turn.message, first, end, end_start if turn.text_end < turn.end else end, turn.is_end_usual)
        )
    return spans


def _check_decoded(wanted: str, ids: np.ndarray, tokenizer: FolderTokenizer) -> None:
    """Raises DataError if the tokens of a turn decode to other text.  Spaces at both ends may differ."""
    decoded = tokenizer.decode(ids)
    if decoded != wanted and decoded.strip() not in (wanted.strip(), tokenizer.normalize(wanted).strip()):
        raise DataError(
            f"the tokenizer of {tokenizer.name} turns an assistant turn into other text: {quoted(wanted)} became "
            f"{quoted(decoded)}.  The tokenizer cannot represent this turn, or merges it with the text around it."
        )
