"""Allocates page-locked host memory in arenas: blocks of the wanted size, in which many tensors lie.

Copies between host and GPU run in the background only if the pages of the host memory are locked.  torch's allocator
rounds each such block up to a power of two, on average by a third.  An arena is rounded up to whole pages of 4 KiB.  It
is locked in one call, and released when neither the arena nor one of its tensors is in use.  When a process ends, the
driver releases its pages.  `device.py` calls CUDA.
"""

import mmap
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from sft.console import size
from sft.mcore import device as devices

ALIGNMENT = 64  # bytes; each tensor of an arena begins at a multiple of it, as vector instructions prefer
_POPULATED = 256 << 20  # bytes that `populate` touches between two checks of the free memory
_RESERVE = 4 << 30  # bytes that `populate` leaves free.  Several ranks of a machine populate at the same time
_PROCESSES, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def aligned(num_bytes: int) -> int:
    """The bytes that a tensor takes in an arena.  100 -> 128"""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """A block of host memory, which is page-locked if `device` is a GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises MemoryError, with the size and the reason, if the system cannot provide or lock so much memory.

        num_bytes: the sum of `aligned` over all tensors
        """
        self.num_bytes = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._used = 0
        try:
            self._mapping = _Mapping(-1, self.num_bytes, flags=mmap.MAP_PRIVATE)
        except OSError as error:
            raise MemoryError(f"{size(self.num_bytes)} of host memory cannot be allocated: {error.strerror}") from error
        if device.type == "cuda":
            try:
                self._mapping.lock(device)
            except (OSError, KeyError) as error:  # `_available` could not read how much memory is left
                raise _refused(self.num_bytes, f"{type(error).__name__}: {error}") from error

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in the next free bytes of the arena, with a storage of its own.  It keeps the arena alive."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        start, self._used = self._used, self._used + aligned(count * dtype.itemsize)
        assert self._used <= self.num_bytes, (self._used, self.num_bytes)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=start).view(shape)


class _Mapping(mmap.mmap):
    """Memory of this process whose pages are unlocked before they are freed."""

    locked: tuple[int, torch.device] | None = None  # the address, and the GPU for which the pages are locked

    def lock(self, device: torch.device) -> None:
        with suppress(OSError):  # a kernel without huge pages
            self.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
        self.madvise(mmap.MADV_DONTFORK)  # a forked process would copy locked pages
        memory = torch.frombuffer(self, dtype=torch.uint8)
        populate(memory)
        if (reason := devices.lock_pages(memory.data_ptr(), len(self), device)) is not None:
            raise _refused(len(self), reason)
        self.locked = memory.data_ptr(), device

    def __del__(self) -> None:
        if self.locked is not None and not sys.is_finalizing():
            devices.unlock_pages(*self.locked)


def populate(memory: Tensor) -> None:
    """Touch each page of `memory`, uint8 [n], so that Linux allocates it.

    While CUDA locks pages, other CUDA calls of the process wait.  Locking is faster if the pages exist already.

    Raises MemoryError if less than _RESERVE bytes of memory would be left, because Linux would kill a process when no
    memory is left.
    """
    for part in memory.split(_POPULATED):
        if (left := _available()) < _RESERVE:
            kept = f"{size(left)} of memory are left, and {size(_RESERVE)} are kept free"
            raise _refused(memory.nbytes, kept)
        part[:: mmap.PAGESIZE].zero_()


def _available() -> int:
    """Bytes that this process can still take from the machine, and from its job or container (cgroup, version 2)."""
    left = _numbers(_PROCESSES / "meminfo")["MemAvailable:"] << 10
    path = next(
        (line[3:] for line in (_PROCESSES / "self/cgroup").read_text().splitlines() if line.startswith("0::")), "/"
    )
    own = _GROUPS / path.lstrip("/")
    for group in (own, *own.parents):
        with suppress(OSError, ValueError):  # no limit: the file is missing, or holds a word
            limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            cached = _numbers(group / "memory.stat")
            left = min(left, limit - used + cached.get("active_file", 0) + cached.get("inactive_file", 0))
    return left


def _numbers(file: Path) -> dict[str, int]:
    """{first word of a line: the number after it}"""
    return {words[0]: int(words[1]) for line in file.read_text().splitlines() if len(words := line.split()) > 1}


def _refused(num_bytes: int, reason: str) -> MemoryError:
    return MemoryError(f"{size(num_bytes)} of host memory cannot be page-locked: {reason}")
