"""Records a start that is refused before it begins.

`Lifecycle` records how a start ends that has begun.  A start that is refused before, as one whose data file does not
exist, has no start id, and most often no lock.  Without a record, run_state.json would still say how the start before
it ended, and a script that asks `sft status` would start the run again without end.

What a machine or a network refuses (no driver, no answer of the hub) is not recorded: the same start may succeed on
another machine.
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
def recorded(folder: Path, *, is_locked: bool = False) -> Iterator[None]:
    """Write a mistake of the user that ends the block into run_state.json of `folder`, which is made if needed.

    is_locked: whether this process holds the lock of the folder.  If not, nothing is written while another run may be
    alive there.  Rank 0 writes.  An error after which the same start may succeed is not written.
    """
    try:
        yield
    except SftError as error:
        if not isinstance(error, MAY_SUCCEED) and os.environ.get("RANK", "0") == "0":
            _record(folder, error, is_locked=is_locked)
        raise


def _record(folder: Path, error: SftError, *, is_locked: bool) -> None:
    if why_no_folder(folder) is not None:  # the refusal is about the folder
        return
    try:
        if is_locked or is_gone(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # A lock that is left was that of a process that has ended, so nothing waits.
            with nullcontext() if is_locked else RunLock(folder, report=lambda line: None):
                status.refuse(folder, error)
    except (OSError, SftError) as unwritable:
        with suppress(OSError):  # a closed terminal
            print(f"warning: {folder}/{status.FILE} does not say so: {unwritable}", file=sys.stderr, flush=True)
