"""Reads and copies files of a folder that is not trusted: a model, a checkpoint, a run.

The content of such a folder must not lead to reads or writes outside the folder.  So a name that is read from a file
must be a plain path below the folder.  A link may lead to another file of the folder, or from a snapshot in the cache
of the hub to a blob of the same model.  Pipes, sockets and devices are refused: a read would wait or never end.

The size of a file is checked before it is read, because parsed content takes many times the file's size in memory.
"""

import json
import os
import re
import shutil
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from sft.errors import printable

WORD_BYTES = 4096  # one word: the step of a pointer, the id of a run
CONFIG_BYTES = 16 << 20  # one object, such as config.json: at most 0.4 MB in released models
LIST_BYTES = 256 << 20  # a list of all tensors or files: the index of DeepSeek-V3, 671B, has 9 MB
LINE_BYTES = 4 << 20  # a line of a log: a record of metrics.jsonl has some 2 KB
METRICS_BYTES = 2 << 30  # metrics.jsonl of a million steps
_PART_BYTES = 255  # limit of file systems for a part of a path between two slashes


class UnsafeFileError(ValueError):
    """The error if a name is no plain path, a link leaves the folder, or a file is too large or not a regular file."""


def check_name(name: object) -> str:
    """Return `name` if it is a plain path below a folder, such as a.txt or b/a.txt.  Otherwise, raise
    UnsafeFileError."""
    parts = name.split("/") if isinstance(name, str) else []
    if not isinstance(name, str) or not parts or {"", ".", ".."} & {*parts}:
        fault = "is not the plain path of a file in the folder"
    elif "\\" in name or printable(name) != name or re.search(r"[\t\n]", name):
        fault = "has a backslash or a control character"
    elif any(len(part.encode()) > _PART_BYTES for part in parts) or len(parts) > 20:
        fault = "is longer than a name can be"
    else:
        return name
    raise UnsafeFileError(f"the name {_shown(name)} {fault}")


def is_name(name: object) -> bool:
    """Whether `check_name` accepts the name."""
    try:
        return bool(check_name(name))
    except UnsafeFileError:
        return False


def regular_file(folder: Path, name: str, max_bytes: int | None = None) -> Path:
    """The path of the regular file `name` in `folder`, without opening it.

    Raises OSError if there is no such file.  Raises UnsafeFileError if it is not a regular file, is a link to a file
    outside of `folder` and not in the hub's cache, or is larger than `max_bytes`.
    """
    path = folder / check_name(name)
    root = folder.resolve(strict=True)
    try:
        real = path.resolve(strict=True)
    except RuntimeError:  # links in a circle
        raise UnsafeFileError(f"{path} is a link that leads to itself") from None
    if not (real.is_relative_to(root) or _is_in_cache(real, root)):
        raise UnsafeFileError(f"{path} is a link out of the folder.  Replace it by a copy of the file")
    _check(path, os.stat(real), max_bytes)
    return path


def matching(folder: Path, pattern: str, max_bytes: int | None = None) -> list[Path]:
    """The regular files of `folder` that match a glob pattern, sorted.  Raises errors as `regular_file` does."""
    names = sorted(str(path.relative_to(folder)) for path in folder.glob(pattern) if not path.is_dir())
    return [regular_file(folder, name, max_bytes) for name in names]


def read(folder: Path, name: str, max_bytes: int) -> bytes:
    """The content of the file `name` of `folder`.  Raises UnsafeFileError and OSError."""
    return read_file(regular_file(folder, name), max_bytes)


def read_json(folder: Path, name: str, max_bytes: int) -> Any:
    """The JSON in the file `name` of `folder`.  Raises UnsafeFileError, ValueError, RecursionError and OSError."""
    return json.loads(read(folder, name, max_bytes).decode())


def read_file(path: Path, max_bytes: int) -> bytes:
    """The content of a file that the user named, wherever it is.  Raises UnsafeFileError and OSError."""
    with open_file(path, max_bytes) as file:
        return file.read(max_bytes)


def open_file(path: Path, max_bytes: int | None = None) -> BufferedReader:
    """A file that the user named, open for reading.  Raises UnsafeFileError and OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait for the writer of a pipe
    try:
        _check(path, os.fstat(handle), max_bytes)
        return open(handle, "rb")
    except BaseException:  # also an interrupt must leave no open file
        os.close(handle)
        raise


def copy(source: Path, name: str, target: Path, max_bytes: int | None = None) -> None:
    """Copy the file `name` of the folder `source` to the folder `target`.  Raises UnsafeFileError and OSError."""
    path, copied = regular_file(source, name, max_bytes), target / name
    copied.parent.mkdir(parents=True, exist_ok=True)
    if not copied.parent.resolve(strict=True).is_relative_to(target.resolve(strict=True)) or copied.is_symlink():
        raise UnsafeFileError(f"{copied} is a link that leaves {target}")
    shutil.copyfile(path, copied)


def _is_in_cache(real: Path, root: Path) -> bool:
    """Whether `root` is in a snapshot of the hub's cache, and `real` is a blob of the same model."""
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    return snapshots is not None and real.parent == snapshots.parent / "blobs"


def _check(path: Path, status: os.stat_result, max_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise UnsafeFileError(f"{path} is {kind}, not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise UnsafeFileError(f"{path} has {status.st_size:,} bytes; at most {max_bytes:,} are read")


def _shown(name: object) -> str:
    return ascii(name[:80]) if isinstance(name, str) else f"of the type {type(name).__name__}"


def bytes_in(folder: Path) -> int:
    """The bytes of the files of a folder, without its subfolders; 0 if there is no such folder."""
    return sum(entry.stat().st_size for entry in os.scandir(folder)) if folder.is_dir() else 0
