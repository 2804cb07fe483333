"""Drops files from the page cache, reads them into it, and counts their bytes in it."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path


def forget(files: Iterable[Path]) -> None:
    """Drop the files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill(files: Iterable[Path]) -> None:
    """Read the files, so that the page cache holds them."""
    for file in files:
        with file.open("rb") as opened:
            while opened.read(16 << 20):
                pass


def num_bytes(files: Iterable[Path]) -> int:
    """Bytes of the files that are in the page cache."""
    libc, pages = ctypes.CDLL(None, use_errno=True), 0
    for file in files:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
            resident = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), resident):
                raise OSError(ctypes.get_errno(), "mincore")
            pages += sum(page & 1 for page in resident)
    return pages * mmap.PAGESIZE
