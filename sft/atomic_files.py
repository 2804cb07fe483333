"""Files that are whole at any instant: a reader, or a machine that comes back after a crash, sees the old or the new.

Decides how a file is replaced and when the disk has it.  Does not decide what is in it.
"""

import os
from pathlib import Path


def replace_text(path: Path, content: str, *, sync: bool = False) -> None:
    """Put `content` in the place of the file, by a file beside it and a rename; with `sync`, on the disk for sure."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content, encoding="utf-8")
    if sync:
        flush(temporary)
    os.replace(temporary, path)
    if sync:
        flush(path.parent)


def flush(path: Path) -> None:
    """Have the disk hold a file; of a folder, the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
