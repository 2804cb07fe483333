"""Replaces files atomically.  After a crash at any instant, a reader finds either the old or the new content.

This module also flushes files to disk, and turns disk errors into the message with which a command ends.  It decides
whether the same command may succeed later.  After a full or failing disk, or too many open files, it may: the error is
a StorageError.  After a wrong path or a missing permission, it fails again: the error is another SftError.
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
# Errors after which the same command may succeed later.
_PASSING = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT)
)
# Errors that the user has to correct.
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
    """A context manager that yields the path of a temporary file, which replaces `path` at the end of the block.

    Makes the folder of `path` if needed.  After an error, also in the block, `path` is unchanged, and the temporary
    file is removed.
    """
    path = path.resolve() if path.is_symlink() else path  # replaces the target of a link, not the link
    temporary = path.with_name(
        f".{path.name}.tmp-{secrets.token_hex(4)}{path.suffix}"
    )  # a library may choose the format by the ending
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
    """The reason why a write into the folder failed, such as "the disk is full (OSError: [Errno 28] ...)".

    The reason follows from the errno of the error or of an error that caused it.  A library may raise an error without
    errno; then the reason follows from a test write.  If the test write succeeds, the text has only the error.
    """
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    fault = {**_FAULTS, errno.EACCES: _MAY_NOT_WRITE}.get(_error_number(error) or _ask_file_system(folder))
    return f"{fault} ({message})" if fault else message


def unusable(message: str, folder: Path, error: OSError, kind: type[SftError] = ConfigError) -> SftError:
    """The error that ends the command, with `message` and the reason.

    A StorageError if the same command may succeed later, else an error of the class `kind`.
    folder: the folder of the file; it need not exist
    """
    if error.errno in _PASSING:
        return StorageError(f"{message}: {why_not_written(folder, error)}.  {_MEND}")
    return kind(f"{message}: {error}.")


@contextmanager
def explained() -> Iterator[None]:
    """A context manager that turns an OSError of the disk into a StorageError, and one of permissions into a
    ConfigError.

    Other OSErrors stay as they are, for example for a reset connection or a file that does not exist.
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
    """The reason for the error in words, such as the missing permission; None if its errno is not known."""
    if error.errno != errno.EACCES:
        return _FAULTS.get(error.errno or 0)
    path, missing = error.filename, []
    if path is not None and os.access(path, os.F_OK):  # the errno does not say whether a read or a write has failed
        missing = [name for name, mode in (("read", os.R_OK), ("write", os.W_OK)) if not os.access(path, mode)]
    return f"this user has no permission to {' or '.join(missing)} it" if missing else "this user has no permission"


def append(file: RawIOBase, content: bytes) -> None:
    """Write all of `content` at the end of an unbuffered file.

    The file must be unbuffered, because a buffered file would write the content again when it is closed after a failed
    write.
    """
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _error_number(error: BaseException | None) -> int:
    """The first known errno among the error and the errors that caused it; 0 if there is none."""
    while error is not None:
        if isinstance(error, OSError) and (error.errno == errno.EACCES or error.errno in _FAULTS):
            return error.errno
        error = error.__cause__ or error.__context__
    return 0


def _ask_file_system(folder: Path) -> int:
    """The errno with which a test write into the folder fails; 0 if it succeeds.

    Gives ENOSPC without a test write if the disk has less than 1 MiB or no file entry left.
    """
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
    """Why this user cannot create files in the folder `path`; None if this is possible.  Writes nothing.

    If `path` does not exist, checks whether it can be made.
    """
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not existing.is_dir():
        subject = "" if existing == path else f"is below {existing}, which "
        return f"{subject}is not a folder"
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        return f"cannot be written: {existing} is on a read-only file system"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"cannot be written: this user may make no files in {existing}"
    return None
