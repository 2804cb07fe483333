"""The best checkpoint of a run, and what its value may be compared with.

Values compare only if metric, direction and held-out set are the same.  So a `Best` carries all of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sft.parallel.messages import message

_NOT_RECORDED = ""  # the metric of a value from a version that recorded neither metric nor held-out set


@message
@dataclass(frozen=True, kw_only=True)
class Best:
    """The best checkpoint of a run so far, and the metric that decides.  All values are JSON types."""

    metric: str  # checkpoint.keep_best: held-out set and metric
    lower_is_better: bool
    data: str  # digest of the held-out set
    documents: int  # of the held-out set
    step: int | None = None  # None: no checkpoint was compared yet
    value: float | None = None

    @staticmethod
    def read(stored: Mapping[str, Any]) -> "Best | None":
        """The best checkpoint in the state of a checkpoint; None if the run compared none.

        Earlier versions stored `best_step` and `best_value` alone.
        """
        if (step := stored.get("best_step")) is not None:
            value = stored["best_value"]
            return Best(metric=_NOT_RECORDED, lower_is_better=True, data="", documents=0, step=step, value=value)
        best = stored.get("best")
        return None if best is None else Best(**best)

    def judged(self, step: int, value: float) -> "Best":
        """This record with the checkpoint of `step` as the best one, if no earlier one is as good."""
        is_better = self.value is None or (value < self.value if self.lower_is_better else value > self.value)
        return replace(self, step=step, value=value) if is_better else self

    def differences(self, now: "Best") -> Iterator[str]:
        """Reasons, as phrases, for which values of `now` do not compare with this value."""
        if self.metric == _NOT_RECORDED:
            yield "an earlier version recorded the best value without its metric and its held-out set"
            return
        if self.metric != now.metric:
            yield f"checkpoint.keep_best was {self.metric}, is {now.metric}"
        elif self.lower_is_better != now.lower_is_better:
            yield f"another direction of {now.metric} counts as better"
        if self.data != now.data:
            yield f"the held-out set of {now.metric} has changed ({self.documents:,} documents, now {now.documents:,})"

    def __str__(self) -> str:
        return f"step {self.step}, {self.metric or 'value'} {self.value}"
