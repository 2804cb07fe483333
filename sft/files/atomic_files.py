"""Replaces files atomically.  After a crash at any instant, a reader finds either the old or the new content.

This module also flushes files to disk, and turns errors of a disk into the one sentence with which a command ends.  It
decides whether another start may succeed without a change: after a full or failing disk, or while too many files are
open, it may (StorageError).  After a wrong path or a missing permission it does not.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path

from sft.errors import ConfigError, SftError, StorageError

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
}
_MAY_NOT_WRITE = "this user has no permission to write to the folder"
_FULL_BYTES = 1 << 20  # a disk with fewer free bytes after a failed write counts as full
_PASSING = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT)
)
_OF_THE_USER = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))
_MEND = "Start the command again when this is mended."


def replace_text(path: Path, content: str, *, sync: bool = False) -> None:
    """Replace the content of the file: write a temporary file, then rename it.  With `sync`, also flush to disk."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content, encoding="utf-8")
    if sync:
        flush(temporary)
    os.replace(temporary, path)
    if sync:
        flush(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file in the folder of `path`, which is made if needed.  It replaces `path` at the end of the block.

    After an error, also of the caller, `path` is what it was, and no temporary file is left.
    """
    path = path.resolve() if path.is_symlink() else path  # what a link leads to is replaced, not the link
    temporary = path.with_name(
        f".{path.name}.tmp-{secrets.token_hex(4)}{path.suffix}"
    )  # a library may go by the ending
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


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
    fault = {**_FAULTS, errno.EACCES: _MAY_NOT_WRITE}.get(_error_number(error) or _ask_file_system(folder))
    return f"{fault} ({message})" if fault else message


def unusable(message: str, folder: Path, error: OSError, kind: type[SftError] = ConfigError) -> SftError:
    """The error that ends the command, `message` and the reason.

    It is a StorageError if another start may succeed, else of this kind.  The file is, or should be, in `folder`.
    """
    if error.errno in _PASSING:
        return StorageError(f"{message}: {why_not_written(folder, error)}.  {_MEND}")
    return kind(f"{message}: {error}.")


@contextmanager
def explained() -> Iterator[None]:
    """Replace an error of a disk that no other part of the program has explained by one sentence.

    A lost connection, an ended process and a file that does not exist keep their tracebacks.
    """
    try:
        yield
    except OSError as error:
        path = "a file" if error.filename is None else str(error.filename)
        message = f"{path} cannot be read or written: {_fault_of(error) or error.strerror} (OSError: {error})."
        if error.errno in _PASSING:
            raise StorageError(f"{message}  {_MEND}") from error
        if error.errno in _OF_THE_USER:
            raise ConfigError(message) from error
        raise


def _fault_of(error: OSError) -> str | None:
    """The reason of the error in words, if its errno is a known one.  It names the permission that is missing."""
    if error.errno != errno.EACCES:
        return _FAULTS.get(error.errno or 0)
    path, missing = error.filename, []
    if path is not None and os.access(path, os.F_OK):  # the errno does not say whether a read or a write has failed
        missing = [name for name, mode in (("read", os.R_OK), ("write", os.W_OK)) if not os.access(path, mode)]
    return f"this user has no permission to {' or '.join(missing)} it" if missing else "this user has no permission"


def append(file: RawIOBase, content: bytes) -> None:
    """Write all of `content` at the end of an unbuffered file.  A buffer would write it once more when it is closed."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _error_number(error: BaseException | None) -> int:
    """The errno of the error, or of the nearest error that caused it, if `_FAULTS` lists it; else 0."""
    while error is not None:
        if isinstance(error, OSError) and (error.errno == errno.EACCES or error.errno in _FAULTS):
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
