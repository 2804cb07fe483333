"""Records a start that is refused before it begins.

`Lifecycle` records how a start ends after it has begun.  A start that is refused earlier, for example because its data
file does not exist, has no start id, and usually no lock.  Without a record of the refusal, run_state.json would still
contain the end of the previous start, and a script that calls `sft status` would restart the run forever.

Refusals by a machine or a network (no driver, no answer from the hub) are not recorded, because the same start may
succeed on another machine.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from sft.errors import MAY_SUCCEED, SftError
from sft.files.atomic_files import why_no_folder
from sft.run import status
from sft.run.lock import RunLock, is_gone


@contextmanager
def recorded(folder: Path, *, is_locked: bool = False, is_writer: bool | None = None) -> Iterator[None]:
    """A context that records in run_state.json of `folder` an SftError that ends the block, and raises it.

    The folder is made if needed.  An error after which the same start may succeed (`MAY_SUCCEED`) is not recorded.
    is_locked: whether this process holds the lock of the folder.  If not, nothing is written while another run may be
    alive there.
    is_writer: whether this rank writes; None: rank 0 does
    """
    try:
        yield
    except SftError as error:
        writes = os.environ.get("RANK", "0") == "0" if is_writer is None else is_writer
        if writes and not isinstance(error, MAY_SUCCEED):
            _record(folder, error, is_locked=is_locked)
        raise


def _record(folder: Path, error: SftError, *, is_locked: bool) -> None:
    if why_no_folder(folder) is not None:  # nothing can be written there
        return
    try:
        if is_locked or is_gone(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # A lock in the folder belongs to a process that has ended, so RunLock replaces it at once.
            with nullcontext() if is_locked else RunLock(folder, report=lambda line: None):
                status.refuse(folder, error)
    except (OSError, SftError) as unwritable:
        with suppress(OSError):  # a closed terminal
            print(f"WARNING: {folder}/{status.FILE} does not say so: {unwritable}", file=sys.stderr, flush=True)
