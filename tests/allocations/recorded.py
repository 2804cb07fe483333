"""Records the allocations of torch's allocators, with the Python stack of each."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from tests.allocations.categories import Event, Frame

_MOST = 10_000_000  # maximum number of entries in the history


def cpu_events(run: Callable[[], Any]) -> list[Event]:
    """The allocations and frees of `run()` on the CPU, in order.  On a CPU, autograd's backward also runs in this
    thread."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as profiler:
        run()
    found: list[tuple[int, Event]] = []
    waiting: list[tuple[Any, tuple[Frame, ...]]] = [
        (event, ()) for event in profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    ]
    while waiting:
        event, frames = waiting.pop()
        if event.tag == _EventType.PyCall:
            site = event.extra_fields.callsite
            frames = ((site.file_name, site.function_name), *frames)
        elif event.tag == _EventType.Allocation:
            block = event.extra_fields
            found.append((event.start_time_ns, Event(block.ptr, block.alloc_size, frames)))
        waiting += ((child, frames) for child in event.children)
    return [event for _, event in sorted(found, key=lambda pair: pair[0])]


def cuda_events(run: Callable[[], Any]) -> list[Event]:
    """The allocations and frees of `run()` on the current CUDA device, in order."""
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
