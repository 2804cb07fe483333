"""Resuming: which checkpoint, whether its files are as they were written, and what has changed since.

Decides that a damaged checkpoint of the run's own folder is renamed, with a warning, and the next older one used; that
a run which should continue never starts from random weights; and that a change which would silently make it another
run is refused.  Rank 0 looks at the folder, and all ranks use its result.
"""

import shlex
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sft.checkpoint import folders, manifest
from sft.checkpoint.manifest import Manifest, Verify
from sft.checkpoint.saver import Saver
from sft.checkpoint.train_state import Changes, Conditions, TrainState, changes
from sft.config import CheckpointConfig, Config
from sft.console import Console, size
from sft.errors import CheckpointError
from sft.mcore.checkpoint_io import engine_state, safe_reader
from sft.mcore.engine import Engine
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0

_NFS_DELAY_S = 120.0  # how long another node may take to see the files that rank 0 sees


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    path: Path
    verification: str  # how it was verified, for the log
    is_named: bool = False  # by checkpoint.resume


def restore(engine: Engine, saver: Saver, config: Config, conditions: Conditions, console: Console) -> TrainState:
    """Load what checkpoint.resume names, or the weights that a new run starts from, into `engine`; returns the state.

    Collective.  Raises CheckpointError where a checkpoint cannot be continued, ConfigError where none could be saved.
    """
    folder, control = saver.folder, engine.groups.control
    point = find(config.checkpoint, folder, engine.groups, console)
    for removed in broadcast_from_rank0(lambda: folders.remove_leftovers(folder), control):
        console.say(f"removed {removed}, left by a save that was cut off")
    broadcast_from_rank0(lambda: folders.check_writable(folder), control)
    if point is not None:
        state = load(engine, point, config.checkpoint, conditions, console)
        saver.resumed(state.step, is_ours=point.path.parent.resolve() == folder.resolve())
        return state
    if config.model.init_from:
        start_from(engine, config.model.init_from, config.checkpoint.verify, console)
    else:
        console.say(f"started from random weights (seed {config.run.seed})")
    return TrainState()


def find(config: CheckpointConfig, folder: Path, groups: ProcessGroups, console: Console) -> ResumePoint | None:
    """The checkpoint that `checkpoint.resume` selects; None: a new run starts.  Collective.

    Raises CheckpointError where it names one that is missing or damaged.
    """
    paths, is_named = broadcast_from_rank0(lambda: _paths(config, folder), groups.control)
    damaged: list[str] = []
    for path in paths:
        try:
            return replace(verified(path, config.verify, groups), is_named=is_named)
        except CheckpointError as error:
            if is_named:  # not ours to rename
                raise
            damaged.append(str(error))
            broadcast_from_rank0(partial(_quarantine, path, str(error), console), groups.control)
    if damaged:
        raise CheckpointError(
            f"{folder} holds no checkpoint that is whole, and a run is not started over by itself.\n  "
            + "\n  ".join(damaged)
            + "\n  To start over all the same, choose another run.dir."
        )
    return None


def next_step(config: CheckpointConfig, folder: Path) -> int:
    """The step that the run would continue after, by folder names alone; 0 where that is not known.  For rank 0."""
    try:
        paths, _ = _paths(config, folder)
    except CheckpointError:  # `find` reports it
        return 0
    return (folders.step_of(paths[0]) or 0) if paths else 0


def verified(path: Path, verify: Verify, groups: ProcessGroups) -> ResumePoint:
    """The checkpoint in `path`, once its files are compared with the manifest as `checkpoint.verify` says.  Collective.

    Raises CheckpointError naming every file that is not as it was written.
    """
    if verify == "off":
        return ResumePoint(path=path, verification="not verified: checkpoint.verify = off")
    entries = broadcast_from_rank0(lambda: _manifest_of(path), groups.control)
    if entries is None:
        return ResumePoint(path=path, verification="unverified: it has no manifest to compare its files with")
    share = (groups.rank, len(all_gather_objects(lambda: 0, groups.control)))
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
    """Load the checkpoint into `engine`; reports what was restored and what has changed.  Collective.

    Raises CheckpointError where this recipe would not continue the run that wrote it.
    """
    sft = safe_reader.common_state(point.path).get("sft")
    if sft is None and not point.is_named:
        raise CheckpointError(
            f"{point.path} was not written by this trainer: it does not say which samples it has seen.  Start from its "
            f"weights with model.init_from={point.path}, or go on from it as it is, moments, schedule and step, with "
            f"checkpoint.resume={point.path}."
        )
    lines = []
    if sft is not None:
        changed = changes(sft, conditions, config.allow_changes)
        if changed.refused:
            raise CheckpointError(_refusal(point.path, changed, config.allow_changes))
        lines = [f"  changed    {line}" for line in changed.reported]
    plain = engine_state.load(engine, point.path)
    state = TrainState(**sft["state"]) if sft else TrainState(step=int(plain["iteration"]))
    if point.is_named:
        state = replace(state, origin=str(Path(config.resume).resolve()))
    same = engine_state.is_same_layout(engine, plain)
    position = f"step {state.step} of this recipe's plan; which samples were seen is not known"
    if sft is not None:
        position = f"after global batch {state.batch} of epoch {state.epoch}, {state.num_tokens:,} supervised tokens"
    console.say(
        "\n".join(
            [
                f"resumed step {state.step} from {point.path}",
                f"  files      {point.verification}",
                f"  restored   weights, moments, Adam's step, schedule{', random generators' if same else ''}",
                *([] if same else ["  not        random generators: another layout; nothing random happens in a step"]),
                f"  position   {position}",
                *lines,
            ]
        )
    )
    return state


def _refusal(path: Path, changed: Changes, allowed: list[str]) -> str:
    override = shlex.quote(f"checkpoint.allow_changes=[{', '.join([*allowed, *changed.refused])}]")
    refused = "; ".join(f"{key} {change}" for key, change in changed.refused.items())
    others = f"  Also changed: {'; '.join(changed.reported)}." if changed.reported else ""
    return (
        f"{path} cannot be continued with this recipe, which would make another run of it: {refused}.{others}  Undo "
        f"the change; or accept it, where the tensors still fit: {override}; or start a new run from its weights: "
        f"model.init_from={path} with another run.dir."
    )


def start_from(engine: Engine, source: str, verify: Verify, console: Console) -> None:
    """Load the weights that model.init_from names.  Collective; raises CheckpointError where there are none."""
    key = f"model.init_from = {source}"
    path = broadcast_from_rank0(lambda: folders.find([Path(source)], key), engine.groups.control)
    point = verified(path, verify, engine.groups)
    engine_state.load_weights(engine, point.path)
    console.say(f"started from the weights of {point.path} ({point.verification})")


def _paths(config: CheckpointConfig, folder: Path) -> tuple[list[Path], bool]:
    """The checkpoints to continue from, best first; and whether checkpoint.resume names the first by path."""
    candidates = folders.candidates(folder)
    if config.resume == "never":
        if candidates:
            raise CheckpointError(
                f"checkpoint.resume = never, but {folder} holds checkpoints of an earlier run, which this one would "
                f"mix with its own.  Choose another run.dir, or resume with checkpoint.resume=auto."
            )
    elif config.resume == "must" and not candidates:
        raise CheckpointError(f"checkpoint.resume = must: {folder} has no checkpoint ({folders.EXPECTED}).")
    elif not candidates and folders.has_saved_before(folder):
        raise CheckpointError(
            f"{folder} holds no checkpoint that is whole, though a run has saved there, and a run is not started over "
            f"by itself.  Put one back, or choose another run.dir, with checkpoint.resume=PATH to begin from another "
            f"checkpoint."
        )
    elif config.resume not in ("auto", "must"):
        if _started_from(Path(config.resume), candidates):
            return candidates, False
        return [folders.find([Path(config.resume)], f"checkpoint.resume = {config.resume}")], True
    return candidates, False


def _started_from(named: Path, candidates: list[Path]) -> bool:
    """Whether the run of these checkpoints, newest first, started from the one that checkpoint.resume names.

    The same command then continues from the run's own checkpoints: a requeued job would lose its steps each time
    otherwise.  Damaged checkpoints are passed over; where all are damaged, verification reports it.
    """
    for path in candidates:
        try:
            origin = safe_reader.common_state(path)["sft"]["state"]["origin"]
        except (CheckpointError, KeyError, TypeError):
            continue
        return bool(origin == str(named.resolve()))
    return bool(candidates)


def _manifest_of(path: Path) -> Manifest | None:
    """None for a checkpoint that another program wrote without one."""
    entries = manifest.read(path)
    if entries is None and "sft" in safe_reader.common_state(path):
        raise CheckpointError(f"{path / manifest.NAME} is missing, and this trainer writes one.")
    return entries


def _quarantine(path: Path, reason: str, console: Console) -> None:
    renamed = folders.quarantine(path)
    older = folders.candidates(path.parent)
    if older:
        folders.write_pointer(path.parent, int(older[0].name[5:]))
    source = older[0] if older else "nothing: it was the last one"
    console.say(f"WARNING: {reason}\n  It is {renamed} now; going on from {source}.")


def _wait_for_files(path: Path, check: Callable[[], list[str]]) -> list[str]:
    """The problems that `check` finds.  Repeats it while files are missing: this node may see them later than rank 0.

    Raises OSError where they stay missing: that is a problem of this node, not of the checkpoint.
    """
    deadline = time.monotonic() + _NFS_DELAY_S
    while problems := check():
        if not any(" is missing" in line for line in problems):
            break
        if time.monotonic() > deadline:
            raise OSError(f"{socket.gethostname()} still does not see all files of {path}: {problems[0]}")
        time.sleep(1.0)
    return problems
