"""Resumes a run: selects a checkpoint, verifies its files, loads it, and reports what changed since the save.

A damaged checkpoint in the run's own folder is renamed with a warning, and the next older one is used.  A run that has
saved before is never started over.  Rank 0 lists the folder and sends the result to the other ranks.
"""

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from sft.checkpoint import continuation, folders, held_out_pass, manifest
from sft.checkpoint.manifest import Verify
from sft.checkpoint.origin import RunOrigin
from sft.checkpoint.remote import RemoteCopies
from sft.checkpoint.remote_folder import RemoteFolder
from sft.checkpoint.saver import Saver
from sft.checkpoint.train_state import Conditions, TrainState
from sft.config import CheckpointConfig, Config
from sft.console import Console, size
from sft.errors import CheckpointError
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.engine import Engine
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.parallel.disk import Disk

_NFS_DELAY_S = 120.0  # how long a rank waits for a file that rank 0 already sees


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A verified checkpoint from which the run continues."""

    path: Path
    verification: str  # text for the log: how the checkpoint was verified
    is_named: bool = False  # whether checkpoint.resume is a path that leads to this checkpoint


def restore(
    engine: Engine,
    saver: Saver,
    config: Config,
    conditions: Conditions,
    console: Console,
    load_initial: Callable[[], str],
) -> TrainState:
    """Load a checkpoint, or the weights of a new run, into `engine`.  Returns the progress of the run.

    load_initial: loads the weights of a new run into `engine`, and returns a text for the log that names them
    Collective.  Raises CheckpointError if the run cannot resume, ConfigError if checkpoints cannot be written.
    """
    folder, control = saver.folder, engine.groups.control
    point = find(config.checkpoint, folder, engine.groups, console, saver.copies, saver.disk)
    removed_on_disks = saver.disk.on_each(lambda: folders.remove_leftovers(folder), control)
    for removed in chain.from_iterable(filter(None, removed_on_disks)):
        console.say(f"removed {removed}, which an interrupted save left")
    saver.disk.on_each(lambda: folders.check_writable(folder), control)
    if point is not None:
        state = load(engine, point, config.checkpoint, conditions, console)
        state = broadcast_from_rank0(partial(held_out_pass.added, point.path, state), control)
        is_ours = broadcast_from_rank0(lambda: folder.exists() and point.path.parent.samefile(folder), control)
        saver.resumed(state.step, is_ours=is_ours)
        if is_ours and saver.copies is not None and saver.disk.is_shared:
            saver.copies.catch_up(point.path, state, control)
        return state
    console.say(f"started from {load_initial()}")
    return TrainState()


def find(
    config: CheckpointConfig,
    folder: Path,
    groups: ProcessGroups,
    console: Console,
    copies: RemoteCopies | None = None,
    disk: Disk | None = None,
) -> ResumePoint | None:
    """The checkpoint that `checkpoint.resume` selects; None if a new run starts.  Collective.

    disk: the disk on which this rank sees `folder`; None: all ranks see the same one
    copies: where newer checkpoints may be, which are then fetched; also in place of one that is damaged here
    Raises CheckpointError if all selected checkpoints are damaged, or if checkpoint.resume names a damaged one.
    """
    damaged: list[str] = []
    disk = disk or Disk.shared(groups.control)
    while True:
        if copies is not None:
            copies.fetch_newer(folder, groups.control)
        if damaged and not broadcast_from_rank0(lambda: bool(folders.candidates(folder)), groups.control):
            raise CheckpointError(continuation.none_undamaged(folder, damaged))
        paths, is_named = broadcast_from_rank0(lambda: continuation.selected(config, folder), groups.control)
        if not paths and config.resume == "must":
            raise CheckpointError(
                f"checkpoint.resume = must, but neither {folder} nor {config.remote} has a checkpoint.  Set "
                "checkpoint.resume=auto to begin a run."
            )
        if not paths:
            return None
        try:
            return replace(verified(paths[0], config.verify, groups, disk), is_named=is_named)
        except CheckpointError as error:
            if is_named:  # the checkpoint may belong to another run, so it is not renamed
                raise
            damaged.append(str(error))
            disk.on_each(partial(_quarantine, paths[0], str(error), console), groups.control)


def next_step(config: CheckpointConfig, folder: Path) -> int:
    """The step after which the run would continue if no checkpoint is damaged; 0 if unknown.  Called on rank 0."""
    copied = 0 if config.remote is None else RemoteFolder(config.remote).newest() or 0
    try:
        paths, _ = continuation.selected(config, folder)
    except CheckpointError:  # `find` reports the error
        return copied
    return max(copied, (folders.step_of(paths[0]) or 0) if paths else 0)


def verified(path: Path, verify: Verify, groups: ProcessGroups, disk: Disk | None = None) -> ResumePoint:
    """Compare the files of the checkpoint in `path` with its manifest by `verify`, each rank of a disk a share.

    disk: the disk on which this rank sees `path`; None: all ranks see the same one
    Collective.
    Raises CheckpointError with the first few differences, if a file differs from its manifest entry.  Raises OSError if
    a rank does not see a file that rank 0 sees.
    """
    if verify == "off":
        return ResumePoint(path=path, verification="not verified: checkpoint.verify = off")
    entries = broadcast_from_rank0(lambda: continuation.manifest_of(path), groups.control)
    if entries is None:
        return ResumePoint(path=path, verification="not verified: the checkpoint has no manifest")
    disk = disk or Disk.shared(groups.control)
    share = (disk.index, len(disk.ranks))
    broadcast_from_rank0(lambda: manifest.refuse(path, manifest.damage(path, entries, verify="size")), groups.control)
    problems = all_gather_objects(
        lambda: _wait_for_files(path, lambda: manifest.damage(path, entries, verify=verify, share=share)),
        groups.control,
    )
    manifest.refuse(path, [line for of_rank in problems for line in of_rank])
    subject = {"size": "sizes", "full": "SHA-256"}[verify]
    verification = f"{subject} verified: {len(entries.files)} files, {size(entries.num_bytes)}"
    return ResumePoint(path=path, verification=verification)


def load(
    engine: Engine, point: ResumePoint, config: CheckpointConfig, conditions: Conditions, console: Console
) -> TrainState:
    """Load the checkpoint into `engine`.  Reports what was restored and what has changed.  Collective.

    Raises CheckpointError if a change is refused, if another program wrote the checkpoint and checkpoint.resume does
    not name it, or if the manifest and the checkpoint contradict each other.
    """
    facts = continuation.facts_of(point.path)
    reported = continuation.compare(point.path, facts, conditions, config, is_named=point.is_named)
    plain = engine_state.load(engine, point.path)
    sft = plain.get("sft")
    if facts and sft and any(json.loads(json.dumps(sft[key])) != facts[key] for key in ("state", "recipe", "plan")):
        raise CheckpointError(
            f"{point.path / manifest.NAME} and the checkpoint disagree about the state, the recipe or the plan, so one "
            "of them was changed after the save.  Resume from another checkpoint."
        )
    state = TrainState.read(sft["state"]) if sft else TrainState(step=int(plain["iteration"]))
    if point.is_named:
        state = replace(state, origin=RunOrigin.of(point.path, config.resume, state.step))
    same = engine_state.is_same_layout(engine, plain)
    position = f"step {state.step} of this recipe's plan; the checkpoint does not say which samples were used"
    if sft is not None:
        position = f"after global batch {state.batch} of epoch {state.epoch}, {state.num_tokens:,} supervised tokens"
    console.say(
        "\n".join(
            [
                f"resumed step {state.step} from {point.path}",
                f"  files      {point.verification}",
                f"  restored   weights, moments, Adam's step, schedule{', random generators' if same else ''}",
                *([] if same else ["  skipped    random generators: the layout differs, and a step draws none"]),
                f"  position   {position}",
                *(f"  changed    {line}" for line in reported),
            ]
        )
    )
    return state


def _quarantine(path: Path, reason: str, console: Console) -> None:
    renamed = folders.quarantine(path)
    older = folders.candidates(path.parent)
    if older:
        folders.write_pointer(path.parent, int(older[0].name[5:]))
    then = f"the run continues from {older[0]}" if older else "no older checkpoint is left"
    console.say(f"WARNING: {reason}\n  The folder is renamed to {renamed}; {then}.")


def _wait_for_files(path: Path, check: Callable[[], list[str]]) -> list[str]:
    """The problems that `check` finds.  Repeats `check` while files are missing, because NFS may show files late.

    Raises OSError if files stay missing, because missing files are a problem of this node and not of the checkpoint.
    """
    deadline = time.monotonic() + _NFS_DELAY_S
    while problems := check():
        if not any(" is missing" in line for line in problems):
            break
        if time.monotonic() > deadline:
            raise OSError(f"{socket.gethostname()} still does not see all files of {path}: {problems[0]}")
        time.sleep(1.0)
    return problems
