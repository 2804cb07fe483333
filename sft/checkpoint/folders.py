"""The checkpoints of a run as folders on a disk: which names count, in which order, how one appears and goes.

    run.dir/checkpoints/
        latest_checkpointed_iteration.txt      the newest step, Megatron-LM's name and content
        iter_0000100/                          complete: renamed to this once the disk has all of it
        iter_0000200.tmp-3f9c/                 being written, or left by a save that was killed
        iter_0000150.replaced-7a10/            a checkpoint of the same step, replaced by one just published
        iter_0000050.retired-c21d/             being removed, so that half of a checkpoint never has a final name
        iter_0000100.corrupt-20261120-193000/  found damaged when a run was to continue from it
        iter_0000400.given-up-b07a/            later than the step that the run was restarted from

One process at a time calls these functions: rank 0 of the run that holds the folder's lock.  What is in a checkpoint is
not known here.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from sft.atomic_files import flush, replace_text
from sft.errors import CheckpointError, ConfigError

POINTER = "latest_checkpointed_iteration.txt"
MARKER = "metadata.json"  # which core writes into every torch_dist checkpoint
EXPECTED = f"a folder iter_XXXXXXX with {MARKER}, or one that holds such folders"
_NAME = re.compile(r"iter_(\d{7,})")
_LEFT_OVER = re.compile(r"iter_\d{7,}\.(tmp|replaced|retired)-[0-9a-f]+")


def name_of(step: int) -> str:
    """100 -> iter_0000100"""
    return f"iter_{step:07d}"


def step_of(path: Path) -> int | None:
    """iter_0000100 -> 100; None for any other name"""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def published(folder: Path) -> list[Path]:
    """Checkpoints with a final name, lowest step first.  Each was complete when it was renamed."""
    if not folder.is_dir():
        return []
    checkpoints = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(checkpoints)]


def read_pointer(folder: Path) -> int | None:
    """The step that the pointer names; None where there is none.  Only digits: it becomes part of a path."""
    try:
        text = (folder / POINTER).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def candidates(folder: Path) -> list[Path]:
    """The checkpoints that a run may continue from, best first: the one that the pointer names, then the older ones.

    Later ones are used only where there is no other: the pointer was not yet moved to them, or the run went back.
    """
    newest_first = published(folder)[::-1]
    step = read_pointer(folder)
    return [path for path in newest_first if step is not None and int(path.name[5:]) <= step] or newest_first


def find(paths: Iterable[Path], key: str) -> Path:
    """The first of `paths` that is a checkpoint, or the best checkpoint in it.  key: what names it, for the error

    Raises CheckpointError where there is none.
    """
    for path in paths:
        if checkpoints := [path] if (path / MARKER).is_file() else candidates(path):
            return checkpoints[0]
    raise CheckpointError(f"{key}: no checkpoint there ({EXPECTED}).")


def has_saved_before(folder: Path) -> bool:
    """Whether a run has saved here, even if no complete checkpoint is left."""
    return (folder / POINTER).exists() or any(folder.glob("iter_*.corrupt-*"))


def make_temporary(folder: Path, step: int) -> Path:
    path = folder / f"{name_of(step)}.tmp-{secrets.token_hex(4)}"
    path.mkdir(parents=True)
    return path


def check_writable(folder: Path) -> None:
    """Raise ConfigError where no checkpoint could be written, before the first save tries."""
    try:
        make_temporary(folder, 0).rmdir()
    except OSError as error:
        raise ConfigError(f"run.dir = {folder.parent}: no checkpoint could be written: {error}.") from error


def publish(written: Path, step: int) -> Path:
    """Rename a complete folder to its final name, and move the pointer to it.  The disk must have its files."""
    folder, final = written.parent, written.with_name(name_of(step))
    flush(written)
    replaced = None
    if final.exists():  # from a run that was killed between the rename and the pointer
        replaced = folder / f"{final.name}.replaced-{secrets.token_hex(4)}"
        os.rename(final, replaced)
    os.rename(written, final)
    flush(folder)
    write_pointer(folder, step)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def write_pointer(folder: Path, step: int) -> None:
    replace_text(folder / POINTER, str(step), sync=True)


def rename_abandoned(folder: Path, *, after: int, keep: int) -> list[Path]:
    """Rename the checkpoints after step `after`, which the run was restarted from, except step `keep`: then those with
    a final name are all of one history.  Returns the new paths."""
    renamed = []
    for path in published(folder):
        if after < int(path.name[5:]) != keep:
            renamed.append(path.with_name(f"{path.name}.given-up-{secrets.token_hex(4)}"))
            os.rename(path, renamed[-1])
    return renamed


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what killed saves left; returns the removed paths."""
    leftovers = [path for path in folder.iterdir() if _LEFT_OVER.fullmatch(path.name)] if folder.is_dir() else []
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return leftovers


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing continues from it; returns its new path."""
    renamed = path.with_name(f"{path.name}.corrupt-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    os.rename(path, renamed)
    return renamed


def remove_old(
    folder: Path,
    step: int,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_steps: Iterable[int],
    report: Callable[[str], None],
) -> None:
    """Remove checkpoints before `step`, which has just been published.

    The last `keep_last`, `step` among them, the multiples of `keep_every` and `keep_steps` stay.  keep_last None: all.
    What cannot be removed is reported.
    """
    if keep_last is None:
        return
    older = [path for path in published(folder) if int(path.name[5:]) < step]
    for path in older[: max(0, len(older) - (keep_last - 1))]:
        older_step = int(path.name[5:])
        if older_step in keep_steps or (keep_every and older_step % keep_every == 0):
            continue
        renamed = path.with_name(f"{path.name}.retired-{secrets.token_hex(4)}")
        try:
            os.rename(path, renamed)
            shutil.rmtree(renamed)
        except OSError as error:
            report(f"warning: {path} cannot be removed: {error}")
