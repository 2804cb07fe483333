"""A loss far above the ones before it, told while the run goes on.

Not a reason to stop: a batch may be hard.  But three in a row at 1M tokens are a night lost, and nobody reads a curve
at night; so it is a line in the log that can be searched for.
"""

import statistics
from collections import deque

WINDOW = 64  # steps
FEWEST = 16  # before which nothing is called usual
SIGMAS = 6.0
_SPREAD = 1.4826  # median distance from the median -> standard deviation, of normal values


class LossSpikes:
    """Compares each loss with the median of the last 64; robust, so that one spike does not hide the next."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def check(self, loss: float) -> str | None:
        """What to say of the next loss; None where it is as usual.

        63 losses of 2.0 to 2.1, then 4.0 -> "4.0000, usual is 2.0500 +- 0.0383"
        """
        usual = list(self._losses)
        self._losses.append(loss)
        if len(usual) < FEWEST:
            return None
        middle = statistics.median(usual)
        spread = _SPREAD * statistics.median(abs(one - middle) for one in usual)
        if loss - middle <= SIGMAS * max(spread, 0.01 * abs(middle)):
            return None
        return f"{loss:.4f}, usual is {middle:.4f} +- {spread:.4f}"
