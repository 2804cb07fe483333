"""Records in a published checkpoint that its held-out sets were evaluated, and which checkpoint is the best.

    checkpoints/iter_0000100/held_out_pass.json   {"format": ..., "checkpoint_sha256": "3f...", "best": {...} or null}

If a stop signal interrupts the held-out pass after a step, the checkpoint is saved without the result, and the next
start makes the pass.  This file then adds the result without another save.  It contains the digest of the checkpoint's
manifest, so that it is never used for another checkpoint of the same step.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

from sft.checkpoint import manifest
from sft.checkpoint.best import Best
from sft.checkpoint.train_state import TrainState
from sft.errors import StorageError
from sft.files.atomic_files import replace_text, why_not_written
from sft.files.folder_files import CONFIG_BYTES, read_json

NAME = "held_out_pass.json"
FORMAT = "sft held-out pass 1"


def write(checkpoint: Path, state: TrainState) -> None:
    """Record the pass after `state.step` in its checkpoint.  Raises StorageError if the file cannot be written."""
    best = None if state.best is None else asdict(state.best)
    content = {"format": FORMAT, "checkpoint_sha256": manifest.digest(checkpoint), "best": best}
    try:
        replace_text(checkpoint / NAME, json.dumps(content, indent=1) + "\n", sync=True)
    except OSError as error:
        why = why_not_written(checkpoint, error)
        raise StorageError(
            f"the result of the held-out pass cannot be written to {checkpoint / NAME}: {why}."
        ) from error


def added(checkpoint: Path, state: TrainState) -> TrainState:
    """Returns `state` with the result of the held-out pass that is recorded in `checkpoint`.

    A record that is missing, damaged, or about another checkpoint adds nothing.  The run then makes the pass again,
    with the same result.
    """
    try:
        content = read_json(checkpoint, NAME, CONFIG_BYTES)
        if content["format"] != FORMAT or content["checkpoint_sha256"] != manifest.digest(checkpoint):
            return state
        best = Best.read({"best": content["best"]})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return state
    return replace(state, evaluated=state.step, best=best)
