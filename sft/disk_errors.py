"""Turns errors of the operating system into the one sentence with which a command ends.

Decides whether another start may succeed without a change: after a full or failing disk, or while too many files are
open, it may (StorageError).  After a wrong path or a missing permission it does not.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sft.atomic_files import fault_of, why_not_written
from sft.errors import ConfigError, SftError, StorageError

_PASSING = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT)
)
_OF_THE_USER = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))
_MEND = "Start the command again when this is mended."


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
        message = f"{path} cannot be read or written: {fault_of(error) or error.strerror} (OSError: {error})."
        if error.errno in _PASSING:
            raise StorageError(f"{message}  {_MEND}") from error
        if error.errno in _OF_THE_USER:
            raise ConfigError(message) from error
        raise
