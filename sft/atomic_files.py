"""Atomic replacement of files.  After a crash at any instant, a reader finds either the old or the new content.

Decides how a file is replaced, when it is on the disk, and in which words a failed write is reported.  Does not decide
what is in it.
"""

import errno
import os
from pathlib import Path

_FAULTS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota on this disk is used up",
    errno.EROFS: "the file system is read-only",
    errno.ENOENT: "the folder is gone",
    errno.ENOTDIR: "the folder is gone",
    errno.ESTALE: "the folder is gone",
    errno.EIO: "the disk reports an I/O error",
    errno.EACCES: "this user may not write there",
}
_FULL_BYTES = 1 << 20  # a failed write leaves less than this of a full disk


def replace_text(path: Path, content: str, *, sync: bool = False) -> None:
    """Replace the content of the file: write a file beside it, then rename that.  With `sync`, wait for the disk."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content, encoding="utf-8")
    if sync:
        flush(temporary)
    os.replace(temporary, path)
    if sync:
        flush(path.parent)


def flush(path: Path) -> None:
    """Wait until the disk holds a file; of a folder, the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def why_not_written(folder: Path, error: BaseException) -> str:
    """Why a write into the folder failed: "the disk is full (OSError: [Errno 28] ...)".

    The error's own number says why, or that of an error behind it.  A library may report only what it noticed later;
    then the file system is asked.  If that finds nothing wrong either, the error stands alone.
    """
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    fault = _FAULTS.get(_error_number(error) or _ask_file_system(folder))
    return f"{fault} ({message})" if fault else message


def _error_number(error: BaseException | None) -> int:
    """Of the error or the nearest one behind it that has one; else 0."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FAULTS:
            return error.errno
        error = error.__cause__ or error.__context__
    return 0


def _ask_file_system(folder: Path) -> int:
    """The number of the error that a write into the folder ends in now; 0: none."""
    try:
        there = os.statvfs(folder)
        if there.f_bavail * there.f_frsize < _FULL_BYTES or (there.f_files and not there.f_favail):
            return errno.ENOSPC
        probe = folder / f"probe.tmp-{os.getpid()}"
        try:
            probe.write_bytes(b"0")
            flush(probe)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return error.errno or 0
    return 0
