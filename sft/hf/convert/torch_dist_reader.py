"""Reads any slice of a tensor from a torch_dist checkpoint, into whatever chunks its writers had cut it.  One process.

Every byte is read through `sft.mcore.checkpoint_io.safe_reader`, which decides what a checkpoint may contain.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from sft.errors import CheckpointError
from sft.mcore.checkpoint_io.chunk_index import ChunkIndex
from sft.mcore.checkpoint_io.safe_reader import SafeReader


class _SingleTensorPlanner(DefaultLoadPlanner):
    """Has everything read into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target


class TorchDistReader:
    """The tensors of the checkpoint in `folder`.  Raises CheckpointError where its index is missing or unsafe."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader = folder, SafeReader(folder)
        index = self._reader.read_metadata()
        self._reader.set_up_storage_reader(index, is_coordinator=True)
        self._entries = {
            key: entry for key, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
        }
        self._chunks = {key: ChunkIndex(key, entry) for key, entry in self._entries.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(entry.size) for key, entry in self._entries.items()}

    def dtype(self, key: str) -> torch.dtype:
        dtype: torch.dtype = self._entries[key].properties.dtype
        return dtype

    def read(self, key: str, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The slice of shape `sizes` at `offset`.  Takes its memory, and that of the largest stored chunk."""
        target = torch.empty(*sizes, dtype=self.dtype(key))
        wanted = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(sizes))
        items = self._chunks[key].read_items([wanted])
        if sum(math.prod(item.lengths) for item in items) != target.numel():
            raise CheckpointError(f"{self._folder}: chunks of {key} are missing or stored more than once.")
        self._reader.read_data(LoadPlan(items), _SingleTensorPlanner(target))
        return target
