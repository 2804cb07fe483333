"""What every file of a checkpoint has to be: its size and its SHA-256, in `manifest.json` beside them.

A bit that flips inside a shard is loaded without a word, and changes the weights: only a digest tells.  The manifest
is the last file to be written.  Does not know what the files hold.
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
    """One file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint by name, and facts for people."""

    files: dict[str, Entry]
    facts: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files.values())


def entry_of(path: Path) -> Entry:
    """Read a file whole: 1 to 2 GB/s a core, from memory where it was just written."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return Entry(num_bytes=file.tell(), sha256=digest.hexdigest())


def write(folder: Path, manifest: Manifest) -> None:
    """Complete the checkpoint in `folder`."""
    files = {name: {"bytes": e.num_bytes, "sha256": e.sha256} for name, e in sorted(manifest.files.items())}
    content = {"format": FORMAT, **manifest.facts, "files": files}
    replace_text(folder / NAME, json.dumps(content, indent=1) + "\n", sync=True)


def read(folder: Path) -> Manifest | None:
    """None where there is none: a checkpoint of Megatron-LM.  Raises CheckpointError where it is not readable."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {
            name: Entry(num_bytes=int(told["bytes"]), sha256=str(told["sha256"]))
            for name, told in content.pop("files").items()
        }
        known = content.pop("format") == FORMAT
    except OSError:  # says nothing of the file: a server that does not answer, a stale handle
        raise
    except Exception as error:  # whatever a damaged file can provoke
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).") from error
    if not known:
        raise CheckpointError(f"{path} is not of the format {FORMAT}: written by another version of this trainer.")
    if unsafe := [name for name in files if not _is_plain(name)]:
        raise CheckpointError(f"{path} names {unsafe[0]!r}, which does not lie in this folder.")
    return Manifest(files=files, facts=content)


def damage(folder: Path, manifest: Manifest, *, verify: Verify, share: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with the files, one line each; nothing where they are as they were written.

    A file that cannot be read just now is no damage: that raises OSError, and nobody puts a good checkpoint aside.

    share: (i, n) reads the i-th of n even parts when `verify` is full; sizes are looked at by part 0
    """
    if verify == "off":
        return []
    index, num_shares = share
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].num_bytes, name))
    found = []
    for name in by_size if index == 0 else by_size[index::num_shares]:
        wrong = _wrong_size(folder / name, manifest.files[name])
        if wrong is None and verify == "full" and name in by_size[index::num_shares]:
            wrong = _wrong_content(folder / name, manifest.files[name])
        found += [wrong] if wrong else []
    return found


def _wrong_size(path: Path, entry: Entry) -> str | None:
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


def _wrong_content(path: Path, entry: Entry) -> str | None:
    same = entry_of(path) == entry
    return None if same else f"{path} is not what was written: its SHA-256 is another one"


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name


def names_in(folder: Path) -> Sequence[str]:
    """Every file of a checkpoint but the manifest."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.name != NAME)
