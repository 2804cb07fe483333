"""A torch_dist checkpoint, written one part of a tensor after the other by one process, digests on the way.

torch's own writer wants all of a rank's tensors at once, and keeps the last of each key until its file is done: twice
the largest tensor and more.  The format is the same: what `torch.save` makes of each part, one after the other, and an
index that says where each is.
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

FILE_BYTES = 4 << 30  # of one file: ranks that verify a checkpoint share its files


class _File:
    """What torch.save writes into: counts and digests what goes through.

    An error is kept for `check`: of one that goes through its writer, torch makes another one, by version.
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
        done = 0
        while done < len(view):
            done += self._stream.write(view[done:])

    def flush(self) -> None:
        """Nothing is held back."""

    def check(self) -> None:
        """Raise the OSError of an earlier write."""
        if self._error is not None:
            raise self._error

    def close(self) -> Entry:
        """On the disk."""
        self.check()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return Entry(num_bytes=self.num_bytes, sha256=self._digest.hexdigest())

    def abandon(self) -> None:
        self._stream.close()


class TorchDistWriter:
    """Writes into the existing, empty `folder`; `files` has what was written when `finish` returns."""

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._name, self._file = "", None  # type: tuple[str, _File | None]
        self._entries: dict[str, Any] = {}
        self._places: dict[md.MetadataIndex, _StorageInfo] = {}
        self.files: dict[str, Entry] = {}

    def tensor(self, key: str, shape: Sequence[int], offset: Sequence[int], part: torch.Tensor) -> None:
        """A box of the tensor `key`, which is of `shape` in all."""
        entry = self._entries.setdefault(
            key,
            md.TensorStorageMetadata(
                properties=md.TensorProperties(dtype=part.dtype), size=torch.Size(shape), chunks=[]
            ),
        )
        where = torch.Size(offset)
        entry.chunks.append(md.ChunkStorageMetadata(offsets=where, sizes=part.size()))
        self._save(part, md.MetadataIndex(key, where))

    def value(self, key: str, value: Any) -> None:
        """A plain value beside the tensors."""
        self._entries[key] = md.BytesStorageMetadata()
        self._save([value], md.MetadataIndex(key))

    def finish(self) -> None:
        """The index, without which the rest is nothing.  All of it is on the disk then."""
        self._close()
        index = md.Metadata(self._entries, planner_data={}, storage_data=self._places, storage_meta=md.StorageMeta())
        file = _File(self._folder / INDEX)
        file.write(pickle.dumps(index))
        self.files[INDEX] = file.close()

    def abandon(self) -> None:
        """Nobody wants it any more."""
        if self._file is not None:
            self._file.abandon()

    def _save(self, value: Any, where: md.MetadataIndex) -> None:
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
        self._places[where] = _StorageInfo(self._name, start, self._file.num_bytes - start)

    def _close(self) -> None:
        if self._file is not None:
            self.files[self._name] = self._file.close()
            self._file = None
