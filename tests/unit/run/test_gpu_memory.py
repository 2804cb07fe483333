"""The line about the GPU's memory outside of torch's allocator."""

import io

import pytest
import torch

from sft.console import Console
from sft.mcore.device import memory_outside_torch
from sft.run.gpu_memory import GpuMemory
from tests.unit.fixtures.layouts import of_millions

GIB = 2**30


def test_it_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB, 12 are free, and torch has reserved 60."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60 * GIB)
    log = io.StringIO()
    memory = GpuMemory(*of_millions(), torch.device("cuda", 0), Console(0, log))
    memory.after_step()
    memory.after_step()
    assert log.getvalue().count("GPU memory outside of torch's allocator: 8.00 GiB (used") == 1


def test_there_is_none_on_a_cpu() -> None:
    log = io.StringIO()
    GpuMemory(*of_millions(), torch.device("cpu"), Console(0, log)).after_step()
    assert log.getvalue() == "" and memory_outside_torch(torch.device("cpu")) is None
