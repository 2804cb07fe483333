"""Reads and writes torch_dist checkpoints in one process, one slice or chunk of a tensor at a time.

torch's own writer takes all tensors of a rank at once, and needs more than twice the memory of the largest tensor.
This module writes the same format: one output of `torch.save` per chunk, and an index of the offsets.
`sft.mcore.checkpoint_io.safe_reader` does all reads, and refuses objects that a checkpoint must not contain.
"""

import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.metadata as md
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem

from sft.errors import CheckpointError
from sft.files.file_digest import Entry, HashingFile
from sft.mcore.checkpoint_io.chunk_index import ChunkIndex
from sft.mcore.checkpoint_io.metadata_index import INDEX
from sft.mcore.checkpoint_io.safe_reader import SafeReader

FILE_BYTES = 4 << 30  # a file of this size gets no further chunk, so that ranks can divide the files to verify them


class TorchDistReader:
    """Reads tensors of the checkpoint in `folder`.  Raises CheckpointError if its index is missing or not safe."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader = folder, SafeReader(folder)
        index = self._reader.read_metadata()
        self._reader.set_up_storage_reader(index, is_coordinator=True)
        tensors = index.state_dict_metadata.items()
        self._entries = {key: entry for key, entry in tensors if isinstance(entry, md.TensorStorageMetadata)}
        self._chunks = {key: ChunkIndex(key, entry) for key, entry in self._entries.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(entry.size) for key, entry in self._entries.items()}

    def dtype(self, key: str) -> torch.dtype:
        dtype: torch.dtype = self._entries[key].properties.dtype
        return dtype

    def read(self, key: str, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The slice of the tensor `key` of shape `sizes` at `offset`.

        The result must not be changed: it may be a view of the mapped file.
        Raises CheckpointError if chunks are missing or stored more than once.
        """
        wanted = md.ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(sizes))
        items = self._chunks[key].read_items([wanted])
        if sum(math.prod(item.lengths) for item in items) != math.prod(sizes):
            raise CheckpointError(f"{self._folder}: chunks of {key} are missing or stored more than once.")
        if len(items) == 1:
            return self._stored(items[0])
        target = torch.empty(*sizes, dtype=self.dtype(key))
        for item in items:
            target[_slices(item.dest_offsets, item.lengths)] = self._stored(item)
        return target

    def _stored(self, item: ReadItem) -> torch.Tensor:
        """The part of a chunk that `item` names, in mapped memory."""
        return self._reader.mapped_chunk(item.storage_index)[_slices(item.storage_offsets, item.lengths)]


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))


class TorchDistWriter:
    """Writes a torch_dist checkpoint into `folder`, which must exist and be empty.

    After `finish`, `files` holds the size and the SHA-256 of every file.
    """

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._name, self._file = "", None  # type: tuple[str, HashingFile | None]
        self._entries: dict[str, Any] = {}
        self._offsets: dict[md.MetadataIndex, _StorageInfo] = {}
        self.files: dict[str, Entry] = {}

    def write_chunk(self, key: str, shape: Sequence[int], offset: Sequence[int], chunk: torch.Tensor) -> None:
        """Write the chunk at `offset` of the tensor `key`, whose whole shape is `shape`."""
        if key not in self._entries:
            properties = md.TensorProperties(dtype=chunk.dtype)
            self._entries[key] = md.TensorStorageMetadata(properties, torch.Size(shape), chunks=[])
        offsets = torch.Size(offset)
        self._entries[key].chunks.append(md.ChunkStorageMetadata(offsets=offsets, sizes=chunk.size()))
        self._save(chunk, md.MetadataIndex(key, offsets))

    def write_object(self, key: str, value: Any) -> None:
        """Write a plain Python value as Megatron stores objects."""
        self._entries[key] = md.BytesStorageMetadata()
        self._save([value], md.MetadataIndex(key))

    def finish(self) -> None:
        """Write the index, and flush all files to disk."""
        self._finish_file()
        index = md.Metadata(self._entries, planner_data={}, storage_data=self._offsets, storage_meta=md.StorageMeta())
        self._name, self._file = INDEX, HashingFile(self._folder / INDEX)
        self._file.write(pickle.dumps(index))
        self._finish_file()

    def close(self) -> None:
        """Close the file that is being written.  The checkpoint is complete only after `finish`."""
        if self._file is not None:
            self._file.close()

    def _save(self, value: Any, index: md.MetadataIndex) -> None:
        if self._file is None or self._file.num_bytes >= self._file_bytes:
            self._finish_file()
            self._name = f"__0_{len(self.files)}.distcp"
            self._file = HashingFile(self._folder / self._name)
        start = self._file.num_bytes
        torch.save(value, self._file)  # type: ignore[arg-type]  # torch calls only write and flush
        self._file.check()
        self._offsets[index] = _StorageInfo(self._name, start, self._file.num_bytes - start)

    def _finish_file(self) -> None:
        if self._file is not None:
            self.files[self._name] = self._file.finish()
            self._file = None
