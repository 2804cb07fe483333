"""Reports each pass of a step, and keeps the host at most two passes ahead of the GPU.

A pass is the forward or the backward pass of one microbatch on this rank, or the sum of gradients over ranks.  The
watchdog ends a rank that begins no pass for `run.progress_timeout_s`, so a step may take much longer than a pass.

The host only queues the work of a GPU.  Without a limit, the host could queue all passes of a step, and then wait for
all of them in one call.  So each pass records a CUDA event when it begins.  Before the host queues pass n, it waits
until the GPU has begun pass n - 2.  The GPU then still has the whole pass n - 1 in its queue, so it does not idle.

The watchdog's thread could query the events instead.  But a thread that calls CUDA may block if the GPU hangs or
another thread holds a lock of the driver.  The limit of two passes also bounds how long a collective waits in the
queue: NCCL's timeout (`run.timeout_s`) counts from the moment when the host queues the collective.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

from sft.batch import Microbatch

PENDING_PASSES = 2  # passes that the host has queued and the GPU may not have begun


def named(microbatches: Sequence[Microbatch], chunk: int, num_chunks: int) -> Iterator[tuple[str, Microbatch]]:
    """Yield (name, microbatch) of each microbatch.

    "microbatch 1 of 8", or with virtual stages "microbatch 1 of 8 in model chunk 1 of 2"

    chunk: index of the model chunk, counted from 0
    """
    where = f" in model chunk {chunk + 1} of {num_chunks}" if num_chunks > 1 else ""
    for number, microbatch in enumerate(microbatches, 1):
        yield f"microbatch {number} of {len(microbatches)}{where}", microbatch


class Event(Protocol):
    """The part of torch.cuda.Event that this module uses."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any, /) -> float: ...


class PassProgress:
    """Reports the passes of one engine: which one the host queues, and which one the GPU computes.

    report     gets the name of a pass when the host queues it, and again when the host waits for its end on the GPU
    new_event  makes a CUDA event that takes the time; None on a CPU
    seconds    time of the last step on this rank, from its first pass to its last, the sum of gradients

    the host begins to queue    forward 1   backward 1   forward 2    backward 2    forward 3
    after the GPU has begun     -           -            forward 1    backward 1    forward 2
    """

    def __init__(self, report: Callable[[str], None], new_event: Callable[[], Event] | None) -> None:
        self._report, self._new_event = report, new_event
        self._begun: deque[tuple[str, Event]] = deque()  # passes that the GPU may not have begun
        self._first: Event | float | None = None  # of the first pass of this step: its event, or the time on a CPU
        self._last: Event | float | None = None
        self.seconds = 0.0
        self._on_gpu: str | None = None  # the newest pass that the GPU has begun, as far as the host has asked

    def begin(self, name: str) -> None:
        """The host begins to queue the pass `name`."""
        if self._new_event is None:
            self._last = time.perf_counter()
        else:
            if len(self._begun) == PENDING_PASSES:
                self._wait_for_oldest()
            event = self._new_event()
            event.record()
            self._begun.append((name, event))
            self._last = event
        self._first = self._last if self._first is None else self._first
        self._report(name)

    def finish(self) -> None:
        """Wait until the GPU has begun the last pass of a step.  Called when the host has queued that pass."""
        while self._begun:
            self._wait_for_oldest()
        if self._on_gpu is not None:
            self._report(self._on_gpu)
        self._on_gpu = None
        self.seconds, self._first = self._elapsed(), None

    def _elapsed(self) -> float:
        """Seconds from the first to the last pass, which the GPU has both begun."""
        first, last = self._first, self._last
        if isinstance(first, float) and isinstance(last, float):
            return last - first
        return 0.0 if first is None else float(cast(Event, first).elapsed_time(last)) / 1e3

    def _wait_for_oldest(self) -> None:
        name, event = self._begun.popleft()
        if not event.query():
            if self._on_gpu is not None:
                self._report(f"{self._on_gpu}, on the GPU")
            event.synchronize()
        self._on_gpu = name
