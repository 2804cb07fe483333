"""The safetensors files of a Hugging Face folder: reads some rows of a tensor, writes one tensor after the other.

The safetensors library reads the files: it checks each header (sizes, gaps, overlaps, types, a file that is cut short)
and maps the file into memory, so that rows are read when they are asked for.  This module decides which files belong
to the folder, compares them with their index, and limits how much is mapped: pages of a mapped file count as memory of
the process until it is unmapped.  Which tensors a model needs is not known here.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sft.checkpoint.manifest import Entry, HashingFile
from sft.errors import CheckpointError
from sft.hf.convert.tensor_check import fold_by_layer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5 * 10**9  # of one file, as the hub recommends
MAPPED_BYTES = 64 << 20  # read from mapped files before they are unmapped; to open one again costs its header


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file.  dtype: as safetensors names it, one of `DTYPES` or any other"""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class SafetensorsFolder:
    """The tensors of a folder by name.  Raises CheckpointError listing what is wrong with the files."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._sizes: dict[Path, int] = {}
        self._mapped: dict[Path, Any] = {}
        self._stack, self._mapped_bytes = ExitStack(), 0
        index = _read_index(folder)
        problems = []
        for file in sorted({folder / name for name in index.values()} if index else {folder / SINGLE}):
            try:
                tensors = _read_header(file)
                self._sizes[file] = file.stat().st_size
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
                continue
            problems += _stored_twice(self.tensors, tensors, file)
            self.tensors |= tensors
        if problems:
            raise CheckpointError("\n  ".join(problems))
        if index is not None:
            _compare_with_index(self.tensors, index, folder)

    def read_rows(self, name: str, start: int, target: torch.Tensor) -> memoryview:
        """Fill `target`, whole rows of the tensor's type, from row `start` on; returns the bytes of `target`.

        Raises CheckpointError where the file has changed since it was opened.
        """
        tensor = self.tensors[name]
        step = max(1, MAPPED_BYTES // max(1, tensor.row_bytes))
        for first in range(0, target.shape[0], step):
            rows = target[first : first + step]
            if not rows.numel():
                continue
            with _as_checkpoint_error(tensor.file):
                rows.copy_(self._map(name).get_slice(name)[start + first : start + first + len(rows)])
            self._mapped_bytes += rows.nbytes
            if self._mapped_bytes >= MAPPED_BYTES:
                self.close()
        return target.view(torch.uint8).reshape(-1).numpy().data

    def close(self) -> None:
        """Unmap all files; the next read maps its file again."""
        self._mapped.clear()
        self._stack.close()
        self._mapped_bytes = 0

    def _map(self, name: str) -> Any:
        file = self.tensors[name].file
        # Reading behind the end of a mapped file kills the process.
        if file.stat().st_size < self._sizes[file]:
            raise CheckpointError(f"{file} became shorter while {name} was read.")
        if file not in self._mapped:
            self._mapped[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._mapped[file]


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file.  Raises CheckpointError where it is no whole safetensors file."""
    with _as_checkpoint_error(path):
        if path.exists() and not path.is_file():
            raise SafetensorError("it is no file")  # a pipe would block for ever
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {
                name: StoredTensor(file=path, dtype=part.get_dtype(), shape=tuple(part.get_shape()))
                for name, part in slices.items()
            }


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    """Errors of the safetensors library, and of the disk, as a CheckpointError that names the file."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ").rstrip(".")
        if path.is_file():
            reason += f" (the file has {path.stat().st_size:,} bytes)"
        raise CheckpointError(f"{path} is not a whole safetensors file: {reason}.  Copy it again.") from None


def _read_index(folder: Path) -> dict[str, str] | None:
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
        names: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if not names or not all(isinstance(name, str) for pair in names.items() for name in pair):
            raise ValueError("weight_map does not map names to names")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged ({type(error).__name__}: {error}).") from None
    for name in names.values():
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise CheckpointError(f"{folder / INDEX} names {name!r}, which is no safetensors file of this folder.")
    return names


def _stored_twice(tensors: dict[str, StoredTensor], new: Iterable[str], file: Path) -> list[str]:
    """One error line for each tensor of `file` whose name also occurs in an earlier file."""
    names_by_file = defaultdict(list)
    for name in new:
        if name in tensors:
            names_by_file[tensors[name].file].append(name)
    return [
        f"{line} is both in {earlier} and in {file}."
        for earlier, names in names_by_file.items()
        for line in fold_by_layer(names)
    ]


def _compare_with_index(tensors: dict[str, StoredTensor], index: dict[str, str], folder: Path) -> None:
    """Raise CheckpointError where a tensor is not in the file that the index names, or not in the index."""
    absent, extra = defaultdict(list), defaultdict(list)  # by file
    for name, file in index.items():
        if name not in tensors or tensors[name].file.name != file:
            absent[file].append(name)
    for name, tensor in tensors.items():
        if name not in index:
            extra[tensor.file.name].append(name)
    problems = [
        f"{problem}: {', '.join(f'{line} ({file})' for file, names in files.items() for line in fold_by_layer(names))}"
        for problem, files in (("not in the file it names", absent), ("not in it", extra))
        if files
    ]
    if problems:
        raise CheckpointError(f"{folder / INDEX} and its files disagree: {'; '.join(problems)}.")


def write_tensors(
    folder: Path,
    planned: Mapping[str, torch.Tensor],
    tensors: Iterable[torch.Tensor],
    shard_bytes: int = SHARD_BYTES,
    *,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Write the tensors, in the order of `planned`, into files of the existing `folder`, and an index of several files.

    The safetensors library writes a file in one call, which needs all tensors of the file in memory.  This holds one:
    it puts the bytes together, and the library reads each header back once the file is complete.

    planned: type and shape of each, as tensors of the meta device; advance: called with the bytes of each tensor
    Returns size and SHA-256 of each file, and the SHA-256 of each tensor.  The disk has the files of tensors then.
    """
    files, digests, file_of = {}, {}, {}
    shards, tensors = split_into_shards(planned, shard_bytes), iter(tensors)
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with closing(HashingFile(folder / name)) as file:
            file.write(_header(shard))
            for (tensor_name, plan), tensor in zip(shard.items(), tensors):
                assert (tensor.dtype, tuple(tensor.shape)) == (plan.dtype, tuple(plan.shape)), tensor_name
                data = tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data
                file.write(data)
                file.check()
                digests[tensor_name], file_of[tensor_name] = hashlib.sha256(data).hexdigest(), name
                advance(len(data))
            files[name] = file.finish()
        with safe_open(folder / name, framework="pt") as written:  # the library checks it against the file's size
            assert set(written.keys()) == set(shard), name
    if len(shards) > 1:
        metadata = {"total_size": sum(plan.nbytes for plan in planned.values())}
        content = {"metadata": metadata, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return files, digests


def split_into_shards(planned: Mapping[str, torch.Tensor], shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    """The tensors of each file: as many as `shard_bytes` hold, in their order; a larger one has a file of its own."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    num_bytes = 0
    for name, tensor in planned.items():
        if shards[-1] and num_bytes + tensor.nbytes > shard_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = tensor
        num_bytes += tensor.nbytes
    return shards


def _header(planned: Mapping[str, torch.Tensor]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in planned.items():
        offsets = [end, end + tensor.nbytes]
        content[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data behind it
    return len(text).to_bytes(8, "little") + text
