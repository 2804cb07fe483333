"""The manifest of a checkpoint: size and SHA-256 of each of its files, in `manifest.json` beside them.

A flipped bit inside a shard is loaded without an error and changes the weights; only a digest shows it.  The manifest
is written last.  What the files hold is not known here.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sft.atomic_files import replace_text
from sft.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "sft checkpoint 1"
Verify = Literal["off", "size", "full"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint by name, and facts that only people read."""

    files: dict[str, Entry]
    facts: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files.values())


def entry_of(path: Path) -> Entry:
    """Size and digest of a file.  Reads all of it: 1 to 2 GB/s a core where the page cache has it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return Entry(num_bytes=file.tell(), sha256=digest.hexdigest())


class HashingFile:
    """A new file, whose size and digest are known once it is written.

    An OSError of `write` is kept for `check` and `finish`: raised inside torch.save, which writes into this file, it
    would become an error of torch, by version another one.
    """

    def __init__(self, path: Path) -> None:
        self._stream, self._digest, self.num_bytes = path.open("wb", buffering=0), hashlib.sha256(), 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                self._put(view)
            except OSError as error:
                self._error = error
        self._digest.update(view)
        self.num_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """torch.save calls it."""

    def check(self) -> None:
        """Raise the OSError of an earlier write."""
        if self._error is not None:
            raise self._error

    def finish(self) -> Entry:
        """Have the disk take the file, and close it."""
        self.check()
        os.fsync(self._stream.fileno())
        self.close()
        return Entry(num_bytes=self.num_bytes, sha256=self._digest.hexdigest())

    def close(self) -> None:
        self._stream.close()

    def _put(self, view: memoryview) -> None:
        written = 0
        while written < len(view):
            written += self._stream.write(view[written:])


def write(folder: Path, manifest: Manifest) -> None:
    files = {name: {"bytes": e.num_bytes, "sha256": e.sha256} for name, e in sorted(manifest.files.items())}
    content = {"format": FORMAT, **manifest.facts, "files": files}
    replace_text(folder / NAME, json.dumps(content, indent=1) + "\n", sync=True)


def read(folder: Path) -> Manifest | None:
    """None where there is none, as in a checkpoint of Megatron-LM.  Raises CheckpointError where it is damaged."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {
            name: Entry(num_bytes=int(entry["bytes"]), sha256=str(entry["sha256"]))
            for name, entry in content.pop("files").items()
        }
        known = content.pop("format") == FORMAT
    except OSError:  # no damage of the file: a server that does not answer, a stale handle
        raise
    except Exception as error:  # whatever error a damaged file causes
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).") from error
    if not known:
        raise CheckpointError(f"{path} is not of the format {FORMAT}: written by another version of this trainer.")
    if unsafe := [name for name in files if not _is_plain(name)]:
        raise CheckpointError(f"{path} names {unsafe[0]!r}, which does not lie in this folder.")
    return Manifest(files=files, facts=content)


def damage(folder: Path, manifest: Manifest, *, verify: Verify, share: tuple[int, int] = (0, 1)) -> list[str]:
    """One line for each file that is not as it was written.

    Raises OSError where a file cannot be read at the moment: that is no damage, and no reason to rename the checkpoint.

    share: (i, n) reads the i-th of n even parts when `verify` is full; part 0 checks all sizes
    """
    if verify == "off":
        return []
    index, num_shares = share
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].num_bytes, name))
    problems = []
    for name in by_size if index == 0 else by_size[index::num_shares]:
        path, entry = folder / name, manifest.files[name]
        if problem := _size_problem(path, entry):
            problems.append(problem)
        elif verify == "full" and name in by_size[index::num_shares] and entry_of(path) != entry:
            problems.append(f"{path} is not what was written: its SHA-256 is another one")
    return problems


def refuse(folder: Path, problems: Sequence[str]) -> None:
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems)}.")


def _size_problem(path: Path, entry: Entry) -> str | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return f"{path} is missing"
    except ValueError as error:
        return f"{path} is a name that no file can have: {error}"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"{path} is a name that no file can have: {error.strerror}"
        raise
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a plain file"
    if status.st_size != entry.num_bytes:
        return f"{path} has {status.st_size:,} bytes, was written with {entry.num_bytes:,}"
    return None


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name


def names_in(folder: Path) -> Sequence[str]:
    """Names of all files of a checkpoint except the manifest."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.name != NAME)


def bytes_in(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in names_in(folder))
