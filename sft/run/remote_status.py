"""Keeps a copy of run_state.json in the object store (checkpoint.remote), for nodes that lose their disks.

    s3://bucket/runs/a/run_state.json    the newest status of the run

A start that finds an empty run.dir, or one of an earlier start, begins with this copy, so starts without a new
checkpoint count over all nodes.  `sft status` reads it on every node.
"""

import json
from pathlib import Path

from sft.errors import ConfigError
from sft.files.object_store import ObjectStore
from sft.run import status
from sft.run.status import Status


def newest(folder: Path, url: str | None) -> Status | None:
    """The newest status of the run; None if there is none.

    url: checkpoint.remote, or None.  Raises ConfigError if a status is damaged, and as `ObjectStore` does
    """
    own = status.read(folder)
    stored = None if url is None else _read(ObjectStore(url))
    if stored is None:
        return own
    copy = stored[0]
    if own is None or own.start_id == copy.start_id:  # a status that says how a start ended is newer
        return copy if own is None or copy.status != "running" else own
    # Of two starts, the clocks decide.  A store refuses requests of a machine whose clock is wrong by some minutes.
    # In the same second, the store decides: every start writes there.
    return max(copy, own, key=lambda of_start: of_start.time)


def pull(folder: Path, url: str | None) -> None:
    """Replace the status in the folder by the newest one.  Raises as `newest`.  Called by the holder of the lock."""
    own, now = status.read(folder), newest(folder, url)
    if now is not None and now != own:
        status.copy(folder, now)


def push(folder: Path, url: str | None, *, is_new: bool = False) -> None:
    """Send the status in the folder, unless the store knows that another start has begun, or that a rank has failed.

    is_new: whether this status begins a start.  Any rank may call it.  Raises as `ObjectStore` does.
    """
    if url is None or (own := status.read(folder)) is None:
        return
    store, is_written = ObjectStore(url), False
    while not is_written:
        stored = _read(store)
        if stored is not None and not is_new:
            is_same = stored[0].start_id == own.start_id
            if not is_same or stored[0].status.startswith("failed"):
                return
        is_written = store.replace(status.FILE, status.text_of(own).encode(), stored and stored[1]) is not None


def _read(store: ObjectStore) -> tuple[Status, str] | None:
    """The status in the store, and its ETag."""
    if (stored := store.read(status.FILE)) is None:
        return None
    try:
        return status.parse(json.loads(stored[0])), stored[1]
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{store.url}/{status.FILE} is not the state of a run: {error}.  Remove it; the checkpoints do not depend "
            "on it."
        ) from error
