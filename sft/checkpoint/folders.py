"""The checkpoints of a run as names on a disk.

    run.dir/checkpoints/
        latest_checkpointed_iteration.txt      the newest step, Megatron-LM's name and content
        iter_0000100/                          whole: named so, in one rename, when the disk has all of it
        iter_0000200.tmp-3f9c/                 being written, or left by a save that was killed
        iter_0000150.replaced-7a10/            what stood in the place of one just published
        iter_0000050.retired-c21d/             being removed: part of a checkpoint never has a final name
        iter_0000100.corrupt-20261120-193000/  found damaged when a run was to go on from it
        iter_0000400.given-up-b07a/            of a continuation that was left: the run went back before it, and on

Decides which names count, in which order, and how one comes and goes.  One process at a time calls these functions:
rank 0 of the run that holds the folder's lock.  What is in a checkpoint is not known here.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from sft.atomic_files import flush, replace_text

POINTER = "latest_checkpointed_iteration.txt"
MARKER = "metadata.json"  # core's sign of a torch_dist checkpoint
_NAME = re.compile(r"iter_(\d{7,})")
_LEFT_OVER = re.compile(r"iter_\d{7,}\.(tmp|replaced|retired)-[0-9a-f]+")


def name_of(step: int) -> str:
    """100 -> iter_0000100"""
    return f"iter_{step:07d}"


def step_of(path: Path) -> int | None:
    """iter_0000100 -> 100; None for any other name"""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def published(folder: Path) -> list[Path]:
    """Checkpoints with a final name, lowest step first.  Whether one is whole is not asked: it was, to get the name."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def is_one(path: Path) -> bool:
    """Whether `path` itself is a checkpoint, by its looks."""
    return (path / MARKER).is_file()


def pointed(folder: Path) -> int | None:
    """The step that the pointer names; None where there is no pointer, or something else in it.

    Its content becomes part of a path, so it has to be digits and nothing more.
    """
    try:
        text = (folder / POINTER).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def candidates(folder: Path) -> list[Path]:
    """What a run may go on from, best first: the one pointed at, then the older ones.

    Higher steps than the one pointed at were not pointed at yet, or are given up: they count where nothing else does.
    """
    newest_first = published(folder)[::-1]
    step = pointed(folder)
    return [path for path in newest_first if step is not None and int(path.name[5:]) <= step] or newest_first


def was_used(folder: Path) -> bool:
    """Whether a run has saved here, even if nothing whole is left of it."""
    return (folder / POINTER).exists() or any(folder.glob("iter_*.corrupt-*"))


def temporary(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into, under a name that nothing else has."""
    path = folder / f"{name_of(step)}.tmp-{secrets.token_hex(4)}"
    path.mkdir(parents=True)
    return path


def probe(folder: Path) -> None:
    """Raise OSError where checkpoints could not be written, now rather than at the first save."""
    temporary(folder, 0).rmdir()


def publish(written: Path, step: int) -> Path:
    """Give a complete folder, which the disk has, its final name, and point at it."""
    folder, final = written.parent, written.with_name(name_of(step))
    flush(written)
    replaced = None
    if final.exists():  # renamed, and not pointed at yet, by a run that was killed just then
        replaced = folder / f"{final.name}.replaced-{secrets.token_hex(4)}"
        os.rename(final, replaced)
    os.rename(written, final)
    flush(folder)
    point(folder, step)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def point(folder: Path, step: int) -> None:
    """Make `step` the one to go on from."""
    replace_text(folder / POINTER, str(step), sync=True)


def give_up(folder: Path, *, above: int, but: int) -> list[Path]:
    """Take final names from all checkpoints after step `above`, from where the run has gone on, except step `but`.

    Then every final name is of one history, and "the next older one" of one that led here.  Where they are now.
    """
    moved = []
    for path in published(folder):
        if above < int(path.name[5:]) != but:
            moved.append(path.with_name(f"{path.name}.given-up-{secrets.token_hex(4)}"))
            os.rename(path, moved[-1])
    return moved


def sweep(folder: Path) -> list[Path]:
    """Remove what killed saves left; what was removed."""
    found = [path for path in folder.iterdir() if _LEFT_OVER.fullmatch(path.name)] if folder.is_dir() else []
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def quarantine(path: Path) -> Path:
    """Take a damaged checkpoint out of the way, to be looked at; where it is now."""
    away = path.with_name(f"{path.name}.corrupt-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    os.rename(path, away)
    return away


def retire(
    folder: Path,
    step: int,
    *,
    keep_last: int | None,
    keep_every: int | None,
    kept: Iterable[int],
    tell: Callable[[str], None],
) -> None:
    """Remove what need not stay, now that `step` is published: all but the last `keep_last` up to it, the multiples of
    `keep_every` and the steps in `kept`.  What cannot be removed is told."""
    if keep_last is None:
        return
    older = [path for path in published(folder) if int(path.name[5:]) < step]
    for path in older[: max(0, len(older) - (keep_last - 1))]:
        its_step = int(path.name[5:])
        if its_step in kept or (keep_every and its_step % keep_every == 0):
            continue
        away = path.with_name(f"{path.name}.retired-{secrets.token_hex(4)}")
        try:
            os.rename(path, away)
            shutil.rmtree(away)
        except OSError as error:
            tell(f"warning: {path} cannot be removed: {error}")
