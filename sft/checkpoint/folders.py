"""Names, orders, publishes and removes the checkpoint folders of a run.

    run.dir/checkpoints/
        latest_checkpointed_iteration.txt      the newest step; name and content as in Megatron-LM
        iter_0000100/                          complete; gets this name after all its files are flushed
        iter_0000200.tmp-3f9c/                 being written, or left by a save that was killed
        iter_0000150.replaced-7a10/            being removed, because the same step was saved again
        iter_0000050.retired-c21d/             being removed, because it is old
        iter_0000100.corrupt-20261120-193000/  found damaged when a run resumed
        iter_0000400.given-up-b07a/            no longer used, because the run was resumed from an earlier step

Only a complete checkpoint has a name like iter_0000100: it gets another name before its first file is removed.  While a
run holds the lock of its folder, only its rank 0 calls the functions that change the folder.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from sft.errors import CheckpointError, ConfigError
from sft.files.atomic_files import flush, replace_text
from sft.files.folder_files import WORD_BYTES, UnsafeFileError, read_file

POINTER = "latest_checkpointed_iteration.txt"
MARKER = "metadata.json"  # megatron-core writes this file into every torch_dist checkpoint
EXPECTED = f"a folder iter_XXXXXXX with {MARKER}, or a folder of such folders"
_NAME = re.compile(r"iter_(\d{7,})")
_LEFT_OVER = re.compile(r"iter_\d{7,}\.(tmp|replaced|retired)-[0-9a-f]+")


def name_of(step: int) -> str:
    """The name of a checkpoint's folder: 100 -> iter_0000100"""
    return f"iter_{step:07d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint's folder: iter_0000100 -> 100; None for any other name"""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def published(folder: Path) -> list[Path]:
    """Complete checkpoints, lowest step first.

    Raises CheckpointError if a symbolic link has the name of a checkpoint, because a run renames and removes
    checkpoints.
    """
    named = _named(folder)
    if link := next((path for path in named if path.is_symlink()), None):
        raise CheckpointError(
            f"{link} is a link, but a run renames and removes the checkpoints in its folder.  Move the checkpoint to "
            "this name, or remove the link and name the checkpoint itself: a new run reads it by model.init_from or "
            "checkpoint.resume."
        )
    return [path for path in named if path.is_dir()]


def _named(folder: Path) -> list[Path]:
    """The entries of the folder that are named like a complete checkpoint, lowest step first."""
    named = [path for path in folder.iterdir() if step_of(path) is not None] if folder.is_dir() else []
    return sorted(named, key=lambda path: int(path.name[5:]))


def read_pointer(folder: Path) -> int | None:
    """The step in the pointer file; None if the file is missing, cannot be read, or holds anything but digits."""
    try:
        text = read_file(folder / POINTER, WORD_BYTES).decode("ascii").strip()
    except (OSError, UnsafeFileError, UnicodeDecodeError):
        return None
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def candidates(folder: Path) -> list[Path]:
    """The checkpoints from which a run may continue, newest first.

    These are the checkpoints up to the step in the pointer.  If there are none, or no pointer, these are all
    checkpoints.  Raises CheckpointError as `published`.
    """
    newest_first = published(folder)[::-1]
    step = read_pointer(folder)
    return [path for path in newest_first if step is not None and int(path.name[5:]) <= step] or newest_first


def find(paths: Iterable[Path], key: str) -> Path:
    """The checkpoint of the first of `paths` that has one: the path itself, or the newest candidate in this folder.

    key: the setting that names the paths, for the error message
    Raises CheckpointError if no path has a checkpoint.
    """
    sources = list(paths)
    for path in sources:
        if checkpoints := [path] if (path / MARKER).is_file() else candidates(path):
            return checkpoints[0]
    absent = "" if any(path.exists() for path in sources) else f", because it does not exist in {Path.cwd()}"
    raise CheckpointError(f"{key}: the path has no checkpoint{absent}; expected {EXPECTED}.")


def has_saved_before(folder: Path) -> bool:
    """Whether a run has saved into this folder, even if no complete checkpoint is left."""
    return (folder / POINTER).exists() or any(folder.glob("iter_*.corrupt-*"))


def temporary_of(folder: Path, step: int) -> Path:
    """A new name for the folder in which the checkpoint of `step` is written."""
    return folder / f"{name_of(step)}.tmp-{secrets.token_hex(4)}"


def check_writable(folder: Path) -> None:
    """Raise ConfigError if no checkpoint can be written.  Called before training begins."""
    try:
        temporary = temporary_of(folder, 0)
        temporary.mkdir(parents=True)
        temporary.rmdir()
    except OSError as error:
        raise ConfigError(f"run.dir = {folder.parent}: no checkpoint could be written: {error}.") from error


def publish(written: Path, step: int) -> Path:
    """Rename the complete folder `written` to its final name, and write `step` into the pointer.  Returns the new path.

    The caller has already flushed the files of the folder to disk.  Raises OSError.
    """
    folder, final = written.parent, written.with_name(name_of(step))
    flush(written)
    replaced = None
    if os.path.lexists(final):  # the run continues from an earlier step, and had saved this step before
        replaced = folder / f"{final.name}.replaced-{secrets.token_hex(4)}"
        os.rename(final, replaced)
    os.rename(written, final)
    flush(folder)
    write_pointer(folder, step)
    if replaced:
        _remove(replaced)
    return final


def write_pointer(folder: Path, step: int) -> None:
    """Replace the pointer atomically, and flush it to disk.  Raises OSError."""
    replace_text(folder / POINTER, str(step), sync=True)


def rename_abandoned(folder: Path, *, after: int, keep: int) -> list[Path]:
    """Rename the checkpoints with steps above `after`, except that of step `keep`.  Returns the new paths.

    after: the step from which the run resumed.  The checkpoints that keep their names then belong to one history.
    A symbolic link is not renamed.  It was made while the run trained, and the next start refuses it.
    """
    renamed = []
    for path in _named(folder):
        if after < int(path.name[5:]) != keep and path.is_dir() and not path.is_symlink():
            renamed.append(path.with_name(f"{path.name}.given-up-{secrets.token_hex(4)}"))
            os.rename(path, renamed[-1])
    return renamed


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove the folders that killed processes left while they saved or removed a checkpoint.  Returns their paths."""
    leftovers = [path for path in folder.iterdir() if _LEFT_OVER.fullmatch(path.name)] if folder.is_dir() else []
    for path in leftovers:
        _remove(path)
    return leftovers


def _remove(path: Path) -> None:
    """Remove a folder, or a symbolic link without its target."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint, so that no run continues from it.  Returns the checkpoint's new path."""
    renamed = path.with_name(f"{path.name}.corrupt-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    os.rename(path, renamed)
    return renamed


def remove_old(
    folder: Path,
    step: int,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_steps: Collection[int | None],
    report: Callable[[str], None],
) -> None:
    """Remove old checkpoints after the checkpoint of `step` was published.

    Keeps the last `keep_last` checkpoints, including that of `step`.  Also keeps the checkpoints of the steps in
    `keep_steps`, and of steps that are multiples of `keep_every`.  If `keep_last` is None, removes nothing.
    report: receives a warning if a checkpoint cannot be removed
    """
    if keep_last is None:
        return
    try:
        by_step = {int(path.name[5:]): path for path in published(folder)}
    except CheckpointError as error:  # the link was made while the run trained
        return report(f"WARNING: no checkpoint is removed: {error}")
    for old in retired(by_step, step, keep_last=keep_last, keep_every=keep_every, keep_steps=keep_steps):
        path = by_step[old]
        renamed = path.with_name(f"{path.name}.retired-{secrets.token_hex(4)}")
        try:
            os.rename(path, renamed)
            shutil.rmtree(renamed)
        except OSError as error:
            report(f"WARNING: {path} cannot be removed: {error}")


def retired(
    steps: Collection[int], step: int, *, keep_last: int, keep_every: int | None, keep_steps: Collection[int | None]
) -> list[int]:
    """The steps of `steps` whose checkpoints `remove_old` removes, lowest first."""
    older = sorted(other for other in steps if other < step)
    return [
        old
        for old in older[: max(0, len(older) - (keep_last - 1))]
        if old not in keep_steps and not (keep_every and old % keep_every == 0)
    ]
