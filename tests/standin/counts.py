"""What this process, which runs on the stand-in, did so far.  Names and order as in cuda.c."""

import ctypes
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Counts:
    waits: int = 0  # of the host for the device; waiting again for what is done does not count
    kernels: int = 0  # a product of matrices and an attention of cuDNN's are one each
    most_host_bytes: int = 0  # page-locked at a time

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before))))


def counted() -> Counts:
    numbers = (ctypes.c_long * len(astuple(Counts())))()
    ctypes.CDLL(None).standin_counts(numbers)
    return Counts(*numbers)
