"""Measures time and memory of calls, and checks their results.

On CUDA, `time_on` measures between two events of the stream; on a CPU, it measures wall time.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
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
    """Median seconds of each call.  The calls take turns; the first round is a warm-up and is not counted.

    clock    measures one call in seconds: `wall`, `time_on(device)`, ...
    prepare  runs before each call and is not timed
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
    """A clock that measures wall time until all work that the call started on the device has finished."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def clock(call: Callable[[], Any]) -> float:
        synchronize()
        return wall(lambda: (call(), synchronize()))

    return clock


def cpu_time(call: Callable[[], Any]) -> float:
    """Seconds of CPU time that this process spends in a call.  Other processes do not change it much."""
    start = time.process_time()
    call()
    return time.process_time() - start


def time_on(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """The clock for short calls on a device: between two CUDA events, or wall time on a CPU."""
    return _between_events if device.type == "cuda" else wall


def _between_events(call: Callable[[], Any]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def peak_beyond(call: Callable[[], Any], device: torch.device) -> int | None:
    """The peak of allocated bytes during a call, minus the bytes that were allocated before; None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def catch_out_of_memory() -> Iterator[list[str]]:
    """A context that catches an out-of-memory error.  Yields a list, to which the message of the error is added."""
    errors: list[str] = []
    try:
        yield errors
    except torch.OutOfMemoryError as error:
        errors.append(str(error))
    if errors:
        torch.cuda.empty_cache()


def growth(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds of `work`, and the largest number of bytes by which this process grew during it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the process
    before, start = memory()[0], time.perf_counter()
    work()
    return time.perf_counter() - start, max(0, memory()[1] - before)


def memory() -> tuple[int, int]:
    """The current and the peak memory of this process in bytes.  getrusage would include the parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":") for line in lines if line.startswith("Vm"))
    return int(values["VmRSS"].split()[0]) << 10, int(values["VmHWM"].split()[0]) << 10


def check_close(name: str, values: Mapping[str, Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """Raises Refused if the distance of a value from the expected one exceeds `tolerance` times the expected norm."""
    if len(values) != len(expected):
        raise Refused(f"{name}: {len(values)} results; expected {len(expected)}. Nothing was timed.")
    for (label, value), reference in zip(values.items(), expected):
        distance, norm = float((value.float() - reference.float()).norm()), float(reference.float().norm())
        if not distance <= tolerance * norm:  # true for NaN too
            raise Refused(f"{name}: {label} differs by {distance:.4g} from a norm of {norm:.4g}. Nothing was timed.")
