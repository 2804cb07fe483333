"""Checks the loss and the gradient norm of every step: warns of a loss spike, ends a run that stays non-finite.

Both numbers are the same on all ranks, so all ranks decide the same.
"""

from pathlib import Path
from typing import Protocol

from sft.config import TrainConfig
from sft.console import Console
from sft.errors import TrainingError
from sft.metrics.loss_spikes import LossSpikes


class StepNumbers(Protocol):
    """What is checked.  `is_nonfinite`: the loss or the gradient norm is not finite."""

    @property
    def is_nonfinite(self) -> bool: ...
    @property
    def lm_loss(self) -> float | None: ...
    @property
    def grad_norm(self) -> float: ...


class StepCheck:
    """The checks of one run."""

    def __init__(self, config: TrainConfig, console: Console) -> None:
        self._max_nonfinite_steps, self._console = config.max_nonfinite_steps, console
        self._loss_spikes = LossSpikes()

    def allows(self, step: int, numbers: StepNumbers, bad_in_a_row: int) -> bool:
        """Whether training may go on after `step`.  Warns of a loss spike and of a skipped step.

        False after more than train.max_nonfinite_steps non-finite steps in a row: then raise `refusal`.
        """
        if not numbers.is_nonfinite:
            warning = None if numbers.lm_loss is None else self._loss_spikes.check(numbers.lm_loss)
            if warning is not None:
                self._console.say(f"WARNING: loss spike in step {step}: {warning}")
            return True
        if bad_in_a_row > self._max_nonfinite_steps:
            return False
        self._console.say(
            f"WARNING: {_numbers(step, numbers)}: nothing was updated, the step is skipped "
            f"({bad_in_a_row} in a row of at most {self._max_nonfinite_steps})"
        )
        return True

    def refusal(self, step: int, numbers: StepNumbers, bad_in_a_row: int, dumped: Path) -> TrainingError:
        """Why training ends after `step`; `dumped` is the folder that `nonfinite_dump.write` made."""
        return TrainingError(
            f"{_numbers(step, numbers)}, after {bad_in_a_row - 1} such steps before it (train.max_nonfinite_steps).  "
            f"Nothing of it was saved.  Its samples and the losses of all ranks are in {dumped}.  A lower optim.lr may "
            f"help, from a checkpoint before the first non-finite step: checkpoint.resume=PATH with another run.dir."
        )


def _numbers(step: int, numbers: StepNumbers) -> str:
    return f"step {step}: lm loss {numbers.lm_loss:.4f}, gradient norm {numbers.grad_norm}"
