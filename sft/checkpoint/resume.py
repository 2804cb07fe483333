"""Going on: which checkpoint, whether it is what was written, and what has changed since.

Decides that a damaged checkpoint of the run's own folder is put aside, loudly, and the next older one taken; that
nothing starts from random weights where something was to be continued; and that a change which would silently make
another run of this one is refused.  Rank 0 looks, and every rank follows.
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
from sft.errors import CheckpointError, ConfigError
from sft.mcore.checkpoint_io import engine_state, safe_reader
from sft.mcore.engine import Engine
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0

_PATIENCE_S = 120.0  # how long another node may take to show what rank 0 sees (NFS)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint to go on from."""

    path: Path
    told: str  # how it was verified
    is_named: bool = False  # by checkpoint.resume


def restore(engine: Engine, saver: Saver, config: Config, conditions: Conditions, console: Console) -> TrainState:
    """What checkpoint.resume asks for -> `engine`, or the weights a new run begins with; where the run stands.

    Collective.  Raises CheckpointError where a checkpoint cannot be continued, ConfigError where none could be saved.
    """
    folder, control = saver.folder, engine.groups.control
    found = find(config.checkpoint, folder, engine.groups, console)
    for removed in broadcast_from_rank0(lambda: folders.sweep(folder), control):
        console.say(f"removed {removed}, left by a save that was cut off")
    broadcast_from_rank0(lambda: _probe(folder), control)
    if found is not None:
        state = load(engine, found, config.checkpoint, conditions, console)
        saver.resumed(state.step, is_ours=found.path.parent.resolve() == folder.resolve())
        return state
    if config.model.init_from:
        start_from(engine, config.model.init_from, config.checkpoint.verify, console)
    else:
        console.say(f"started from random weights (seed {config.run.seed})")
    return TrainState()


def _probe(folder: Path) -> None:
    try:
        folders.probe(folder)
    except OSError as error:
        raise ConfigError(f"run.dir = {folder.parent}: no checkpoint could be written: {error}.") from error


def find(config: CheckpointConfig, folder: Path, groups: ProcessGroups, console: Console) -> Found | None:
    """What `checkpoint.resume` asks for; None: a new run is to start.  Collective.

    Raises CheckpointError where it asks for something that is not there, or not whole.
    """
    paths, is_named = broadcast_from_rank0(lambda: _paths(config, folder), groups.control)
    bad: list[str] = []
    for path in paths:
        try:
            return replace(verified(path, config.verify, groups), is_named=is_named)
        except CheckpointError as error:
            if is_named:  # not ours to rename
                raise
            bad.append(str(error))
            broadcast_from_rank0(partial(_put_aside, path, str(error), console), groups.control)
    if bad:
        raise CheckpointError(
            f"{folder} holds no checkpoint that is whole, and a run is not started over by itself.\n  "
            + "\n  ".join(bad)
            + "\n  To start over all the same, choose another run.dir."
        )
    return None


def next_step(config: CheckpointConfig, folder: Path) -> int:
    """After which step the run would go on, by names alone; 0 where that is not known yet.  For rank 0."""
    try:
        paths, _ = _paths(config, folder)
    except CheckpointError:  # told when it is looked for
        return 0
    return (folders.step_of(paths[0]) or 0) if paths else 0


def verified(path: Path, verify: Verify, groups: ProcessGroups) -> Found:
    """The checkpoint in `path`, after a look at its files as `checkpoint.verify` says.  Collective.

    Raises CheckpointError naming every file that is not as it was written.
    """
    if verify == "off":
        return Found(path=path, told="not verified: checkpoint.verify = off")
    written = broadcast_from_rank0(lambda: _manifest_of(path), groups.control)
    if written is None:
        return Found(path=path, told="unverified: it has no manifest, so nobody can tell if it is whole")
    share = (groups.rank, len(all_gather_objects(lambda: 0, groups.control)))
    broadcast_from_rank0(lambda: _refuse(path, manifest.damage(path, written, verify="size")), groups.control)
    found = all_gather_objects(
        lambda: _patiently(path, lambda: manifest.damage(path, written, verify=verify, share=share)), groups.control
    )
    _refuse(path, [line for lines in found for line in lines])
    how = {"size": "sizes", "full": "SHA-256"}[verify] + " verified"
    return Found(path=path, told=f"{how}: {len(written.files)} files, {size(written.num_bytes)}")


def load(engine: Engine, found: Found, config: CheckpointConfig, now: Conditions, console: Console) -> TrainState:
    """Everything in `found` -> `engine`; tells what was restored and what has changed.  Collective.

    Raises CheckpointError where this recipe would not continue the run that wrote it.
    """
    before = safe_reader.common_state(found.path)
    ours = before.get("sft")
    if ours is None and not found.is_named:
        raise CheckpointError(
            f"{found.path} was not written by this trainer: it does not say which samples it has seen.  Start from its "
            f"weights with model.init_from={found.path}, or go on from it as it is, moments, schedule and step, with "
            f"checkpoint.resume={found.path}."
        )
    lines = []
    if ours is not None:
        changed = changes(ours, now, config.allow_changes)
        if changed.refused:
            raise CheckpointError(_refusal(found.path, changed, config.allow_changes))
        lines = [f"  changed    {line}" for line in changed.told]
    plain = engine_state.load(engine, found.path)
    state = TrainState(**ours["state"]) if ours else TrainState(step=int(plain["iteration"]))
    if found.is_named:
        state = replace(state, origin=str(Path(config.resume).resolve()))
    same = engine_state.is_same_layout(engine, plain)
    console.say(
        "\n".join(
            [
                f"resumed step {state.step} from {found.path}",
                f"  files      {found.told}",
                f"  restored   weights, moments, Adam's step, schedule{', random generators' if same else ''}",
                *([] if same else ["  not        random generators: another layout; nothing random happens in a step"]),
                _position(state, ours is not None),
                *lines,
            ]
        )
    )
    return state


def _refusal(path: Path, changed: Changes, allowed: list[str]) -> str:
    every = shlex.quote(f"checkpoint.allow_changes=[{', '.join([*allowed, *changed.refused])}]")
    refused = "; ".join(f"{key} {how}" for key, how in changed.refused.items())
    also = f"  Also changed: {'; '.join(changed.told)}." if changed.told else ""
    return (
        f"{path} cannot be continued with this recipe, which would make another run of it: {refused}.{also}  Undo the "
        f"change; or accept it, where the tensors still fit: {every}; or start a new run from its weights: "
        f"model.init_from={path} with another run.dir."
    )


def start_from(engine: Engine, source: str, verify: Verify, console: Console) -> None:
    """The weights that model.init_from names -> `engine`.  Collective; raises CheckpointError where there are none."""
    path = broadcast_from_rank0(lambda: _there(Path(source), f"model.init_from = {source}"), engine.groups.control)
    found = verified(path, verify, engine.groups)
    engine_state.load_weights(engine, found.path)
    console.say(f"started from the weights of {found.path} ({found.told})")


def _position(state: TrainState, is_known: bool) -> str:
    if not is_known:
        return f"  position   step {state.step} of this recipe's plan; which samples were seen is not known"
    return (
        f"  position   after global batch {state.batch} of epoch {state.epoch}, {state.num_tokens:,} supervised tokens"
    )


def _paths(config: CheckpointConfig, folder: Path) -> tuple[list[Path], bool]:
    """What to go on from, best first; and whether it is what checkpoint.resume names."""
    found = folders.candidates(folder)
    if config.resume == "never":
        if found:
            raise CheckpointError(
                f"checkpoint.resume = never, but {folder} holds checkpoints of an earlier run, which this one would "
                f"mix with its own.  Choose another run.dir, or resume with checkpoint.resume=auto."
            )
    elif config.resume == "must" and not found:
        raise CheckpointError(f"checkpoint.resume = must: {folder} has no checkpoint ({_LOOKS}).")
    elif not found and folders.was_used(folder):
        raise CheckpointError(
            f"{folder} holds no checkpoint that is whole, though a run has saved there, and a run is not started over "
            f"by itself.  Put one back, or choose another run.dir, with checkpoint.resume=PATH to begin from another "
            f"checkpoint."
        )
    elif config.resume not in ("auto", "must"):
        if _began_at(Path(config.resume), found):
            return found, False
        return [_there(Path(config.resume), f"checkpoint.resume = {config.resume}")], True
    return found, False


_LOOKS = f"a folder iter_XXXXXXX with {folders.MARKER}, or one that holds such folders"


def _began_at(named: Path, found: list[Path]) -> bool:
    """Whether the run of these checkpoints, newest first, began from the one that checkpoint.resume names.  The same
    command, given again, then goes on from them, not from there: a job that is requeued would lose what it did, each
    time.  What is damaged tells nothing; where all of it is, that is for verification to say.
    """
    for path in found:
        try:
            origin = safe_reader.common_state(path)["sft"]["state"]["origin"]
        except (CheckpointError, KeyError, TypeError):
            continue
        return bool(origin == str(named.resolve()))
    return bool(found)


def _there(path: Path, what: str) -> Path:
    """The checkpoint at `path`, or the best one in it."""
    found = [path] if folders.is_one(path) else folders.candidates(path)
    if not found:
        raise CheckpointError(f"{what}: no checkpoint there ({_LOOKS}).")
    return found[0]


def _manifest_of(path: Path) -> Manifest | None:
    """None only where there should be none."""
    written = manifest.read(path)
    if written is None and "sft" in safe_reader.common_state(path):
        raise CheckpointError(f"{path / manifest.NAME} is missing, and this trainer writes one.")
    return written


def _refuse(path: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}.")


def _put_aside(path: Path, why: str, console: Console) -> None:
    away = folders.quarantine(path)
    older = folders.candidates(path.parent)
    if older:
        folders.point(path.parent, int(older[0].name[5:]))
    console.say(
        f"WARNING: {why}\n  It is {away} now; going on from {older[0] if older else 'nothing: it was the last one'}."
    )


def _patiently(path: Path, look: Callable[[], list[str]]) -> list[str]:
    """What is wrong, asked again while files are missing: rank 0 has seen them, this node may not yet.

    Raises OSError where they do not come: that is this node's trouble, not the checkpoint's.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while problems := look():
        if not any(" is missing" in line for line in problems):
            break
        if time.monotonic() > deadline:
            raise OSError(f"{socket.gethostname()} still does not see all files of {path}: {problems[0]}")
        time.sleep(1.0)
    return problems
