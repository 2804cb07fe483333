"""Warns of loss spikes, and ends a run after too many steps in a row with a non-finite loss or gradient norm.

Loss and norm are equal on all ranks, so all ranks decide the same.  Before it ends the run, it writes these files:

    run.dir/bad_steps/step_0000012/
        samples.json     the sample numbers of the global batch, with the data file and row of each sample
        ranks.json       for every rank its position in the layout, and the summed loss of each of its microbatches
        recipe.yaml
"""

import json
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sft.config import TrainConfig
from sft.console import Console
from sft.errors import TrainingError
from sft.files.atomic_files import replace_text
from sft.metrics.totals import StepResult
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.parallel.position import Position

_WINDOW = 64  # steps
_MIN_STEPS = 16  # a loss with fewer earlier losses is not checked
_SIGMAS = 6.0
_SPREAD = 1.4826  # standard deviation divided by median absolute deviation, in a normal distribution


class LossSpikes:
    """Compares each loss with the median of the 64 losses before it.

    A loss spike does not end a run, because a batch of difficult samples may cause it.  The spread is computed from the
    median absolute deviation, so one loss spike does not hide the next.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def check(self, loss: float) -> str | None:
        """A description of the next loss if it is a loss spike, else None.

        63 losses of 2.0 to 2.1, then 4.0 -> "4.0000, the median of earlier losses is 2.0500 +- 0.0383"
        """
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < _MIN_STEPS:
            return None
        middle = statistics.median(before)
        spread = _SPREAD * statistics.median(abs(earlier - middle) for earlier in before)
        if loss - middle <= _SIGMAS * max(spread, 0.01 * abs(middle)):
            return None
        return f"{loss:.4f}, the median of earlier losses is {middle:.4f} +- {spread:.4f}"


class StepCheck:
    """Checks the loss and the gradient norm of each step."""

    def __init__(self, config: TrainConfig, console: Console) -> None:
        self._max_nonfinite_steps, self._console = config.max_nonfinite_steps, console
        self._loss_spikes = LossSpikes()

    def check(self, step: int, result: StepResult, bad_in_a_row: int, dump: Callable[[], Path]) -> None:
        """Warn of a loss spike, and of a non-finite step.

        dump: writes the files below bad_steps/, and returns their folder
        Raises TrainingError after more than train.max_nonfinite_steps non-finite steps in a row.
        """
        if not result.is_nonfinite:
            warning = None if result.lm_loss is None else self._loss_spikes.check(result.lm_loss)
            if warning is not None:
                self._console.say(f"WARNING: loss spike in step {step}: {warning}")
            return
        numbers = f"step {step}: lm loss {result.lm_loss:.4f}, gradient norm {result.grad_norm}"
        if bad_in_a_row > self._max_nonfinite_steps:
            raise TrainingError(
                f"{numbers}, after {bad_in_a_row - 1} non-finite steps before it (train.max_nonfinite_steps).  This "
                f"step was not saved.  Its samples and the losses of all ranks are in {dump()}.  Try a lower optim.lr, "
                f"from a checkpoint before the first non-finite step: checkpoint.resume=PATH with another run.dir."
            )
        self._console.say(
            f"WARNING: {numbers}: the step is skipped and updates no weight "
            f"({bad_in_a_row} non-finite in a row, at most {self._max_nonfinite_steps} allowed)"
        )


def dump_step(
    folder: Path,
    step: int,
    *,
    samples: Sequence[dict[str, Any]],
    losses: Sequence[float],
    recipe: str,
    position: Position,
) -> Path:
    """Write the dump of `step` into the run's `folder`, and return the folder of the dump.  Collective.

    losses  summed loss of each microbatch of this rank
    """

    def write() -> Path:
        target = folder / "bad_steps" / f"step_{step:07d}"
        target.mkdir(parents=True, exist_ok=True)
        for name, content in (("samples", samples), ("ranks", ranks)):
            replace_text(target / f"{name}.json", json.dumps(content, indent=1) + "\n")
        replace_text(target / "recipe.yaml", recipe)
        return target

    entry = {"rank": position.rank, "summed loss of each microbatch": [repr(loss) for loss in losses]}
    entry |= {f"{kind}_rank": getattr(position, f"{kind}_rank") for kind in ("dp", "cp", "tp", "pp", "ep")}
    ranks = all_gather_objects(lambda: entry, position.control)
    return broadcast_from_rank0(write, position.control)
