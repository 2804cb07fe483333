"""Memory that background saves copy a rank's part of a checkpoint to.

All saves of a run copy the same parts to the same memory.  It is allocated before the first save, in a thread, because
page-locking takes seconds.  Parts from a GPU share one page-locked arena; parts that are on the host share another
block, which is not locked.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from sft.mcore.page_locked import Arena, aligned

Part = tuple[str, tuple[int, ...], torch.Size, torch.dtype, torch.device]


class CopyBuffers:
    """The copies of all parts.  `prepare` and `copy` raise no error of the thread before `copy` needs its memory."""

    def __init__(self) -> None:
        self._buffers: dict[Part, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def prepare(self, shards: Sequence[ShardedTensor]) -> None:
        """Begin to allocate memory for these shards in a thread.  Their values may change meanwhile."""
        parts = [_part(shard) for shard in shards]
        self._thread = threading.Thread(target=self._try, args=(parts,), name="memory for saves", daemon=True)
        self._thread.start()

    def copy(self, shards: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """Copies of the shards.  Raises MemoryError if the system has or locks too little memory."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        self._allocate([part for shard in shards if (part := _part(shard)) not in self._buffers])
        copies = [
            replace(shard, data=self._buffers[_part(shard)].copy_(shard.data, non_blocking=True)) for shard in shards
        ]
        if any(shard.data.is_cuda for shard in shards):
            torch.cuda.synchronize()
        return copies

    def _try(self, parts: list[Part]) -> None:
        try:
            self._allocate(parts)
        except Exception as error:
            self._error = error

    def _allocate(self, parts: list[Part]) -> None:
        for device in {part[-1] for part in parts}:
            there = [part for part in parts if part[-1] == device]
            arena = Arena(sum(aligned(part[2].numel() * part[3].itemsize) for part in there), device)
            self._buffers |= {part: arena.take(part[2], part[3]) for part in there}


def _part(shard: ShardedTensor) -> Part:
    data = shard.data
    return shard.key, tuple(shard.global_offset), data.shape, data.dtype, data.device
