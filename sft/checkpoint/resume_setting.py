"""Checks whether checkpoint.resume allows a run to begin or to continue.  Reads file names and the pointer only."""

from pathlib import Path

from sft.checkpoint import folders
from sft.config import CheckpointConfig
from sft.errors import CheckpointError

WORDS = ("auto", "must", "never")


def check(config: CheckpointConfig, folder: Path) -> None:
    """Raise CheckpointError if checkpoint.resume does not fit what is in `folder`, the run's folder of checkpoints.

    `sft check` and every start of a run call this function.  Only the start looks for a checkpoint in
    checkpoint.remote.
    """
    has_checkpoint = bool(folders.candidates(folder))
    if config.resume == "never":
        if has_checkpoint:
            raise CheckpointError(
                f"checkpoint.resume = never, but {folder} holds checkpoints of an earlier run.  A new run would mix "
                "its checkpoints with them.  Choose another run.dir, or resume with checkpoint.resume=auto."
            )
    elif config.resume == "must" and not has_checkpoint and config.remote is None:
        raise CheckpointError(f"checkpoint.resume = must, but {folder} has no checkpoint; expected {folders.EXPECTED}.")
    elif not has_checkpoint and folders.has_saved_before(folder):
        raise CheckpointError(
            f"{folder} holds no undamaged checkpoint, and a run that has saved is not started over.  Restore a "
            f"checkpoint, or choose another run.dir; checkpoint.resume=PATH continues from another checkpoint."
        )
    elif config.resume not in WORDS and not has_checkpoint:
        named(config)


def named(config: CheckpointConfig) -> Path:
    """The checkpoint that checkpoint.resume names.  Raises CheckpointError if there is none."""
    if not Path(config.resume).exists():
        raise CheckpointError(
            f"checkpoint.resume = {config.resume} names no checkpoint: the path does not exist in {Path.cwd()}.  Give "
            "auto (continue from the newest checkpoint of run.dir, if there is one), must, never, or the path of a "
            "checkpoint."
        )
    return folders.find([Path(config.resume)], f"checkpoint.resume = {config.resume}")
