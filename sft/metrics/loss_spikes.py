"""Detects a loss spike: a loss far above the losses of earlier steps.

A loss spike does not end a run, because a batch of difficult samples may cause it.  But with packs of 1M tokens, three
loss spikes in a row cost a night of training.  So the log has a warning for each loss spike.
"""

import statistics
from collections import deque

WINDOW = 64  # steps
MIN_STEPS = 16  # a loss with fewer earlier losses is not checked
SIGMAS = 6.0
_SPREAD = 1.4826  # standard deviation divided by median absolute deviation, in a normal distribution


class LossSpikes:
    """Compares each loss with the median of the 64 losses before it.

    The spread is computed from the median absolute deviation, so one loss spike does not hide the next.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def check(self, loss: float) -> str | None:
        """A description of the next loss if it is a loss spike, else None.

        63 losses of 2.0 to 2.1, then 4.0 -> "4.0000, the median of earlier losses is 2.0500 +- 0.0383"
        """
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < MIN_STEPS:
            return None
        middle = statistics.median(before)
        spread = _SPREAD * statistics.median(abs(earlier - middle) for earlier in before)
        if loss - middle <= SIGMAS * max(spread, 0.01 * abs(middle)):
            return None
        return f"{loss:.4f}, the median of earlier losses is {middle:.4f} +- {spread:.4f}"
