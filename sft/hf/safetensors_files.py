"""Reads rows of tensors from the safetensors files of a Hugging Face folder.

The safetensors library checks the header of each file (sizes, gaps, overlaps, types, truncation) and maps the file into
memory.  The system reads a row from the disk when the row is first used.  This module decides which files belong to the
folder, compares the files with their index, and limits the mapped memory, because pages of a mapped file count as
memory of the process until the file is unmapped.
"""

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sft.errors import CheckpointError, first_few
from sft.files.folder_files import UnsafeFileError, regular_file
from sft.hf.hub import INDEX, SINGLE
from sft.hf.safetensors_index import read_index
from sft.hf.safetensors_writer import bytes_of
from sft.hf.tensor_check import fold_by_layer
from sft.low_bits.part import StoredPart

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAPPED_BYTES = 64 << 20  # all files are unmapped after this many bytes are read; mapping again reads the header again


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file: its place in the file, its type and its shape."""

    file: Path
    dtype: str  # name of the type in safetensors, which `DTYPES` may lack
    shape: tuple[int, ...]
    start: int  # offset of the tensor's bytes in the file
    num_bytes: int


class SafetensorsFolder:
    """The tensors of a Hugging Face folder.  Raises CheckpointError that lists the problems of the files.

    tensors: the tensors by name, as readers see them
    stored_tensors: the tensors by name, as the files have them
    requested_bytes: stored bytes of all values that were read so far
    dequantised: names of the tensors that are stored in the format `number_format`, and dequantised when read
    """

    number_format = ""
    dequantised: Collection[str] = ()

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.requested_bytes = 0
        self._sizes: dict[Path, int] = {}
        self._mapped: dict[Path, Any] = {}
        self._stack, self._mapped_bytes = ExitStack(), 0
        index = read_index(folder)
        problems = []
        for name in sorted({*index.values()} if index else {SINGLE}):
            file = folder / name
            try:
                tensors = _read_header(folder, name)
                self._sizes[file] = file.stat().st_size
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
                continue
            problems += _stored_twice(self.tensors, tensors, file)
            self.tensors |= tensors
        if problems:
            raise CheckpointError("\n  ".join(first_few(problems)))
        if index is not None:
            _compare_with_index(self.tensors, index, folder)
        self.stored_tensors = self.tensors
        self._files = {name: tensor.file for name, tensor in self.tensors.items()}

    def read_rows(
        self,
        name: str,
        start: int,
        target: torch.Tensor,
        *,
        index: tuple[int, ...] = (),
        transposed: bool = False,
        step: int = 1,
        first_column: int = 0,
    ) -> None:
        """Fill `target` with the rows `start`, `start + step`, ... of the tensor `name`.

        target: [rows] or [rows, columns], of any type and on any device; its size gives the numbers of rows and columns
        first_column: the first column to read, if the rows have columns
        index: rows are read from the matrix tensor[index]; transposed: from its transpose
        Raises CheckpointError if the file has changed since it was opened.
        """
        tensor = self.tensors[name]
        width = tensor.shape[len(index) : len(index) + 1] if transposed else tensor.shape[len(index) + 1 :]
        # Counts whole rows and skipped rows, because mapped pages contain them, too.
        row_bytes = step * math.prod(width) * DTYPES[tensor.dtype].itemsize
        columns = [slice(first_column, first_column + size) for size in target.shape[1:]]
        block_rows = max(1, MAPPED_BYTES // max(1, row_bytes))
        for first in range(0, target.shape[0], block_rows):
            block = target[first : first + block_rows]
            if not block.numel():
                continue
            rows = slice(start + first * step, start + (first + len(block) - 1) * step + 1, step)
            part = self._part(name, (*index, *([*columns, rows] if transposed else [rows, *columns])))
            block.copy_((part.T if transposed else part).reshape(block.shape))
            self._mapped_bytes += len(block) * row_bytes
            if self._mapped_bytes >= MAPPED_BYTES:
                self.close()

    def stored_rows(
        self,
        name: str,
        start: int,
        shape: tuple[int, int],
        device: torch.device,
        *,
        index: tuple[int, ...] = (),
        transposed: bool = False,
        step: int = 1,
        first_column: int = 0,
    ) -> StoredPart:
        """The stored form of what `read_rows` gives for a matrix of `dequantised`, copied to `device`.

        shape: the numbers of rows and columns.  The other arguments and the errors are those of `read_rows`.
        The values of the part are [rows, columns], or with `transposed` [columns, rows].
        """
        rows = slice(start, start + (shape[0] - 1) * step + 1, step)
        columns = slice(first_column, first_column + shape[1])
        part = self._stored_part(name, (*index, *([columns, rows] if transposed else [rows, columns]))).copied(device)
        self._mapped_bytes += part.num_bytes
        if self._mapped_bytes >= MAPPED_BYTES:
            self.close()
        return part

    def raw_blocks(self, name: str, max_bytes: int) -> Iterator[memoryview]:
        """The bytes of a tensor of any type, as an export writes them, in blocks of about `max_bytes` bytes.

        Raises CheckpointError if the file has become shorter.
        """
        if name in self.dequantised:
            yield from map(bytes_of, self.blocks(name, max_bytes))
            return
        tensor = self.tensors[name]
        with as_checkpoint_error(tensor.file), tensor.file.open("rb") as file:
            file.seek(tensor.start)
            for start in range(0, tensor.num_bytes, max_bytes):
                block = file.read(min(max_bytes, tensor.num_bytes - start))
                if not block:
                    raise CheckpointError(f"{tensor.file} became shorter while {name} was read.")
                yield memoryview(block)

    def blocks(self, name: str, max_bytes: int) -> Iterator[torch.Tensor]:
        """Copies of the rows of a tensor, in blocks of about `max_bytes` bytes."""
        tensor = self.tensors[name]
        num_rows = tensor.shape[0]
        step = max(1, max_bytes * num_rows // max(1, tensor.num_bytes))
        for start in range(0, num_rows, step):
            block = torch.empty(min(step, num_rows - start), *tensor.shape[1:], dtype=DTYPES[tensor.dtype])
            self.read_rows(name, start, block)
            yield block

    def stored_names(self, name: str) -> list[str]:
        """The names of the stored tensors of which the tensor `name` consists, with scales of its activations."""
        return [name]

    def read_stored(self, name: str) -> torch.Tensor:
        """A copy of the stored tensor `name`, one of `stored_tensors`."""
        with as_checkpoint_error(self._files[name]):
            tensor: torch.Tensor = self._map(name).get_tensor(name).clone()
        self._mapped_bytes += tensor.nbytes
        if self._mapped_bytes >= MAPPED_BYTES:
            self.close()
        return tensor

    def close(self) -> None:
        """Unmap all files.  Reading a tensor later maps its file again."""
        self._mapped.clear()
        self._stack.close()
        self._mapped_bytes = 0

    def _stored_part(self, name: str, where: tuple[int | slice, ...]) -> StoredPart:
        """The stored form of tensor[where], in mapped memory.  `name` is one of `dequantised`; where: see `_part`"""
        raise NotImplementedError

    def _part(self, name: str, where: tuple[int | slice, ...]) -> torch.Tensor:
        """tensor[where].  where: for each axis, an index, or a slice with start and stop"""
        if name in self.dequantised:
            return self._stored_part(name, where).values(DTYPES[self.tensors[name].dtype])
        return self._raw_part(name, where)

    def _raw_part(self, name: str, where: tuple[int | slice, ...]) -> torch.Tensor:
        """The stored tensor[where], in mapped memory.  where: see `_part`"""
        contiguous = tuple(
            slice(wanted.start, wanted.stop) if isinstance(wanted, slice) else wanted for wanted in where
        )
        with as_checkpoint_error(self._files[name]):
            part: torch.Tensor = self._map(name).get_slice(name)[contiguous]
        self.requested_bytes += part.nbytes
        return part[tuple(slice(None, None, wanted.step) for wanted in where if isinstance(wanted, slice))]

    def _map(self, name: str) -> Any:
        file = self._files[name]
        # Reading past the end of a mapped file kills the process.
        if file.stat().st_size < self._sizes[file]:
            raise CheckpointError(f"{file} became shorter while {name} was read.")
        if file not in self._mapped:
            self._mapped[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._mapped[file]


def _read_header(folder: Path, name: str) -> dict[str, StoredTensor]:
    """The tensors of one file.  Raises CheckpointError if the file is not a complete safetensors file."""
    path = folder / name
    with as_checkpoint_error(path):
        regular_file(folder, name)
        with safe_open(path, framework="pt"):
            pass  # the header is valid, and fits the size of the file
        length, header = header_of(path)
    return {
        name: StoredTensor(
            file=path,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=8 + length + entry["data_offsets"][0],
            num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    """The length in bytes of the header of a complete file, and the entry of each tensor in it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    return length, {name: entry for name, entry in header.items() if name != "__metadata__"}


@contextmanager
def as_checkpoint_error(path: Path) -> Iterator[None]:
    """A context manager that turns errors of safetensors and of the disk into a CheckpointError that names the file."""
    try:
        yield
    except UnsafeFileError as error:
        raise CheckpointError(f"{error}.") from None
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: this user has no permission to read it.") from error
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ").rstrip(".")
        if path.is_file():
            reason += f" (the file has {path.stat().st_size:,} bytes)"
        raise CheckpointError(f"{path} is not a complete safetensors file: {reason}.  Copy the file again.") from None


def _stored_twice(tensors: dict[str, StoredTensor], new: Iterable[str], file: Path) -> list[str]:
    """One error line for each tensor of `file` whose name also occurs in an earlier file."""
    names_by_file = defaultdict(list)
    for name in new:
        if name in tensors:
            names_by_file[tensors[name].file].append(name)
    return [
        f"{line} is both in {earlier} and in {file}."
        for earlier, names in names_by_file.items()
        for line in first_few(fold_by_layer(names))
    ]


def _compare_with_index(tensors: dict[str, StoredTensor], index: dict[str, str], folder: Path) -> None:
    """Raise CheckpointError if a tensor is not in the file that the index names, or not in the index."""
    absent, extra = defaultdict(list), defaultdict(list)  # names of tensors, by name of the file
    for name, file in index.items():
        if name not in tensors or tensors[name].file.name != file:
            absent[file].append(name)
    for name, tensor in tensors.items():
        if name not in index:
            extra[tensor.file.name].append(name)
    problems = [
        f"{problem}: "
        + ", ".join(first_few(f"{line} ({file})" for file, names in files.items() for line in fold_by_layer(names)))
        for problem, files in (("missing from the file that the index names", absent), ("not in it", extra))
        if files
    ]
    if problems:
        raise CheckpointError(f"{folder / INDEX} and its files disagree: {'; '.join(problems)}.")
