"""Finds the tokens of a rendered chat and of each of its turns, and proves that a turn's tokens decode to the turn.

`tokenise` makes ids of the real text.  It treats the text between two control tokens of the template as plain text.
`find_token_spans` finds the tokens of a turn in two ways.  It uses the second way if the first proves nothing:

by counting    Control tokens have the same order in the text and among the ids.  A turn ends with a control token and
               begins some words after another: `<|im_start|>` `assistant\\n` `6` ` is` ` right` `<|im_end|>`.  The
               tokens of these words are counted.  The ids after them must decode to exactly the turn.
by characters  The tokenizer says which characters each token covers.  This way is slower, but also finds a turn whose
               first word forms one token with the space before it.  Decoded text may differ from the turn in spaces.

`turns.py` finds the characters of turns.
"""

import re
from typing import NamedTuple

import numpy as np

from sft.data.chat.messages import quoted
from sft.data.chat.render import RenderedChat
from sft.data.chat.tokenizer import Encoded, FolderTokenizer
from sft.data.chat.turns import Turn
from sft.errors import DataError

_MAX_WORDS = 200  # largest length of a header, the text between a control token and a turn, in characters


class TokenSpan(NamedTuple):
    """Tokens [start, end) that come from one message."""

    message: int
    start: int
    end: int


def tokenise(chat: RenderedChat) -> Encoded:
    """Tokens of the real text, in which typed control strings are plain text.  Raises DataError if no proof exists that
    the tokenizer keeps them as text."""
    text, tokenizer = chat.text, chat.tokenizer
    whole = tokenizer.encode(text)
    is_control = tokenizer.is_control[whole.ids]
    if tokenizer.normalizes and np.count_nonzero(is_control) > len(tokenizer.control.findall(text)):
        raise DataError(
            f"the tokenizer of {tokenizer.name} turns ordinary characters of the chat into a control token.  Remove "
            "or change these characters."
        )
    if not chat.stand_ins:
        return whole
    is_control &= [bool(tokenizer.control.match(text[a:b].strip())) for a, b in zip(whole.starts, whole.ends)]
    edges = [-1, *np.flatnonzero(is_control).tolist(), len(whole.ids)]
    stand_in = re.compile("[" + "".join(chat.stand_ins) + "]")
    ids, offsets = [], []
    for before, after in zip(edges[:-1], edges[1:], strict=True):
        first = int(whole.ends[before]) if before >= 0 else 0
        last = int(whole.starts[after]) if after < len(whole.ids) else len(text)
        part = slice(before + 1, after)
        control = slice(after, after + 1)
        if stand_in.search(text, first, last):
            plain = tokenizer.encode_as_text(chat.real_text[first:last], text[first:last], whole.ids[part])
            if plain is None:
                raise DataError(
                    f"the chat contains the text {next(iter(chat.stand_ins.values()))}, and the tokenizer of "
                    f"{tokenizer.name} may not keep it as plain text.  Remove or change this text."
                )
            ids.append(plain.ids)
            offsets.append(np.stack([plain.starts, plain.ends], axis=1) + first)
        else:
            ids.append(whole.ids[part])
            offsets.append(np.stack([whole.starts[part], whole.ends[part]], axis=1))
        ids.append(whole.ids[control])
        offsets.append(np.stack([whole.starts[control], whole.ends[control]], axis=1))
    return Encoded(np.concatenate(ids), lambda: np.concatenate(offsets).reshape(-1))


def find_token_spans(turns: list[Turn], chat: RenderedChat, encoded: Encoded) -> list[TokenSpan]:
    """The tokens of each turn of an encoded chat.  Raises DataError if the tokens do not decode to the turn."""
    if not turns:
        return []
    ids, text, tokenizer = encoded.ids, chat.text, chat.tokenizer
    controls = np.flatnonzero(tokenizer.is_control[ids])
    ends = tokenizer.delimiters.ends
    positions = {end: controls[ids[controls] == tokenizer.ids[end]] for end in ends}
    counts, counted_to = dict.fromkeys(ends, 0), 0  # occurrences of each end token in the text so far
    spans = []
    for turn in turns:
        wanted = chat.real_text[turn.start : turn.end]
        end = max((end for end in ends if wanted.endswith(end)), key=len)
        for token in counts:
            counts[token] += text.count(token, counted_to, turn.end - len(end))
        counted_to = turn.end - len(end)
        span = None
        if counts[end] < len(positions[end]):
            last = int(positions[end][counts[end]])
            span = _by_counting(turn, wanted, chat, ids, controls, last)
        if span is None:
            span = _by_characters(turn, wanted, encoded, tokenizer)
        spans.append(TokenSpan(turn.message, *span))
    return spans


def _by_counting(
    turn: Turn, wanted: str, chat: RenderedChat, ids: np.ndarray, controls: np.ndarray, last: int
) -> tuple[int, int] | None:
    """The tokens of the turn that ends with token ids[last], if they decode to `wanted`."""
    tokenizer, text = chat.tokenizer, chat.text
    previous = int(np.searchsorted(controls, last)) - 1
    # Most turns have only one control token, their end.  Turns with a tool call may contain others.
    for inside in (0, None):
        if inside is None:
            previous -= len(tokenizer.control.findall(text, turn.start, turn.end)) - 1
        if previous < 0:
            return None
        opening = int(controls[previous])
        name = tokenizer.control_names[int(ids[opening])]
        words = text[text.rfind(name, 0, turn.start) + len(name) : turn.start]
        if len(words) > _MAX_WORDS:
            continue
        expected = tokenizer.count(words)
        # A space at the end of the words may become a separate token when other text follows.
        for count in (expected, expected + 1, expected - 1):
            if tokenizer.decode(ids[opening + 1 + count : last + 1]) == wanted:
                tokenizer.counts[words] = count
                return opening + 1 + count, last + 1
    return None


def _by_characters(turn: Turn, wanted: str, encoded: Encoded, tokenizer: FolderTokenizer) -> tuple[int, int]:
    first, end = encoded.token_span(turn.start, turn.end)
    # A control token may cover the spaces after it, including spaces at the start of the turn (Phi-3).
    first += bool(tokenizer.is_control[encoded.ids[first]] and encoded.starts[first] < turn.start)
    decoded = tokenizer.decode(encoded.ids[first:end]).strip()
    if decoded != wanted.strip() and decoded != tokenizer.normalize(wanted).strip():
        raise DataError(
            f"the tokenizer of {tokenizer.name} turns an assistant turn into other text: {quoted(wanted)} became "
            f"{quoted(decoded)}.  The tokenizer cannot represent this turn, or merges it with the text around it."
        )
    return first, end
