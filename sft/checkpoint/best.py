"""Describes the best checkpoint of a run, and decides which values may be compared with its value.

Two values may be compared only if metric, direction, held-out set and the weights of tokens are equal.  So a `Best`
records all of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sft.parallel.messages import message

_NOT_RECORDED = ""  # stands for the metric of a checkpoint of an old version, which recorded only the value


@message
@dataclass(frozen=True, kw_only=True)
class Best:
    """The best checkpoint of a run so far, and the metric by which it is the best.  All values are JSON types."""

    metric: str  # checkpoint.keep_best: held-out set and metric
    lower_is_better: bool
    data: str  # digest of the held-out set
    documents: int  # number of documents in the held-out set
    loss: str = _NOT_RECORDED  # the settings that weigh tokens; not recorded by earlier versions
    step: int | None = None  # step of the best checkpoint; None: no checkpoint was compared yet
    value: float | None = None  # value of the metric at this step

    @staticmethod
    def read(stored: Mapping[str, Any]) -> "Best | None":
        """The record of the best checkpoint in `stored`, the state of a checkpoint; None if it has no record.

        Earlier versions stored only `best_step` and `best_value`.
        """
        if (step := stored.get("best_step")) is not None:
            value = stored["best_value"]
            return Best(metric=_NOT_RECORDED, lower_is_better=True, data="", documents=0, step=step, value=value)
        best = stored.get("best")
        return None if best is None else Best(**best)

    def judged(self, step: int, value: float) -> "Best":
        """The record after the checkpoint of `step` was compared.  If both values are equal, the earlier one stays."""
        is_better = self.value is None or (value < self.value if self.lower_is_better else value > self.value)
        return replace(self, step=step, value=value) if is_better else self

    def differences(self, now: "Best") -> Iterator[str]:
        """The reasons why values under the settings of `now` cannot be compared with this value, one phrase each."""
        if self.metric == _NOT_RECORDED:
            yield "an earlier version recorded the best value without its metric and its held-out set"
            return
        if self.metric != now.metric:
            yield f"checkpoint.keep_best was {self.metric}, is {now.metric}"
        elif self.lower_is_better != now.lower_is_better:
            yield f"another direction of {now.metric} counts as better"
        if self.loss != now.loss and _NOT_RECORDED not in (self.loss, now.loss):
            yield f"the weights of tokens were those of {self.loss}, and are those of {now.loss}"
        if self.data != now.data:
            yield f"the held-out set of {now.metric} has changed ({self.documents:,} documents, now {now.documents:,})"

    def __str__(self) -> str:
        return f"step {self.step}, {self.metric or 'value'} {self.value}"
