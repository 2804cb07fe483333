"""Records the allocations of torch's CPU allocator in this thread, with the Python stack of each."""

from collections.abc import Callable
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from tests.allocations.categories import Event, Frame


def events_of(run: Callable[[], Any]) -> list[Event]:
    """What `run()` allocates and frees, in order.  Autograd's backward on a CPU runs in this thread, too."""
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
