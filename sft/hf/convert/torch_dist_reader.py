"""Reading any box of a tensor from a torch_dist checkpoint, however its writers had cut it.  One process.

What the checkpoint may contain is decided by `sft.mcore.checkpoint_io.safe_reader`, through which every byte is read.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from sft.errors import CheckpointError
from sft.mcore.checkpoint_io.chunk_index import Parts
from sft.mcore.checkpoint_io.safe_reader import Reader


class _Into(DefaultLoadPlanner):
    """All that is read goes into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target


class TorchDistReader:
    """The tensors of the checkpoint in `folder`.  Raises CheckpointError where it has no harmless index."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader = folder, Reader(folder)
        index = self._reader.read_metadata()
        self._reader.set_up_storage_reader(index, is_coordinator=True)
        self._entries = {
            key: entry for key, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
        }
        self._parts = {key: Parts(key, entry) for key, entry in self._entries.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(entry.size) for key, entry in self._entries.items()}

    def dtype(self, key: str) -> torch.dtype:
        dtype: torch.dtype = self._entries[key].properties.dtype
        return dtype

    def read(self, key: str, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The box of `sizes` at `offset`.  Takes the memory of it, and of the largest part that was written at once."""
        target = torch.empty(*sizes, dtype=self.dtype(key))
        box = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(sizes))
        items = self._parts[key].items([box])
        if sum(math.prod(item.lengths) for item in items) != target.numel():
            raise CheckpointError(f"{self._folder}: parts of {key} are missing, or there more than once.")
        self._reader.read_data(LoadPlan(items), _Into(target))
        return target
