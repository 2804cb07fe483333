"""Writes a torch_dist checkpoint from one process, one chunk of a tensor after the other, and computes its digests.

torch's own writer takes all tensors of a rank at once, and keeps the last of each key until its file is complete: twice
the largest tensor and more.  The format is the same: the output of `torch.save` for each chunk, one after the other,
and an index of their offsets.
"""

import hashlib
import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.metadata as md
from torch.distributed.checkpoint.filesystem import _StorageInfo

from sft.checkpoint.manifest import Entry
from sft.mcore.checkpoint_io.metadata_index import INDEX

FILE_BYTES = 4 << 30  # of one file; ranks that verify a checkpoint divide its files among themselves


class _File:
    """The stream that torch.save writes into: counts the bytes and computes their digest.

    An OSError is kept for `check`: raised inside torch.save it would become an error of torch, by version another one.
    """

    def __init__(self, path: Path) -> None:
        self._stream, self._digest, self.num_bytes = path.open("wb", buffering=0), hashlib.sha256(), 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                self._put(view)
            except OSError as error:
                self._error = error
        self._digest.update(view)
        self.num_bytes += len(view)
        return len(view)

    def _put(self, view: memoryview) -> None:
        written = 0
        while written < len(view):
            written += self._stream.write(view[written:])

    def flush(self) -> None:
        """Nothing is buffered."""

    def check(self) -> None:
        """Raise the OSError of an earlier write."""
        if self._error is not None:
            raise self._error

    def close(self) -> Entry:
        """Have the disk take the file; returns its size and digest."""
        self.check()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return Entry(num_bytes=self.num_bytes, sha256=self._digest.hexdigest())

    def abandon(self) -> None:
        self._stream.close()


class TorchDistWriter:
    """Writes into the existing, empty `folder`.  `files` lists every file once `finish` returns."""

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._name, self._file = "", None  # type: tuple[str, _File | None]
        self._entries: dict[str, Any] = {}
        self._offsets: dict[md.MetadataIndex, _StorageInfo] = {}
        self.files: dict[str, Entry] = {}

    def write_chunk(self, key: str, shape: Sequence[int], offset: Sequence[int], chunk: torch.Tensor) -> None:
        """Write the chunk at `offset` of the tensor `key`, whose whole shape is `shape`."""
        entry = self._entries.setdefault(
            key,
            md.TensorStorageMetadata(
                properties=md.TensorProperties(dtype=chunk.dtype), size=torch.Size(shape), chunks=[]
            ),
        )
        offsets = torch.Size(offset)
        entry.chunks.append(md.ChunkStorageMetadata(offsets=offsets, sizes=chunk.size()))
        self._save(chunk, md.MetadataIndex(key, offsets))

    def write_object(self, key: str, value: Any) -> None:
        """Write a plain value, as Megatron stores objects beside tensors."""
        self._entries[key] = md.BytesStorageMetadata()
        self._save([value], md.MetadataIndex(key))

    def finish(self) -> None:
        """Write the index.  The disk has all files when this returns."""
        self._close()
        index = md.Metadata(self._entries, planner_data={}, storage_data=self._offsets, storage_meta=md.StorageMeta())
        file = _File(self._folder / INDEX)
        file.write(pickle.dumps(index))
        self.files[INDEX] = file.close()

    def abandon(self) -> None:
        """Close the file that is being written; the folder is incomplete."""
        if self._file is not None:
            self._file.abandon()

    def _save(self, value: Any, index: md.MetadataIndex) -> None:
        if self._file is None or self._file.num_bytes >= self._file_bytes:
            self._close()
            self._name = f"__0_{len(self.files)}.distcp"
            self._file = _File(self._folder / self._name)
        start = self._file.num_bytes
        if isinstance(value, torch.Tensor):
            torch.save(value, self._file)  # type: ignore[arg-type]  # it writes, and flushes
        else:
            stream = io.BytesIO()
            torch.save(value, stream)
            self._file.write(stream.getvalue())  # a view, kept by an error's traceback, crashes Python 3.12.1
        self._file.check()
        self._offsets[index] = _StorageInfo(self._name, start, self._file.num_bytes - start)

    def _close(self) -> None:
        if self._file is not None:
            self.files[self._name] = self._file.close()
            self._file = None
