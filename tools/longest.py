"""The longest context that fits, by trying: a search over lengths that starts where the equations say.

Decides which length is tried next and when to stop.  What a try is, is the caller's: bench_step gives each a process of
its own, so that one that runs out of memory leaves nothing behind for the next.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

FIRST = 0.05  # of the predicted length: how far the second try is from the first; each further one twice as far
TOLERANCE = 0.02  # between the longest that fits and the shortest that does not
TRIES = 12


@dataclass
class Found:
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


def search(predicted: int, fits: Callable[[int], bool], grain: int) -> Found:
    """The longest multiple of `grain` that fits, to within TOLERANCE.

    fits  whether a step of so many tokens fits; Stopped where that cannot be told
    """
    found, step = Found(predicted=predicted), FIRST
    length = _whole(predicted, grain)
    while len(found.tried) < TRIES:
        try:
            ok = fits(length)
        except Stopped as error:
            found.stopped = str(error)
            return found
        found.tried.append((length, ok))
        if ok:
            found.fits = length  # every try is above what fits, and below what does not
        else:
            found.fails = length
        if found.fails is not None and found.fails - found.fits <= max(grain, TOLERANCE * found.fits):
            return found
        length, step = _next(found, step, grain)
    found.stopped = f"{TRIES} tries"
    return found


def _next(found: Found, step: float, grain: int) -> tuple[int, float]:
    """Further up while all fit, further down while none does, then the middle."""
    if found.fails is None:
        return _whole(max(found.fits * (1 + step), found.fits + grain), grain), 2 * step
    if not found.fits:
        return _whole(found.fails * max(0.1, 1 - step), grain), 2 * step
    return _whole((found.fits + found.fails) / 2, grain), step


def _whole(length: float, grain: int) -> int:
    return max(grain, int(length) // grain * grain)
