"""Writing safetensors files one tensor after the other: what is in each is known before, the numbers come later."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from sft.checkpoint.manifest import Entry
from sft.hf.convert.safetensors_folder import DTYPES, INDEX, SINGLE

SHARD_BYTES = 5 * 10**9  # of one file, as the hub likes them
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorWriter:
    """Writes the planned tensors, in their order, into the existing `folder`.

    digests: of each tensor; files: of each file, when `finish` returns
    """

    def __init__(self, folder: Path, planned: Sequence[Planned], shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._left = folder, list(planned)[::-1]
        self._shards = shards(planned, shard_bytes)[::-1]
        self._num_shards = len(self._shards)
        self._stream: IO[bytes] | None = None
        self._name, self._digest, self._end = "", hashlib.sha256(), ""
        self._where: dict[str, str] = {}
        self._num_bytes = sum(one.num_bytes for one in planned)
        self.digests: dict[str, str] = {}
        self.files: dict[str, Entry] = {}

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """The next tensor; its bytes."""
        planned = self._left.pop()
        assert (name, tensor.dtype, tuple(tensor.shape)) == (planned.name, planned.dtype, planned.shape), planned
        if self._stream is None:
            self._begin()
        data = tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data
        self._put(data)
        self.digests[name] = hashlib.sha256(data).hexdigest()
        self._where[name] = self._name
        if name == self._end:
            self.close()
        return len(data)

    def finish(self) -> None:
        """The index, where there are several files."""
        assert not self._left and self._stream is None
        if self._num_shards > 1:
            content = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(self._where.items()))}
            (self._folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def close(self) -> None:
        """The file that is being written, if any."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self.files[self._name] = Entry(num_bytes=self._stream.tell(), sha256=self._digest.hexdigest())
            self._stream.close()
            self._stream = None

    def _begin(self) -> None:
        shard, number = self._shards.pop(), self._num_shards - len(self._shards)
        many = self._num_shards > 1
        self._name = f"model-{number:05d}-of-{self._num_shards:05d}.safetensors" if many else SINGLE
        self._digest, self._end = hashlib.sha256(), shard[-1].name
        self._stream = (self._folder / self._name).open("wb")
        self._put(_header(shard))

    def _put(self, data: Any) -> None:
        assert self._stream is not None
        self._stream.write(data)
        self._digest.update(data)


def shards(planned: Sequence[Planned], shard_bytes: int) -> list[list[Planned]]:
    """Which tensors lie in one file: as many as fit, in their order; one that is larger has a file of its own."""
    found: list[list[Planned]] = [[]]
    filled = 0
    for one in planned:
        if found[-1] and filled + one.num_bytes > shard_bytes:
            found.append([])
            filled = 0
        found[-1].append(one)
        filled += one.num_bytes
    return found


def _header(planned: Sequence[Planned]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in planned:
        content[one.name] = {
            "dtype": _CODES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [end, end + one.num_bytes],
        }
        end += one.num_bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # numbers lie where their type wants them
    return len(text).to_bytes(8, "little") + text
