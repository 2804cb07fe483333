"""The tensors of a Hugging Face folder: where each lies in its safetensors files, and reading some rows of one.

Files are read, not mapped: what is mapped counts as memory, and a file that is cut short kills a process that maps it.
Headers are taken for what a stranger wrote.  Which tensors a model needs is not known here.
"""

import json
import math
import os
import re
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft.errors import CheckpointError
from sft.hf.convert.tensor_check import fold_by_layer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER = 100_000_000  # what the safetensors library accepts


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor: `num_bytes` from `offset` of a file on, row by row."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Folder:
    """The tensors of a folder by name, and their files, which stay open.

    Raises CheckpointError listing what is wrong with the files.
    """

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, Stored] = {}
        self._open: dict[Path, int] = {}
        listed = _listed(folder)
        problems = []
        for file in sorted({folder / name for name in listed.values()} if listed else {folder / SINGLE}):
            try:
                found = _header(file)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            twice = defaultdict(list)  # by the file that was there before
            for name in found:
                if name in self.tensors:
                    twice[self.tensors[name].file].append(name)
            problems += [
                f"{line} is both in {other} and in {file}."
                for other, names in twice.items()
                for line in fold_by_layer(names)
            ]
            self.tensors |= found
        if problems:
            raise CheckpointError("\n  ".join(problems))
        if listed is not None:
            _same_as_index(self.tensors, listed, folder)

    def read_rows(self, name: str, start: int, into: torch.Tensor) -> memoryview:
        """Fill `into`, whole rows of the tensor's type, from row `start` on; the bytes that were read."""
        stored = self.tensors[name]
        view = into.view(torch.uint8).reshape(-1).numpy().data
        row = stored.num_bytes // max(1, stored.shape[0])
        file, at, done = self._file(stored.file), stored.offset + start * row, 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], at + done)
            if not count:
                raise CheckpointError(f"{stored.file} became shorter while {name} was read.")
            done += count
        return view

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def _file(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]


def _listed(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, as the index says; None where there is one file for all.  Raises CheckpointError."""
    single, index = (folder / SINGLE).exists(), (folder / INDEX).exists()
    if single and index:
        raise CheckpointError(
            f"{folder} has both {SINGLE} and {INDEX}, of which only one can be meant.  Remove the other."
        )
    if not single and not index:
        pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
        has = f"has {pickles[0]}, a pickle, which can run any code and is not opened" if pickles else "has no weights"
        raise CheckpointError(
            f"{folder} {has}: expected {SINGLE}, or {INDEX} and the files that it names.  transformers writes them: "
            f"AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OTHER)."
        )
    if single:
        return None
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if not found or not all(isinstance(name, str) for pair in found.items() for name in pair):
            raise ValueError("weight_map is not of names")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged ({type(error).__name__}: {error}).") from None
    names: dict[str, str] = found
    for name in names.values():
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise CheckpointError(f"{folder / INDEX} names {name!r}, which is no safetensors file of this folder.")
    return names


def _same_as_index(found: dict[str, Stored], listed: dict[str, str], folder: Path) -> None:
    absent, extra = defaultdict(list), defaultdict(list)  # by file
    for name, file in listed.items():
        if name not in found or found[name].file.name != file:
            absent[file].append(name)
    for name, stored in found.items():
        if name not in listed:
            extra[stored.file.name].append(name)
    told = [
        f"{what}: {', '.join(f'{line} ({file})' for file, names in files.items() for line in fold_by_layer(names))}"
        for what, files in (("not in the file it names", absent), ("not in it", extra))
        if files
    ]
    if told:
        raise CheckpointError(f"{folder / INDEX} and its files disagree: {'; '.join(told)}.")


def _header(path: Path) -> dict[str, Stored]:
    """The tensors of one file.  Raises CheckpointError where it is no whole safetensors file."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")  # a pipe would block for ever
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER, total - 8):
                raise ValueError(f"it is {total:,} bytes long, and its header alone would be {length:,}")
            content = json.loads(file.read(length), object_pairs_hook=_once)
        return _entries(path, content, 8 + length, total)
    except (OSError, ValueError, struct.error, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error if isinstance(error, ValueError) else "no header"
        raise CheckpointError(f"{path} is not a whole safetensors file: {why}.  Copy it again.") from None


def _entries(path: Path, content: Any, data: int, total: int) -> dict[str, Stored]:
    if not isinstance(content, dict):
        raise ValueError("its header is not a group of names")
    content.pop("__metadata__", None)
    found, end = {}, 0
    for name, told in sorted(content.items(), key=lambda pair: _offsets(*pair)):
        first, last = _offsets(name, told)
        dtype, shape = told.get("dtype"), told.get("shape")
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_size, shape)):
            raise ValueError(f"{name} is {dtype!r} {shape!r}")
        if first != end:
            raise ValueError(f"{name} begins at byte {first:,} of the data, and what is before it ends at {end:,}")
        if dtype in DTYPES and last - first != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{name} is {dtype} {shape} in {last - first:,} bytes")
        found[name] = Stored(file=path, dtype=dtype, shape=tuple(shape), offset=data + first, num_bytes=last - first)
        end = last
    if data + end != total:
        raise ValueError(f"it is {total:,} bytes long, and its header describes {data + end:,}")
    return found


def _offsets(name: str, told: Any) -> tuple[int, int]:
    place = told.get("data_offsets") if isinstance(told, dict) else None
    if not isinstance(place, list) or len(place) != 2 or not all(map(_is_size, place)) or place[1] < place[0]:
        raise ValueError(f"{name} is nowhere: {place!r}")
    return place[0], place[1]


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found
