"""Times calls that all ranks make together.  The result is the median of several samples of the slowest rank."""

import time
from collections.abc import Callable
from math import ceil
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

SAMPLES = 5
SAMPLE_S = 0.02  # a sample repeats short calls for about this time, so that its start and end count little
MOST_CALLS = 200  # the most calls in one sample


def seconds(call: Callable[[], Any], device: torch.device, samples: int = SAMPLES) -> float:
    """Seconds of one call, equal on all ranks.  Collective.

    The first two calls warm up.  The shorter one of them decides how often a sample repeats the call.
    """

    def sample(number: int) -> float:
        dist.barrier()
        finish(device)
        start = time.perf_counter()
        for _ in range(number):
            call()
        finish(device)
        return slowest(time.perf_counter() - start, device) / number

    call_s = min(sample(1), sample(1))
    number = min(MOST_CALLS, ceil(SAMPLE_S / max(call_s, SAMPLE_S / MOST_CALLS)))  # 1 ms -> 20, 3 s -> 1
    return median(sample(number) for _ in range(samples))


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(number: float, device: torch.device) -> float:
    """The largest value that a rank passes as `number`.  Collective."""
    largest = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
