"""`sft.train`: trains a recipe, as one rank of a run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sft.api.process import check_process, joins
from sft.files.atomic_files import explained
from sft.recipe.layout import launched_world_size, resolve_layout
from sft.recipe.needs import check_packages, check_paths
from sft.recipe.resolved import Recipe
from sft.recipe.run_dir import check_folder, download_weights
from sft.run.outcome import Outcome
from sft.run.refused_start import recorded

if TYPE_CHECKING:
    from sft.metrics.callbacks import Callback


def train(
    recipe: Recipe,
    *,
    on_step: "Callback | None" = None,
    on_evaluation: "Callback | None" = None,
    quiet: bool = False,
) -> Outcome:
    """Train the recipe until its last step, or until the run is asked to stop.

    on_step: called on rank 0 after each step with a copy of its record, which has the names and units of metrics.jsonl,
    such as record["lm loss"] (docs/reference/metrics.md)
    on_evaluation: called on rank 0 with the record of each pass over a held-out set, whose name is record["set"]
    quiet: print only warnings and the summary at the end

    A callback changes nothing in the training.  If it raises an exception, no callback is called any more, the run
    finishes the step, saves and stops as after a stop signal, and `train` raises the exception on rank 0.

    In a program that torchrun started, each process calls `train` once and is one rank of the run.  In any other
    program, such as a notebook, this process is the whole run (tp = cp = pp = dp = 1), and may train one recipe after
    another.  By default, the run continues from the newest checkpoint in run.dir (checkpoint.resume).

    During training, SIGTERM, SIGUSR1, SIGINT (Ctrl-C, the stop button of a notebook), SIGHUP and SIGQUIT make the run
    finish the step, save and return an Outcome with `stopped`; a second signal ends the process.  At the end, the
    former handlers of these signals are restored.

    Raises ConfigError if the recipe cannot run here: the layout needs another number of processes, a file or package is
    missing, the thread is not the main one, or the process has a process group already.  Raises DataError (the data are
    not prepared: call `prepare` first), CheckpointError (a checkpoint is damaged or of another model), StorageError
    (a disk is full or fails; another start may succeed), PeerError (another rank does not answer) and TrainingError
    (too many losses that are not finite).  After an error in a program of torchrun, end the program, because the other
    ranks may wait for this one.
    """
    check_process("train")
    with recorded(Path(recipe.config.run.dir)):
        layout = resolve_layout(recipe, launched_world_size() or 1)
        check_packages(recipe)
        check_paths(recipe)
        if os.environ.get("RANK", "0") == "0":  # the rank that makes the folder
            check_folder(recipe)
    download_weights(recipe)

    from sft.run import environment

    from_user = environment.prepare(recipe.config, layout)  # before the next import, which may start CUDA

    from sft.api.rank import main
    from sft.metrics.callbacks import Callbacks

    joins()
    callbacks = Callbacks(on_step, on_evaluation)
    with explained():
        outcome = main(recipe, layout, from_user, callbacks, is_quiet=quiet)
    if callbacks.error is not None:
        raise callbacks.error
    return outcome
