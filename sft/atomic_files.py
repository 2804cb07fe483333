"""Replaces files atomically.  After a crash at any instant, a reader finds either the old or the new content.

This module also flushes files to disk, and describes why a write failed.
"""

import errno
import os
from io import RawIOBase
from pathlib import Path

_FAULTS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota on this disk is used up",
    errno.EROFS: "the file system is read-only",
    errno.ENOENT: "the folder no longer exists",
    errno.ENOTDIR: "the folder no longer exists",
    errno.ESTALE: "the folder no longer exists",
    errno.EIO: "the disk reports an I/O error",
    errno.EMFILE: "this process has as many open files as it may have (ulimit -n)",
    errno.ENFILE: "the system has as many open files as it may have",
    errno.ENOMEM: "the system has too little memory",
    errno.EACCES: "this user has no permission to write to the folder",
}
_FULL_BYTES = 1 << 20  # a disk with fewer free bytes after a failed write counts as full


def replace_text(path: Path, content: str, *, sync: bool = False) -> None:
    """Replace the content of the file: write a temporary file, then rename it.  With `sync`, also flush to disk."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content, encoding="utf-8")
    if sync:
        flush(temporary)
    os.replace(temporary, path)
    if sync:
        flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file to disk.  For a folder, flush the list of its files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def why_not_written(folder: Path, error: BaseException) -> str:
    """The reason why a write into the folder failed: "the disk is full (OSError: [Errno 28] ...)".

    The reason comes from the errno of the error or of an error that caused it.  A library may raise an error without
    errno; then a test write gives the reason.  If the test write succeeds, the text is the error alone.
    """
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    fault = _FAULTS.get(_error_number(error) or _ask_file_system(folder))
    return f"{fault} ({message})" if fault else message


def fault_of(error: OSError) -> str | None:
    """The reason of the error in words, if its errno is a known one."""
    return _FAULTS.get(error.errno or 0)


def append(file: RawIOBase, content: bytes) -> None:
    """Write all of `content` at the end of an unbuffered file.  A buffer would write it once more when it is closed."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _error_number(error: BaseException | None) -> int:
    """The errno of the error, or of the nearest error that caused it, if `_FAULTS` lists it; else 0."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FAULTS:
            return error.errno
        error = error.__cause__ or error.__context__
    return 0


def _ask_file_system(folder: Path) -> int:
    """The errno with which a write into the folder fails now; 0 if it succeeds."""
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


def why_no_folder(path: Path) -> str | None:
    """Why `path` is no folder in which files can be made, and cannot become one; None if it can.  Writes nothing."""
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not existing.is_dir():
        subject = "" if existing == path else f"is below {existing}, which "
        return f"{subject}is not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"cannot be written: this user may make no files in {existing}"
    return None
