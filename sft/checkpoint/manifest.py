"""Reads, writes and checks `manifest.json`: facts about a checkpoint, and the size and SHA-256 of each of its files.

A file with a flipped bit loads without an error, but with wrong weights.  Only a digest detects a flipped bit.  The
manifest is written after all other files.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sft.errors import CheckpointError, first_few
from sft.files.atomic_files import replace_text
from sft.files.file_digest import Entry, entry_of
from sft.files.folder_files import LIST_BYTES, is_name, read_json
from sft.parallel.messages import message

NAME = "manifest.json"
FORMAT = "sft checkpoint 1"
Verify = Literal["off", "size", "full"]


@message
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint by name, and facts about the checkpoint.

    In a checkpoint of a run, the facts are "step", "time", the TrainState ("state") and the fields of Conditions.
    Manifests of exports, imports and older versions have other facts.
    """

    files: dict[str, Entry]
    facts: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files.values())


message(Entry)


def write(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, and flush it to disk.  Raises OSError."""
    files = {name: {"bytes": e.num_bytes, "sha256": e.sha256} for name, e in sorted(manifest.files.items())}
    content = {"format": FORMAT, **manifest.facts, "files": files}
    replace_text(folder / NAME, json.dumps(content, indent=1) + "\n", sync=True)


def digest(folder: Path) -> str | None:
    """SHA-256 of manifest.json, which identifies a checkpoint at any path; None if there is no manifest."""
    try:
        return entry_of(folder / NAME).sha256
    except (FileNotFoundError, NotADirectoryError):
        return None


def read(folder: Path) -> Manifest | None:
    """The manifest; None if the checkpoint has none (Megatron-LM).

    Raises CheckpointError if the manifest is damaged or has another format.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        content = read_json(folder, NAME, LIST_BYTES)
        files = {
            name: Entry(num_bytes=int(entry["bytes"]), sha256=str(entry["sha256"]))
            for name, entry in content.pop("files").items()
        }
        known = content.pop("format") == FORMAT
    except OSError:  # the disk or file server fails, which does not mean that the file is damaged
        raise
    except Exception as error:  # a damaged file may cause any error
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).") from error
    if not known:
        raise CheckpointError(f"{path} does not have the format {FORMAT}; another version of this trainer wrote it.")
    if unsafe := [name for name in files if "/" in name or not is_name(name)]:
        raise CheckpointError(f"{path} names {unsafe[0][:80]!r}, which is not a file name in this folder.")
    return Manifest(files=files, facts=content)


def damage(folder: Path, manifest: Manifest, *, verify: Verify, share: tuple[int, int] = (0, 1)) -> list[str]:
    """One line for each file that differs from its manifest entry.

    share: (i, n): only share i of n shares of the files is checked; share 0 also includes the sizes of all files
    verify: "size" compares sizes only, "full" also digests; "off" compares nothing
    Raises OSError if a file cannot be read at the moment, which does not mean that the checkpoint is damaged.
    """
    if verify == "off":
        return []
    index, num_shares = share
    own = shares(manifest, num_shares)[index]
    problems = []
    for name in manifest.files if index == 0 else own:
        path, entry = folder / name, manifest.files[name]
        if problem := _size_problem(path, entry):
            problems.append(problem)
        elif verify == "full" and name in own and entry_of(path) != entry:
            problems.append(f"{path} differs from the file that was saved: its SHA-256 is another")
    return problems


def shares(manifest: Manifest, count: int) -> list[list[str]]:
    """The names of the files, divided into `count` shares.

    If exactly `count` ranks wrote shards, share i has the files that rank i wrote.  On the same layout, rank i then
    loads its optimizer states from files that its node has in the page cache.  Otherwise the numbers of files in the
    shares differ by at most 1.
    """
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].num_bytes, name))
    writers = {name: int(match[1]) if (match := re.match(r"__(\d+)_", name)) else 0 for name in by_size}
    if set(writers.values()) == set(range(count)):
        return [[name for name in by_size if writers[name] == rank] for rank in range(count)]
    return [by_size[index::count] for index in range(count)]


def refuse(folder: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError with the first few problems, if there are any."""
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(first_few(problems))}.")


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
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if status.st_size != entry.num_bytes:
        return f"{path} has {status.st_size:,} bytes; the save wrote {entry.num_bytes:,}"
    return None


def names_in(folder: Path) -> Sequence[str]:
    """Names of all files of a checkpoint except the manifest."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.name != NAME)


def bytes_in(folder: Path) -> int:
    """The bytes of all files of a checkpoint except the manifest."""
    return sum((folder / name).stat().st_size for name in names_in(folder))
