"""Collectives over all ranks for decisions and small values in CPU memory.

If one rank raises an error, every rank raises, so no rank waits for a failed one.  Gradients, losses and activations do
not use these collectives.  Callers pass the gloo group of all ranks (`Position.control`): over NCCL, a message about a
file would wait for the work of the GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sft.errors import SftError

T = TypeVar("T")


def broadcast_from_rank0(decide: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Rank 0 calls `decide`, and every rank returns the result or raises rank 0's error.  Collective.

    Used for decisions about files, because another node may see a file later than rank 0.
    `group` holds all ranks.
    """
    answer: list[Any] = [None, None]  # result, error
    error: Exception | None = None
    if dist.get_rank() == 0:
        answer[0], error = _attempt(decide)
        answer[1] = _sendable(error)
    dist.broadcast_object_list(answer, group=group)
    if error or answer[1] is not None:
        raise error or answer[1]
    result: T = answer[0]
    return result


def all_gather_objects(make: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """Every rank calls `make`, and every rank returns all results in order of rank.  Collective.

    If `make` raises on one rank, every rank raises.  `group` holds all ranks.
    """
    value, error = _attempt(make)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (value, _sendable(error)), group=group)
    errors = [sent for _, sent in gathered if sent is not None]
    if error or errors:
        raise error or errors[0]
    return [result for result, _ in gathered]


def all_reduce_max(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The maximum over all ranks, element by element.  Collective; takes a third of a millisecond on one machine.

    rank 0 gives [0, 7], rank 1 gives [1, 3] -> [1, 7]
    """
    maxima = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    return maxima.tolist()


def _attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def _sendable(error: Exception | None) -> Exception | None:
    """What the other ranks raise: `error` itself if a user or a disk can cause it, else its text with this rank."""
    if error is None or isinstance(error, SftError | OSError):
        return error
    return RuntimeError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
