"""The longest context that fits, by trying: a search over lengths that starts where the equations say.

Decides which length is tried next and when to stop.  The caller decides what a try is: tools/bench/longest.py gives
each a process of its own, so that one that runs out of memory leaves nothing behind for the next.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

FIRST = 0.05  # of the predicted length: how far the second try is from the first; each further one twice as far
TOLERANCE = 0.02  # between the longest that fits and the shortest that does not
TRIES = 12


@dataclass
class Search:
    """What is known of one model."""

    predicted: int
    fits: int = 0  # tokens, the longest that was tried and fits; 0: none
    fails: int | None = None  # the shortest that does not
    tried: list[tuple[int, bool]] = field(default_factory=list)
    stopped: str | None = None  # why the search ended before it was sure

    @property
    def ratio(self) -> float | None:
        """Of the predicted length; None where nothing is predicted to fit."""
        return self.fits / self.predicted if self.predicted else None


class Stopped(Exception):
    """A try that says nothing about memory."""


def search(predicted: int, fits: Callable[[int], bool], grain: int) -> Search:
    """The longest multiple of `grain` that fits, to within TOLERANCE.

    fits  whether a step of so many tokens fits; Stopped where that cannot be known
    """
    state, step = Search(predicted=predicted), FIRST
    length = _whole(predicted, grain)
    while len(state.tried) < TRIES:
        try:
            is_fitting = fits(length)
        except Stopped as error:
            state.stopped = str(error)
            return state
        state.tried.append((length, is_fitting))
        if is_fitting:
            state.fits = length  # every try is above what fits, and below what does not
        else:
            state.fails = length
        if state.fails is not None and state.fails - state.fits <= max(grain, TOLERANCE * state.fits):
            return state
        length, step = _next(state, step, grain)
    state.stopped = f"{TRIES} tries"
    return state


def _next(state: Search, step: float, grain: int) -> tuple[int, float]:
    """Further up while all fit, further down while none does, then the middle."""
    if state.fails is None:
        return _whole(max(state.fits * (1 + step), state.fits + grain), grain), 2 * step
    if not state.fits:
        return _whole(state.fails * max(0.1, 1 - step), grain), 2 * step
    return _whole((state.fits + state.fails) / 2, grain), step


def _whole(length: float, grain: int) -> int:
    return max(grain, int(length) // grain * grain)
