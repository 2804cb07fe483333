"""Recognises a loss spike: a loss far above those of the steps before, reported while the run goes on.

A loss spike is no reason to stop, because a batch may be hard.  But three in a row at 1M tokens cost a night, and
nobody watches a curve at night.  So each is a line in the log that can be searched for.
"""

import statistics
from collections import deque

WINDOW = 64  # steps
MIN_STEPS = 16  # with fewer losses before it, a loss is not judged
SIGMAS = 6.0
_SPREAD = 1.4826  # median distance from the median -> standard deviation, of normal values


class LossSpikes:
    """Compares each loss with the median of the last 64.

    Median and spread are robust: one loss spike does not hide the next.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def check(self, loss: float) -> str | None:
        """A description of the next loss where it is a loss spike, else None.

        63 losses of 2.0 to 2.1, then 4.0 -> "4.0000, usual is 2.0500 +- 0.0383"
        """
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < MIN_STEPS:
            return None
        middle = statistics.median(before)
        spread = _SPREAD * statistics.median(abs(earlier - middle) for earlier in before)
        if loss - middle <= SIGMAS * max(spread, 0.01 * abs(middle)):
            return None
        return f"{loss:.4f}, usual is {middle:.4f} +- {spread:.4f}"
