"""Replays the work of a recorded step on a model of a GPU's hardware queues: when does each piece start and end?

CUDA_DEVICE_MAX_CONNECTIONS and CUDA_DEVICE_MAX_COPY_CONNECTIONS set the number of queues for kernels and for copies.
The streams share the queues in turn.  A queue starts its work in the order of the launches.  The first piece of a queue
holds up all later pieces of the queue, also those of other streams, until the piece starts.

Durations are those of a model: every kernel takes KERNEL_S, and a copy or message takes the time of its bytes.  So a
replay shows which piece waits for which.  It does not predict the time of a step.
"""

import ctypes
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KERNEL, TO_HOST, TO_DEVICE, MESSAGE, RECORD, WAIT = "khdmrw"  # as in standin.h
COPIES = (TO_HOST, TO_DEVICE)
KERNEL_S = 400e-6
BYTES_PER_S = {TO_HOST: 50e9, TO_DEVICE: 50e9, MESSAGE: 300e9}  # PCIe 5, NVLink
UNLIMITED = 10**6  # queues


@dataclass(frozen=True)
class Entry:
    """A piece of work or an event of a stream.  number: bytes of a copy or message; number of an event's record"""

    kind: str
    stream: str
    number: int


@dataclass(frozen=True)
class Piece:
    """A kernel, copy or message of a stream, from `start` to `end` in seconds.  index: its position in the recording"""

    index: int
    kind: str
    stream: str
    start: float
    end: float


@contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Records into `file` what the stand-in does within the block."""
    record = ctypes.CDLL(None).standin_record
    assert record(str(file).encode()) == 0, file
    try:
        yield
    finally:
        record(None)


def read(file: Path) -> list[Entry]:
    rows = (line.split() for line in file.read_text().splitlines())
    return [Entry(kind, stream, int(number)) for kind, stream, number in rows]


def replay(entries: Sequence[Entry], *, kernel_queues: int, copy_queues: int) -> list[Piece]:
    """The pieces of work, in the order of their starts.

    A piece starts after the previous piece of its stream, after the events for which its stream waits, at the head of
    its queue, and when its engine is free: one for kernels, one for messages, one for copies in each direction.
    """
    queues = _queues(entries, kernel_queues, copy_queues)
    ends: dict[int, float] = {}  # of pieces that have started, by index
    engines: dict[str, float] = defaultdict(float)  # when each is free
    heads: dict[tuple[bool, int], float] = defaultdict(float)  # when each queue started its last piece
    pieces = []
    while queues:
        ready = {
            name: max(heads[name], engines[queue[0].kind], *(ends[i] for i in queue[0].after), 0.0)
            for name, queue in queues.items()
            if queue[0].after <= ends.keys()
        }
        assert ready, "the recorded streams wait for each other"
        name = min(ready, key=lambda name: (ready[name], queues[name][0].index))
        work, start = queues[name].popleft(), ready[name]
        if not queues[name]:
            del queues[name]
        heads[name] = start
        ends[work.index] = engines[work.kind] = start + work.seconds
        pieces.append(Piece(work.index, work.kind, work.stream, start, start + work.seconds))
    return pieces


def seconds(pieces: Iterable[Piece]) -> float:
    """The time from the first start to the last end."""
    return max(piece.end for piece in pieces)


@dataclass(frozen=True)
class _Work:
    index: int
    kind: str
    stream: str
    seconds: float
    after: frozenset[int]  # indices of the pieces that must have ended


def _queues(entries: Sequence[Entry], kernel_queues: int, copy_queues: int) -> dict[tuple[bool, int], deque[_Work]]:
    """The work of each queue, in the order of the launches.  Key: whether the queue is for copies, and its number"""
    counts = {False: kernel_queues, True: copy_queues}
    numbers = {stream: i for i, stream in enumerate(dict.fromkeys(entry.stream for entry in entries))}
    queues: dict[tuple[bool, int], deque[_Work]] = defaultdict(deque)
    last: dict[str, set[int]] = defaultdict(set)  # by stream: the pieces that its next piece follows
    recorded_after: dict[int, set[int]] = {}  # by record of an event
    for index, entry in enumerate(entries):
        if entry.kind == RECORD:
            recorded_after[entry.number] = set(last[entry.stream])
        elif entry.kind == WAIT:  # an event that was recorded before the recording began has ended
            last[entry.stream] |= recorded_after.get(entry.number, set())
        else:
            took = entry.number / BYTES_PER_S[entry.kind] if entry.kind in BYTES_PER_S else KERNEL_S
            is_copy = entry.kind in COPIES
            work = _Work(index, entry.kind, entry.stream, took, frozenset(last[entry.stream]))
            queues[is_copy, numbers[entry.stream] % counts[is_copy]].append(work)
            last[entry.stream] = {index}
    return dict(queues)
