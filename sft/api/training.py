"""`sft.train`: trains a recipe, as one rank of a run."""

import os
import sys
import threading
from pathlib import Path

from sft.errors import ConfigError
from sft.files.atomic_files import explained
from sft.recipe.layout import launched_world_size, resolve_layout
from sft.recipe.needs import check_packages, check_paths
from sft.recipe.resolved import Recipe
from sft.recipe.run_dir import check_folder, download_weights
from sft.run.outcome import Outcome
from sft.run.refused_start import recorded

_joined: set[tuple[str | None, str | None]] = set()  # MASTER_ADDR and MASTER_PORT where this process was a rank


def train(recipe: Recipe) -> Outcome:
    """Train the recipe until its last step, or until the run is asked to stop.

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
    _check_process()
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

    if "RANK" in os.environ:
        _joined.add(_meeting_point())
    with explained():
        return main(recipe, layout, from_user)


def _check_process() -> None:
    """Raise ConfigError if no run can start in this process."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "sft.train was called in a thread, but a run receives its stop signals in the main thread of a process.  "
            "Call it there, or start `sft train` as a process."
        )
    if "RANK" in os.environ and _meeting_point() in _joined:
        raise ConfigError(
            "this process of torchrun has trained before, and its ranks can meet only once.  Start one program with "
            "torchrun for each run; without torchrun, one process may train several recipes."
        )
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise ConfigError(
            "this process has a process group of torch.distributed, but sft.train makes its own.  Call "
            "torch.distributed.destroy_process_group() first, or train in another process."
        )


def _meeting_point() -> tuple[str | None, str | None]:
    """The address and port of the store at which the ranks meet.

    The store keeps the addresses of the first run, so a second run needs another store.
    """
    return os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
