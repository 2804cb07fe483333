"""Allocates the memory to which background saves copy a rank's part of a checkpoint.

All saves of a run copy the same parts to the same memory.  The memory is allocated before the first save, in a thread,
because page-locking takes seconds.  Parts from a GPU share one page-locked arena.  Parts that are on the host share
another block, which is not locked.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from sft.mcore.page_locked import Arena, aligned

Part = tuple[str, tuple[int, ...], torch.Size, torch.dtype, torch.device]


class CopyBuffers:
    """The copies of all parts."""

    def __init__(self) -> None:
        self._buffers: dict[Part, Tensor] = {}
        self._prepared: Future[None] | None = None

    @property
    def is_prepared(self) -> bool:
        return self._prepared is not None

    def prepare(self, shards: Sequence[ShardedTensor]) -> None:
        """Begin to allocate memory for these shards in a thread.  If the thread fails, `copy` raises its error.

        The values of the shards may change meanwhile.
        """
        executor = ThreadPoolExecutor(1, thread_name_prefix="memory for saves")
        self._prepared = executor.submit(self._allocate, [_part(shard) for shard in shards])
        executor.shutdown(wait=False)

    def copy(self, shards: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """Copies of the shards.  Raises MemoryError if the system has too little memory, or locks too little of it."""
        if self._prepared is not None:
            self._prepared.result()
        self._allocate([part for shard in shards if (part := _part(shard)) not in self._buffers])
        copies = [
            replace(shard, data=self._buffers[_part(shard)].copy_(shard.data, non_blocking=True)) for shard in shards
        ]
        if any(shard.data.is_cuda for shard in shards):
            torch.cuda.synchronize()
        return copies

    def _allocate(self, parts: list[Part]) -> None:
        for device in {part[-1] for part in parts}:
            there = [part for part in parts if part[-1] == device]
            arena = Arena(sum(aligned(part[2].numel() * part[3].itemsize) for part in there), device)
            self._buffers |= {part: arena.take(part[2], part[3]) for part in there}


def _part(shard: ShardedTensor) -> Part:
    data = shard.data
    return shard.key, tuple(shard.global_offset), data.shape, data.dtype, data.device
