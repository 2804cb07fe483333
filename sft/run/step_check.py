"""Warns of loss spikes, and ends a run after too many steps in a row with a non-finite loss or gradient norm.

Loss and norm are the same on all ranks, so all ranks decide the same.  Before a run ends, these files are written:

    run.dir/bad_steps/step_0000012/
        samples.json     the sample numbers of the global batch, with the data file and row of each sample
        ranks.json       for every rank its position in the layout, and the summed loss of each of its microbatches
        recipe.yaml
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sft.config import TrainConfig
from sft.console import Console
from sft.errors import TrainingError
from sft.files.atomic_files import replace_text
from sft.metrics.loss_spikes import LossSpikes
from sft.metrics.totals import StepResult
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.parallel.position import Position


class StepCheck:
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
