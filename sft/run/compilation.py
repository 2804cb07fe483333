"""Compiles FLA's kernels before the first pass, in one process of each node while the others wait, and prints
progress."""

import os
import time
from pathlib import Path

import torch

from sft.console import Console
from sft.hf.once_per_node import once_per_node
from sft.mcore.backend import AttentionBackend
from sft.mcore.linear_attention.fla_layer import FlaLayer

_TITLE = "compiling kernels of linear attention"


def compile_first(backend: AttentionBackend, device: torch.device, console: Console) -> None:
    """If the run uses kernels of FLA, compile them in one process of this node; the others then load them from Triton's
    cache."""
    kernels = [kernel for kernel in backend.kernels.values() if isinstance(kernel, FlaLayer)]
    if not kernels:
        return
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    before, started = _entries(folder), time.monotonic()
    console.say(f"{_TITLE}: minutes on the first run with these sizes; later runs find them in {folder}")

    def work() -> str:
        for kernel in kernels:
            kernel.compile(backend.config, device)
        return str(os.getpid())

    with console.watch(_TITLE, None, "entries of the cache", lambda: _entries(folder) - before):
        if once_per_node(_TITLE, work) != str(os.getpid()):
            work()
    new, seconds = _entries(folder) - before, time.monotonic() - started
    console.say(f"kernels of linear attention are ready after {seconds:.0f} s: {new:,} new entries in {folder}")


def _entries(folder: Path) -> int:
    """The number of entries of Triton's cache: compiled variants of kernels, and measurements."""
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
