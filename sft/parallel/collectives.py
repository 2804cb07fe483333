"""Collectives over all ranks for decisions and small values in CPU memory.

If the function that a caller passes raises an error on one rank, every rank raises an error, so no rank waits for a
rank that failed.  Gradients, losses and activations do not use these collectives.  Callers pass the gloo group of all
ranks (`Position.control`): over NCCL, a message about a file would wait for the work of the GPU.

torch's own collectives for objects send pickles, which run code in the receiver.  The collectives of this module send
messages (messages.py).  A rank checks how many bytes it will receive before it allocates memory for them.  ConfigError
is raised if a rank sends something that is not a message.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sft.errors import ConfigError
from sft.parallel import messages, tensor_messages  # noqa: F401 - registers tensors

T = TypeVar("T")
R = TypeVar("R")

MAX_BYTES = 4 << 30  # the most bytes that a rank receives in one collective, summed over all senders


def broadcast_from_rank0(decide: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call `decide` on rank 0.  Every rank returns its result, or raises its error.  Collective.

    Callers use it for decisions about files, because another node may see a file later than rank 0.
    `group` holds all ranks.
    """
    if dist.get_rank() == 0:
        own, error, message = _attempt(decide)
        _broadcast(message, group)
        if error is not None:
            raise error
        return own  # type: ignore[return-value]
    message = _broadcast(b"", group)
    result: T = _received(message, rank=0)
    return result


def all_gather_objects(make: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """Call `make` on every rank, and return the results of all ranks in order of rank.  Collective.

    If `make` raises an error on one rank, every rank raises an error.  `group` holds all ranks.
    """
    _, error, message = _attempt(make)
    gathered = all_gather_bytes(message, group)
    if error is not None:
        raise error
    return [_received(sent, rank) for rank, sent in enumerate(gathered)]


def on_every_rank(make: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call `make` on every rank, and return its own result, which need not be a message.  Collective.

    If `make` raises an error on one rank, every rank raises an error.  `group` holds all ranks.
    """
    results: list[T] = []
    all_gather_objects(lambda: results.append(make()), group)
    return results[0]


def through_rank0(make: Callable[[], T], decide: Callable[[list[T]], Sequence[R]], group: dist.ProcessGroup) -> R:
    """Call `make` on every rank, then `decide` on rank 0 with all results.  Rank i returns the i-th item of `decide`.

    Collective.  If `make` or `decide` raises an error on one rank, every rank raises one.  `group` holds all ranks.
    """
    _, error, message = _attempt(make)
    gathered = _gather(message, group)
    answers: list[bytes] = []
    if dist.get_rank() == 0:
        decided, failure, refusal = _attempt(
            lambda: [
                messages.encode({"value": answer})
                for answer in decide([_received(sent, rank) for rank, sent in enumerate(gathered)])
            ]
        )
        answers, error = decided or [refusal] * len(gathered), error or failure
    answer = _scatter(answers, group)
    if error is not None:
        raise error
    result: R = _received(answer, rank=0)
    return result


def all_reduce_max(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The maximum over all ranks, element by element.  Collective; takes about 0.3 ms among ranks of one machine.

    rank 0 gives [0, 7], rank 1 gives [1, 3] -> [1, 7]
    """
    maxima = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    return maxima.tolist()


def all_gather_bytes(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """The messages of all ranks, in order of rank.  Collective."""
    sizes = _sizes_of_all(message, group)
    received = [_buffer(b"", max(sizes)) for _ in sizes]
    dist.all_gather(received, _buffer(message, max(sizes)), group=group)
    return [_bytes(buffer, size) for buffer, size in zip(received, sizes)]


def _gather(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """The messages of all ranks on rank 0, in order of rank; an empty list on other ranks.  Collective."""
    sizes = _sizes_of_all(message, group)
    received = [_buffer(b"", max(sizes)) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(_buffer(message, max(sizes)), received, 0, group=group)
    return [_bytes(buffer, size) for buffer, size in zip(received or [], sizes)]


def _broadcast(message: bytes, group: dist.ProcessGroup) -> bytes:
    """Rank 0's message.  The other ranks pass an empty message.  Collective."""
    size = torch.tensor([len(message)])
    dist.broadcast(size, 0, group=group)
    (announced,) = _checked(size.tolist())
    buffer = _buffer(message, announced)
    dist.broadcast(buffer, 0, group=group)
    return _bytes(buffer, announced)


def _scatter(all_messages: list[bytes], group: dist.ProcessGroup) -> bytes:
    """This rank's message.  Rank 0 passes a message for each rank; the other ranks pass an empty list.  Collective."""
    sizes = torch.tensor([len(message) for message in all_messages] or [0] * dist.get_world_size())
    dist.broadcast(sizes, 0, group=group)
    longest = max(_checked(sizes.tolist()))
    buffer = _buffer(b"", longest)
    dist.scatter(buffer, [_buffer(message, longest) for message in all_messages] or None, 0, group=group)
    return _bytes(buffer, int(sizes[dist.get_rank()]))


def _sizes_of_all(message: bytes, group: dist.ProcessGroup) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
    return _checked([int(size) for size in sizes])


def _checked(sizes: list[int]) -> list[int]:
    """Return `sizes`, the announced sizes of messages.  Raises ConfigError if a size is 0, negative or too large."""
    for rank, size in enumerate(sizes):
        if not 0 < size <= MAX_BYTES // len(sizes):
            raise ConfigError(_stranger(rank, f"announced a message of {size:,} bytes"))
    return sizes


def _buffer(message: bytes, size: int) -> torch.Tensor:
    """A tensor of `size` bytes: the message, then zeros."""
    buffer = torch.zeros(size, dtype=torch.uint8)
    buffer[: len(message)] = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[: len(message)]
    return buffer


def _bytes(buffer: torch.Tensor, size: int) -> bytes:
    content: bytes = buffer[:size].numpy().tobytes()
    return content


def _attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None, bytes]:
    """The result of `make` or None, the error that it raised or None, and the message with the result or the error."""
    try:
        result = make()
        return result, None, messages.encode({"value": result})
    except Exception as error:  # any error: the caller raises it on this rank, and the message raises it on the others
        return None, error, messages.encode({"error": messages.error_message(error, dist.get_rank())})


def _received(message: bytes, rank: int) -> Any:
    """The result that `rank` sent.  Raises the error that `rank` sent, or ConfigError if it sent anything else."""
    try:
        content = messages.decode(message)
        if isinstance(content, dict) and list(content) == ["value"]:
            return content["value"]
        if not isinstance(content, dict) or list(content) != ["error"]:
            raise messages.InvalidMessage("neither a value nor an error")
        error = messages.to_error(content["error"])
    except messages.InvalidMessage as reason:
        raise ConfigError(_stranger(rank, f"sent bytes that are no message of this program: {reason}")) from None
    raise error


def _stranger(rank: int, act: str) -> str:
    return (
        f"rank {rank} {act}.  The message was not used.  All ranks must run the same version of sft.  If they do, "
        "another program has connected as a rank: let only the nodes of the run reach MASTER_PORT and each other."
    )
