"""The memory of background saves is allocated before the first of them, and serves all."""

import threading

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from sft.mcore.checkpoint_io import copy_buffers
from sft.mcore.checkpoint_io.copy_buffers import CopyBuffers
from sft.mcore.page_locked import Arena


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Bytes of each allocated arena, and the name of the thread that allocated it."""
    found = []

    def noted(num_bytes: int, device: torch.device) -> Arena:
        found.append((num_bytes, threading.current_thread().name))
        return Arena(num_bytes, device)

    monkeypatch.setattr(copy_buffers, "Arena", noted)
    return found


def shards(value: float) -> list[ShardedTensor]:
    """Two parts of one tensor, 12 and 8 bytes, and a tensor of 90 bytes."""
    whole, other = torch.full((5,), value), torch.full((9, 5), value, dtype=torch.bfloat16)
    parts = ((whole[:3], 0), (whole[3:], 3))
    return [
        *(ShardedTensor("b", part, part.dtype, tuple(part.shape), (5,), (start,), None) for part, start in parts),
        ShardedTensor.from_rank_offsets("a", other),
    ]


def test_a_save_allocates_nothing(allocated: list[tuple[int, str]]) -> None:
    """64 + 64 + 128 bytes, in a thread; the values are those of the save."""
    buffers = CopyBuffers()
    buffers.prepare(shards(1.0))
    assert buffers._prepared is not None
    buffers._prepared.result()
    assert allocated == [(256, "memory for saves_0")]
    addresses = []
    for value in (2.0, 3.0):
        given = shards(value)
        copies = buffers.copy(given)
        for shard in given:
            shard.data.zero_()
        assert [bool((copy.data == value).all()) for copy in copies] == [True] * 3
        assert [(copy.key, copy.global_offset) for copy in copies] == [("b", (0,)), ("b", (3,)), ("a", (0, 0))]
        addresses.append([copy.data.data_ptr() for copy in copies])
    assert addresses[0] == addresses[1] and len(allocated) == 1


def test_without_preparation_the_first_save_allocates(allocated: list[tuple[int, str]]) -> None:
    buffers = CopyBuffers()
    buffers.copy(shards(1.0)), buffers.copy(shards(2.0))
    assert allocated == [(256, "MainThread")]


def test_a_save_raises_what_its_memory_lacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(num_bytes: int, device: torch.device) -> Arena:
        raise MemoryError(f"{num_bytes} B of host memory cannot be page-locked: full")

    monkeypatch.setattr(copy_buffers, "Arena", full)
    buffers = CopyBuffers()
    buffers.prepare(shards(1.0))
    with pytest.raises(MemoryError, match="256 B .*: full"):
        buffers.copy(shards(1.0))
