"""Records the allocations of torch's CUDA allocator on the current device, with the Python stack of each."""

from collections.abc import Callable
from typing import Any

import torch

from tests.allocations.categories import Event

_MOST = 10_000_000  # entries of the history


def events_of(run: Callable[[], Any]) -> list[Event]:
    """What `run()` allocates and frees, in order."""
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=_MOST)
    try:
        run()
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)
    sign = {"alloc": 1, "free_requested": -1}
    return [
        Event(
            entry["addr"],
            sign[entry["action"]] * entry["size"],
            tuple((frame["filename"], frame["name"]) for frame in entry["frames"]),
        )
        for entry in history
        if entry["action"] in sign
    ]
