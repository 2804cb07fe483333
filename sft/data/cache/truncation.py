"""Applies data.over_long to a sample that is too long: an error, no sample, its first turns, or several windows.

Decides which tokens of the sample each excerpt contains, and which tokens of an excerpt are supervised.  Reads only
weights.  Here, a turn is a run of tokens with weights above 0, so chats and rows of token ids are treated alike.  A
plain text has no turns and is split anywhere.  `row_report.py` counts lost tokens.

An excerpt of a chat ends where a turn ends.  Only a turn longer than a window is split.  The following windows
supervise the rest of the turn and its end-of-turn token, so no policy removes the end of a turn.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from sft.errors import DataError
from sft.parallel.alignment import aligned

OverLong = Literal["error", "drop", "cut_turns", "windows"]

# A window with a part of a turn repeats the prompt in at most 1/2 of its tokens, and the tokens before the part in 1/8.
# So at least 3/8 of its tokens are new.
_PROMPT = 2
_CONTEXT = 8


class Excerpt(NamedTuple):
    """A sample made of some tokens of a longer sample: positions of the tokens in the longer sample, and new weights.

    positions  int64 [m], rising
    weights    float32 [m], for each token 0 or its weight in the longer sample
    """

    positions: np.ndarray
    weights: np.ndarray


NOTHING = Excerpt(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))


def excerpts(
    weights: np.ndarray, *, seq_length: int, doc_multiple: int, over_long: OverLong, num_before: int | None = None
) -> list[Excerpt]:
    """The excerpts of a sample: the sample itself if it fits after padding, else the excerpts by `over_long`, if any.

    12 tokens, 4 to 5 and 8 to 11 supervised, seq_length 8, doc_multiple 1
        drop       nothing
        cut_turns  0 1 2 3 [4 5]
        windows    0 1 2 3 [4 5]      2 3 6 7 [8 9 10 11]
    The numbers are positions, [] encloses supervised ones.  The second window repeats 2 3, the end of the prompt.

    weights     float32 [n], the weight of each token of the sample in the loss
    num_before  number of tokens that the tokenizer puts before a plain text (BOS); every window repeats them.  None:
                the sample has turns, and windows repeat tokens before the first turn
    Raises DataError with the sizes for over_long = error, and for cut_turns if the sample is a plain text.
    """
    whole = Excerpt(np.arange(len(weights)), weights)
    if aligned(len(weights), doc_multiple) <= seq_length:
        return [whole]
    capacity = seq_length // doc_multiple * doc_multiple  # the longest sample that fits
    need = aligned(len(weights), doc_multiple)
    match over_long:
        case "error":
            raise DataError(
                f"{len(weights):,} tokens ({need:,} when padded to a multiple of {doc_multiple}) do not fit "
                f"data.seq_length = {seq_length}.  Raise data.seq_length to {need}, or set data.over_long to drop, "
                "cut_turns or windows (lost tokens are counted)."
            )
        case "drop":
            return []
        case "cut_turns" if num_before is not None:
            raise DataError(
                f"a text of {len(weights):,} tokens ({need:,} when padded to a multiple of {doc_multiple}) does not "
                f"fit data.seq_length = {seq_length}, and data.over_long = cut_turns finds no turns in a text.  Set "
                "data.over_long to windows, which splits the text, or to drop."
            )
        case "cut_turns":
            ends = [stop for _, stop in turns(weights) if stop <= capacity]
            return [Excerpt(whole.positions[: ends[-1]], weights[: ends[-1]])] if ends else []
        case "windows":
            spans = turns(weights)
            prompt = num_before if num_before is not None else spans[0][0] if spans else 0
            return [_excerpt(window, weights, prompt) for window in _windows(spans, prompt, len(weights), capacity)]


def turns(weights: np.ndarray) -> list[tuple[int, int]]:
    """The start and the end of every run of supervised tokens.  The first token of a sample is never supervised.

    weights 1 0 1 1 0 0.5  ->  (2, 4), (5, 6)
    """
    supervised = np.concatenate([[False, False], weights[1:] > 0, [False]])
    edges = np.flatnonzero(supervised[1:] != supervised[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class _Window(NamedTuple):
    """A window: the last `head` tokens of the prompt, then tokens start to stop, which are supervised from `new` on."""

    head: int
    start: int
    new: int
    stop: int

    @property
    def size(self) -> int:
        return self.head + self.stop - self.start


def _excerpt(window: _Window, weights: np.ndarray, prompt: int) -> Excerpt:
    positions = np.concatenate([np.arange(prompt - window.head, prompt), np.arange(window.start, window.stop)])
    learnt = np.where(positions >= window.new, weights[positions], np.float32(0))
    return Excerpt(positions, learnt.astype(np.float32))


def _windows(spans: list[tuple[int, int]], prompt: int, length: int, capacity: int) -> Iterator[_Window]:
    """Windows of at most `capacity` tokens.  Exactly one of them supervises each supervised label.

    A window takes turns while they fit, each with all tokens since the previous turn.  The next window repeats the last
    tokens of the prompt, and then continues where the previous window stopped.  The first token after this gap is
    not supervised, so no label is predicted across the gap.
    """
    if not spans or capacity < 2:  # a label needs a previous token
        return
    last, previous = None, 0
    for first, stop in spans:
        if last is not None and last.size + stop - previous <= capacity:
            last = last._replace(stop=stop)
        else:
            if last is not None:
                yield last
            *full, last = _turn(first, stop, capacity, prompt=prompt, between=first - previous)
            yield from full
        previous = stop
    assert last is not None
    tail = length - last.stop  # the tokens after the last turn, often a newline, belong to the last window if they fit
    yield last._replace(stop=last.stop + tail) if last.size + tail <= capacity else last


def _turn(first: int, stop: int, capacity: int, *, prompt: int, between: int) -> list[_Window]:
    """The windows of a turn that begins a new window.

    A turn that leaves an eighth of the window for context stays whole.  If the prompt and the messages before the turn
    do not fit into the rest of the window, their beginnings are left out.  A longer turn is split.  The window of every
    part but the first repeats the tokens before the part, an eighth of a window, as context.

    prompt   number of tokens before the first turn of the sample
    between  number of tokens between the previous turn and this turn
    """
    overlap = max(1, capacity // _CONTEXT)
    replayed = min(prompt, capacity // _PROMPT) if first > prompt else 0  # the first turn directly follows the prompt
    fits = stop - first + overlap <= capacity
    context = capacity - (stop - first) if fits else min(capacity - 1, capacity // _PROMPT + overlap)
    before = min(between, max(context - replayed, (context + 1) // 2))
    head = min(replayed, context - before)
    windows = [_Window(head, first - before, first, min(stop, first + capacity - head - before))]
    head = min(prompt, capacity // _PROMPT, capacity - overlap - 1)
    while windows[-1].stop < stop:
        new = windows[-1].stop
        windows.append(_Window(head, new - overlap, new, min(stop, new + capacity - head - overlap)))
    return windows
