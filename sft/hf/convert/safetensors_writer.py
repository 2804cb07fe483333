"""Writing safetensors files one tensor after the other: their types and shapes are known before, their numbers later.

The safetensors library writes a file in one call, which needs all tensors of the file in memory: up to `SHARD_BYTES`.
An export holds one tensor, so the bytes are put together here, and the library reads each header back once the file is
complete.
"""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open

from sft.checkpoint.manifest import Entry
from sft.hf.convert.safetensors_folder import DTYPES, INDEX, SINGLE

SHARD_BYTES = 5 * 10**9  # of one file, as the hub recommends
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Writes the planned tensors, in their order, into the existing `folder`.

    digests: SHA-256 of each tensor; files: size and SHA-256 of each file, once `finish` returns
    """

    def __init__(self, folder: Path, planned: Sequence[PlannedTensor], shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._remaining = folder, list(planned)[::-1]
        self._num_bytes = sum(tensor.num_bytes for tensor in planned)
        self._shards = split_into_shards(planned, shard_bytes)
        self._num_begun = 0
        self._stream: IO[bytes] | None = None
        self._name, self._digest = "", hashlib.sha256()
        self._file_of: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.files: dict[str, Entry] = {}

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Write the next tensor; returns how many bytes it has."""
        planned = self._remaining.pop()
        assert (name, tensor.dtype, tuple(tensor.shape)) == (planned.name, planned.dtype, planned.shape), planned
        if self._stream is None:
            self._begin_file()
        data = tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data
        self._put(data)
        self.digests[name] = hashlib.sha256(data).hexdigest()
        self._file_of[name] = self._name
        if name == self._shards[self._num_begun - 1][-1].name:
            self.close()
            self._check_header()
        return len(data)

    def finish(self) -> None:
        """Write the index, where there are several files."""
        assert not self._remaining and self._stream is None
        if len(self._shards) > 1:
            content = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(self._file_of.items()))}
            (self._folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def close(self) -> None:
        """Close the file that is being written, if any; the disk has it then."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self.files[self._name] = Entry(num_bytes=self._stream.tell(), sha256=self._digest.hexdigest())
            self._stream.close()
            self._stream = None

    def _begin_file(self) -> None:
        shard, self._num_begun = self._shards[self._num_begun], self._num_begun + 1
        several = len(self._shards) > 1
        self._name = f"model-{self._num_begun:05d}-of-{len(self._shards):05d}.safetensors" if several else SINGLE
        self._digest = hashlib.sha256()
        self._stream = (self._folder / self._name).open("wb")
        self._put(_header(shard))

    def _check_header(self) -> None:
        """Read the complete file's header with the library, which checks it against the size of the file."""
        with safe_open(self._folder / self._name, framework="pt") as file:
            assert set(file.keys()) == {tensor.name for tensor in self._shards[self._num_begun - 1]}, self._name

    def _put(self, data: Any) -> None:
        assert self._stream is not None
        self._stream.write(data)
        self._digest.update(data)


def split_into_shards(planned: Sequence[PlannedTensor], shard_bytes: int) -> list[list[PlannedTensor]]:
    """The tensors of each file: as many as `shard_bytes` hold, in their order; a larger one has a file of its own."""
    shards: list[list[PlannedTensor]] = [[]]
    num_bytes = 0
    for tensor in planned:
        if shards[-1] and num_bytes + tensor.num_bytes > shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return shards


def _header(planned: Sequence[PlannedTensor]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in planned:
        content[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.num_bytes],
        }
        end += tensor.num_bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data behind it
    return len(text).to_bytes(8, "little") + text
