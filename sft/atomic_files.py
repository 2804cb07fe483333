"""Atomic replacement of files.  After a crash at any instant, a reader finds either the old or the new content.

Decides how a file is replaced and when it is on the disk.  Does not decide what is in it.
"""

import os
from pathlib import Path


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
