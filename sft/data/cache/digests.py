"""Computes the digests of data files, and remembers them in the cache, so that later starts read no raw data.

    cache_dir/digests/5c1e....json    {"path": "/data/chat.jsonl", "state": [...], "sha256": "3f..."}

A digest is used again as long as the file's path, size, inode number, mtime and ctime are unchanged.  Every program
that writes to a file changes mtime or ctime.  Clocks have limited resolution, so a digest is not remembered if the file
was changed less than two seconds before it was read.
"""

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

from sft.files.atomic_files import replacing

FOLDER = "digests"
_RECENT_NS = 2_000_000_000  # the coarsest resolution of a file system's clock (FAT)


def content_digest(path: Path, cache_dir: Path) -> str:
    """SHA-256 of the bytes of a file, or of the names and digests of all files in a folder and its subfolders.

    Raises OSError if a file cannot be read.
    """
    if path.is_dir():
        parts = [f"{part.relative_to(path)} {content_digest(part, cache_dir)}" for part in files_of(path)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    name = str(path.absolute())
    memo = cache_dir / FOLDER / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
    before = _state(path)
    if (digest := _remembered(memo, name, before)) is not None:
        return digest
    started = time.time_ns()
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    _, _, modified_ns, changed_ns = before
    if _state(path) == before and max(modified_ns, changed_ns) + _RECENT_NS < started:
        with suppress(OSError), replacing(memo) as temporary:  # without a memo, the next start reads the file again
            temporary.write_text(json.dumps({"path": name, "state": before, "sha256": digest}), encoding="utf-8")
    return digest


def files_of(folder: Path) -> list[Path]:
    """All files in a folder and its subfolders, sorted by path."""
    return sorted(part for part in folder.rglob("*") if part.is_file())


def _state(path: Path) -> list[int]:
    """Size in bytes, inode number, mtime and ctime in ns; at least one changes when the file is written."""
    stat = path.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _remembered(memo: Path, name: str, state: list[int]) -> str | None:
    try:
        content = json.loads(memo.read_text(encoding="utf-8"))
        return str(content["sha256"]) if (content["path"], content["state"]) == (name, state) else None
    except (OSError, ValueError, KeyError, TypeError):  # nothing is remembered, or the memo is damaged
        return None
