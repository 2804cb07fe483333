"""Calls functions of the user with the records of a run, on rank 0."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from sft.metrics.records import Record

Callback = Callable[[Record], Any]


@dataclass
class Callbacks:
    """A writer of records that calls functions of the user.  They watch the run, and change nothing in it.

    A function gets a copy of the record that metrics.jsonl has, after it is written there.  What it draws from torch's
    random numbers does not change those of the training.  After its first exception no function is called any more, and
    the run stops as after a stop signal: it saves, and `error` is that exception.

    stop  asks the run to stop, for the reason in the argument
    """

    on_step: Callback | None = None
    on_evaluation: Callback | None = None
    stop: Callable[[str], None] = field(default=lambda reason: None)
    error: Exception | None = None

    def write(self, record: Record) -> None:
        """Call the function for records of this kind, if there is one."""
        name, call = {"train": ("on_step", self.on_step), "eval": ("on_evaluation", self.on_evaluation)}.get(
            record["kind"], ("", None)
        )
        if call is None or self.error is not None:
            return
        try:
            with _own_random_numbers():
                call(copy.deepcopy(record))
        except Exception as error:  # any error of the user's code
            self.error = error
            self.stop(" ".join(f"{name} raised {type(error).__name__}: {error}".split()))

    def close(self, exit_code: int = 0) -> None:
        """Nothing is open."""


def _own_random_numbers() -> AbstractContextManager[Any]:
    """A context at whose end torch's random generators of the CPU and of this rank's GPU are as before."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    generators: AbstractContextManager[Any] = torch.random.fork_rng(devices=devices)
    return generators
