"""Fills a question with text up to a number of tokens, and places its evidence at a depth.

The number of passages is found by measuring: the message is rendered and tokenised, and passages are added or removed
until one more would exceed the length.  The first line of the evidence comes at the depth; further lines at random
positions behind it, in their order.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.long.asking import Asked, ask
from sft.data.long.draws import Draws
from sft.data.long.tasks import Puzzle, puzzle

_FIRST_GUESS = 32  # passages
_PARTS = 1 << 32  # positions are multiples of 1 / _PARTS


class Bin(NamedTuple):
    """The questions of one task, length and depth.

    length  largest number of tokens of a question with its answer
    depth   0: the first evidence is at the beginning of the text; 1: at its end
    """

    task: str
    length: int
    depth: float


class Question(NamedTuple):
    """A question with its tokens.

    number    index of the question in its bin
    content   the user's message
    answer    the assistant's message
    tokens    int32 [n], the prompt and the answer, without the token that ends the turn
    start     index of the answer's first token, which is the number of tokens of the prompt
    evidence  index of the first token of each line of evidence
    """

    bin: Bin
    number: int
    content: str
    answer: str
    tokens: np.ndarray
    start: int
    evidence: tuple[int, ...]


def compose(of: Bin, number: int, seed: int, tokenizer: ChatTokenizer) -> Question | None:
    """Question `number` of a bin; None if the evidence alone is longer than the bin's length.

    tokenizer: as returned by `without_thinking`
    Raises the errors of `ask`.
    """
    draws = Draws(f"{seed}/{of.task}/{of.length}/{of.depth:g}/{number}")
    asked = puzzle(of.task, draws)
    lines = _positions(draws, of, asked)
    made: dict[int, Asked] = {}

    def size(count: int) -> int:
        made[count] = ask(_text(asked, lines, count), asked.answer, asked.evidence, tokenizer)
        return len(made[count].tokens)

    count = _most(size, of.length)
    if count is None:
        return None
    tokens, start, evidence = made[count]
    return Question(of, number, _text(asked, lines, count), asked.answer, tokens, start, tuple(evidence))


def _positions(draws: Draws, of: Bin, asked: Puzzle) -> list[tuple[float, str]]:
    """The lines between the passages and their positions, from 0 (before all passages) to 1 (after them), in order."""

    def between(first: float) -> float:
        return first + (1 - first) * draws.below(_PARTS) / _PARTS

    behind = sorted(between(of.depth) for _ in asked.evidence[1:])
    lines = [*zip([of.depth, *behind], asked.evidence), *((between(0), line) for line in asked.others)]
    return sorted(lines, key=lambda line: line[0])  # stable, so evidence at one position keeps its order


def _text(asked: Puzzle, lines: list[tuple[float, str]], count: int) -> str:
    """The user's message with `count` passages."""
    parts, first = [asked.opening], 0
    for position, line in lines:
        stop = int(position * count)
        parts += [*(asked.filler(i) for i in range(first, stop)), line]
        first = stop
    return "\n".join([*parts, *(asked.filler(i) for i in range(first, count)), asked.question])


def _most(size: Callable[[int], int], length: int) -> int | None:
    """The number of passages with which the question has at most `length` tokens, such that a passage of average length
    would exceed it; None if the question is longer without a passage.

    size: returns the number of tokens with a number of passages
    """
    empty = size(0)
    if empty > length:
        return None
    low, high, guess = 0, length, _FIRST_GUESS  # a passage has at least one token
    while True:
        tokens = size(guess)
        mean = (tokens - empty) / guess
        low, high = (guess, high) if tokens <= length else (low, guess)
        if high - low <= 1 or 0 <= length - tokens < mean:
            return low
        guess = min(max(guess + math.floor((length - tokens) / mean), low + 1), high - 1)
