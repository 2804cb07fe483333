"""Which tokens stand for a turn of the rendered text, and the proof that they, and they alone, decode to it.

Does not decide where turns stand (`turns.py`).  Two ways, the second where the first proves nothing:

by counting    control tokens stand in the text and among the ids in the same order; a turn ends with one and begins
               some words after another: `<|im_start|>` `assistant\\n` `6` ` is` ` right` `<|im_end|>`.  The words' own
               tokens are counted, and the ids that follow must decode to exactly the turn.
by characters  the tokenizer tells which characters each token covers.  Slower, but it also finds a turn whose first
               word and the space before it are one token; what they decode to may differ from the turn in such spaces.
"""

import numpy as np

from sft.data.chat.escaping import Typed
from sft.data.chat.tokenizer import Encoded, FolderTokenizer
from sft.data.chat.turns import Turn, quoted
from sft.errors import DataError

_MAX_WORDS = 200  # characters between a control token and a turn; a longer text is no header


def tokens_of(
    turns: list[Turn], masked: str, encoded: Encoded, typed: Typed, tokenizer: FolderTokenizer
) -> list[tuple[int, int]]:
    """First token and the one after the last of each turn of the text `masked`, whose stand-ins are `typed`.

    Raises DataError where the tokens do not decode to the turn.
    """
    found = []
    ids = encoded.ids
    controls = np.flatnonzero(tokenizer.is_control[ids])
    places = {end: controls[ids[controls] == tokenizer.ids[end]] for end in tokenizer.frame.ends}
    counted, position = dict.fromkeys(tokenizer.frame.ends, 0), 0
    for turn in turns:
        text = typed.restore(masked[turn.start : turn.end])
        end = max((end for end in tokenizer.frame.ends if text.endswith(end)), key=len)
        for token in counted:
            counted[token] += masked.count(token, position, turn.end - len(end))
        position = turn.end - len(end)
        span = None
        if counted[end] < len(places[end]):
            last = int(places[end][counted[end]])
            span = _by_counting(turn, text, masked, ids, controls, last, tokenizer)
        if span is None:
            first, after = encoded.cover(turn.start, turn.end)
            # A control token may swallow the spaces after it, those that the turn begins with too (Phi-3).
            span = first + bool(tokenizer.is_control[ids[first]] and encoded.starts[first] < turn.start), after
            _verify(text, ids[slice(*span)], tokenizer)
        found.append(span)
    return found


def _by_counting(
    turn: Turn, text: str, masked: str, ids: np.ndarray, controls: np.ndarray, last: int, tokenizer: FolderTokenizer
) -> tuple[int, int] | None:
    """The tokens of a turn that ends with the token ids[last]."""
    previous = int(np.searchsorted(controls, last)) - 1
    # Most turns hold no control token but their end; those of a tool call may.
    for inside in (0, None):
        if inside is None:
            previous -= len(tokenizer.control.findall(masked, turn.start, turn.end)) - 1
        if previous < 0:
            return None
        opening = int(controls[previous])
        name = tokenizer.control_names[int(ids[opening])]
        words = masked[masked.rfind(name, 0, turn.start) + len(name) : turn.start]
        if len(words) > _MAX_WORDS:
            continue
        expected = tokenizer.count(words)
        # A space at the end of the words may be split from them when other text follows.
        for count in (expected, expected + 1, expected - 1):
            if tokenizer.decode(ids[opening + 1 + count : last + 1]) == text:
                tokenizer.counts[words] = count
                return opening + 1 + count, last + 1
    return None


def _verify(text: str, ids: np.ndarray, tokenizer: FolderTokenizer) -> None:
    decoded = tokenizer.decode(ids).strip()
    if decoded != text.strip() and decoded != tokenizer.normalize(text).strip():
        raise DataError(
            f"the tokenizer of {tokenizer.name} turns an assistant turn into other text: {quoted(text)} "
            f"became {quoted(decoded)}.  It cannot express this turn, or joins it with the text around it."
        )
