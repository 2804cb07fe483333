"""Checks that a process can make its process groups, for `train` and `evaluate`."""

import os
import sys
import threading

from sft.errors import ConfigError

_joined: set[tuple[str | None, str | None]] = set()  # MASTER_ADDR and MASTER_PORT where this process was a rank


def check_process(function: str) -> None:
    """Raise ConfigError if `function` cannot make its process group in this process.  function: train or evaluate"""
    if function == "train" and threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "sft.train was called in a thread, but a run receives its stop signals in the main thread of a process.  "
            "Call it there, or start `sft train` as a process."
        )
    if "RANK" in os.environ and _meeting_point() in _joined:
        raise ConfigError(
            "this process of torchrun has trained before or scored weights, and its ranks can meet only once.  Start "
            "one program with torchrun for each run; without torchrun, one process may do so again and again."
        )
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise ConfigError(
            f"this process has a process group of torch.distributed, but sft.{function} makes its own.  Call "
            f"torch.distributed.destroy_process_group() first, or {function} in another process."
        )


def joins() -> None:
    """Remember where this process meets the other ranks of torchrun, so that `check_process` refuses a second time."""
    if "RANK" in os.environ:
        _joined.add(_meeting_point())


def _meeting_point() -> tuple[str | None, str | None]:
    """The address and port of the store at which the ranks meet.

    The store keeps the addresses of the first run, so a second run needs another store.
    """
    return os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
