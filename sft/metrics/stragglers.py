"""Names a rank that is slower than the others for many steps in a row: a throttled GPU, a bad link, a busy host.

A step takes as long on every rank, because ranks wait for each other.  The time of the passes (forward and backward, up
to the sum of gradients over ranks) differs: data-parallel ranks do not wait for each other in it.  Ranks of tp, cp and
pp do, so all ranks of a slow group look slow, and the first of the slowest is named.
"""

from sft.metrics.totals import StepResult

_LEAD = 1.1  # passes of this many times the median are slow
_WAIT_SHARE = 0.1  # of a step: a longer wait for data is slow
_STEPS = 10  # in a row with the same slow rank, before it is named; packs of unequal work change the slowest rank
_REPEAT = 100  # steps after which it is named again


class Stragglers:
    """Gets the result of each step, and returns a line that names a rank if it was slow in `_STEPS` steps in a row."""

    def __init__(self) -> None:
        self._slow: dict[str, tuple[int, int]] = {}  # part of a step -> (slow rank, steps in a row)

    def after(self, result: StepResult, seconds: float) -> str | None:
        """A line about the slowest rank of the step, which took `seconds`; None if there is nothing to say."""
        passes, wait = result.passes_s, result.data_wait_s
        is_slow = passes.median > 0.0 and passes.value >= _LEAD * passes.median
        if self._is_due("passes", passes.rank if is_slow else None):
            lead = passes.value / passes.median
            return (
                f"WARNING: rank {passes.rank} is slow: its passes took {passes.value:.2f} s, {lead:.2f} times the "
                f"median of all ranks ({passes.median:.2f} s), and it was the slowest in {_STEPS} steps in a row"
            )
        if self._is_due("data", wait.rank if wait.value >= _WAIT_SHARE * seconds else None):
            return (
                f"WARNING: rank {wait.rank} waits for data: {wait.value:.2f} s of a step of {seconds:.2f} s, and its "
                f"wait was the longest in {_STEPS} steps in a row.  A faster disk, or data.cache_dir on one, helps"
            )
        return None

    def _is_due(self, part: str, rank: int | None) -> bool:
        before, steps = self._slow.get(part, (None, 0))
        steps = steps + 1 if rank is not None and rank == before else int(rank is not None)
        if rank is None:
            self._slow.pop(part, None)
        else:
            self._slow[part] = (rank, steps)
        return steps >= _STEPS and (steps - _STEPS) % _REPEAT == 0
