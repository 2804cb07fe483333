"""Time and memory of calls, and whether what they computed is right.

Times on CUDA are between events of the stream, elsewhere the wall clock's.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tools.bench.harness import Refused


def medians(
    calls: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    clock: Callable[[Callable[[], Any]], float],
    prepare: Callable[[], Any] = lambda: None,
) -> dict[str, float]:
    """Median seconds of each call.  They take turns; the first round warms up and is not counted.

    clock    seconds of one call: `wall`, `time_on(device)`, ...
    prepare  comes before each call, untimed
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repeats + 1):
        for name, call in calls.items():
            prepare()
            seconds = clock(call)
            if repetition:
                samples[name].append(seconds)
    return {name: median(times) for name, times in samples.items()}


def wall(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def wall_on(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """The wall clock around all that a call starts on the device."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def clock(call: Callable[[], Any]) -> float:
        synchronize()
        return wall(lambda: (call(), synchronize()))

    return clock


def cpu_time(call: Callable[[], Any]) -> float:
    """Of this process, whoever else uses the machine."""
    start = time.process_time()
    call()
    return time.process_time() - start


def time_on(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """The clock of a device."""
    return _between_events if device.type == "cuda" else wall


def _between_events(call: Callable[[], Any]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def peak_beyond(call: Callable[[], Any], device: torch.device) -> int | None:
    """The most bytes that a call takes beyond what is allocated before it; None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def check_close(name: str, values: Mapping[str, Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """Refused where a value is further from the expected one than `tolerance` of the latter's norm."""
    if len(values) != len(expected):
        raise Refused(f"{name}: {len(values)} of {len(expected)} results. Nothing was timed.")
    for (label, value), reference in zip(values.items(), expected):
        distance, norm = float((value.float() - reference.float()).norm()), float(reference.float().norm())
        if not distance <= tolerance * norm:  # also where it is NaN
            raise Refused(f"{name}: {label}, of norm {norm:.4g}, is off by {distance:.4g}. Nothing was timed.")
