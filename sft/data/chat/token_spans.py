"""Which tokens stand for a turn of the rendered text, and the proof that they, and they alone, decode to it.

Does not decide where turns stand (`turns.py`).  Two ways, the second where the first proves nothing:

by counting    control tokens stand in the text and among the ids in the same order; a turn ends with one and begins
               some words after another: `<|im_start|>` `assistant\\n` `6` ` is` ` right` `<|im_end|>`.  The words' own
               tokens are counted, and the ids that follow must decode to exactly the turn.
by characters  the tokenizer says which characters each token covers.  Slower, but it also finds a turn whose first
               word and the space before it are one token; what they decode to may differ from the turn in such spaces.
"""

from typing import NamedTuple

import numpy as np

from sft.data.chat.render import RenderedChat
from sft.data.chat.tokenizer import Encoded, FolderTokenizer
from sft.data.chat.turns import Turn, quoted
from sft.errors import DataError

_MAX_WORDS = 200  # characters between a control token and a turn; a longer text is no header


class TokenSpan(NamedTuple):
    """Tokens [start, end) that come from one message."""

    message: int
    start: int
    end: int


def find_token_spans(turns: list[Turn], chat: RenderedChat, encoded: Encoded) -> list[TokenSpan]:
    """The tokens of each turn of a chat that was encoded.  Raises DataError where they do not decode to the turn."""
    if not turns:
        return []
    ids, text, tokenizer = encoded.ids, chat.text, chat.tokenizer
    controls = np.flatnonzero(tokenizer.is_control[ids])
    ends = tokenizer.delimiters.ends
    positions = {end: controls[ids[controls] == tokenizer.ids[end]] for end in ends}
    counts, counted_to = dict.fromkeys(ends, 0), 0  # how often each stands in the text so far
    spans = []
    for turn in turns:
        wanted = chat.escaped.restore(text[turn.start : turn.end])
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
    """The tokens of the turn that ends with the token ids[last] and reads `wanted`."""
    tokenizer, text = chat.tokenizer, chat.text
    previous = int(np.searchsorted(controls, last)) - 1
    # Most turns hold no control token but their end; those of a tool call may.
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
        # A space at the end of the words may be split from them when other text follows.
        for count in (expected, expected + 1, expected - 1):
            if tokenizer.decode(ids[opening + 1 + count : last + 1]) == wanted:
                tokenizer.counts[words] = count
                return opening + 1 + count, last + 1
    return None


def _by_characters(turn: Turn, wanted: str, encoded: Encoded, tokenizer: FolderTokenizer) -> tuple[int, int]:
    first, end = encoded.token_span(turn.start, turn.end)
    # A control token may swallow the spaces after it, those that the turn begins with too (Phi-3).
    first += bool(tokenizer.is_control[encoded.ids[first]] and encoded.starts[first] < turn.start)
    decoded = tokenizer.decode(encoded.ids[first:end]).strip()
    if decoded != wanted.strip() and decoded != tokenizer.normalize(wanted).strip():
        raise DataError(
            f"the tokenizer of {tokenizer.name} turns an assistant turn into other text: {quoted(wanted)} "
            f"became {quoted(decoded)}.  It cannot express this turn, or joins it with the text around it."
        )
    return first, end
