"""Writes safetensors files tensor by tensor.

The safetensors library writes a file in one call, which needs all tensors of the file in memory.  This module writes
the bytes itself, and needs one tensor at a time.  At the end, safe_open checks the header of each file.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sft.files.file_digest import Entry, HashingFile

SHARD_BYTES = 5 * 10**9  # largest file, as the hub recommends
TYPES = {  # names of types in safetensors
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor as they are in a file."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_tensors(
    folder: Path,
    planned: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    shard_bytes: int = SHARD_BYTES,
    *,
    stem: str = "model",
    digested: Collection[str] = (),
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Write the tensors, in the order of `planned`, into files of the existing `folder`, with an index if needed.

    planned   type and shape of each tensor by name, as tensors on the meta device
    tensors   name and value of each tensor, in the order of `planned`
    stem      first part of the names of the files
    digested  names of tensors whose digests are returned
    advance   called with each tensor's size in bytes
    shard_bytes: largest size of a file, unless one tensor is larger
    Returns size and SHA-256 of each file, by name, and the SHA-256 of each tensor in `digested`.  The files are flushed
    to disk.
    """
    files: dict[str, Entry] = {}
    digests: dict[str, str] = {}
    file_of: dict[str, str] = {}
    shards, tensors = split_into_shards(planned, shard_bytes), iter(tensors)
    for number, shard in enumerate(shards, 1):
        part = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        name = f"{stem}{part}.safetensors"
        with closing(HashingFile(folder / name)) as file:
            file.write(_header(shard))
            for plan_name, plan in shard.items():
                tensor_name, tensor = next(tensors)
                actual, expected = (tensor_name, tensor.dtype, tensor.shape), (plan_name, plan.dtype, plan.shape)
                assert actual == expected, f"{actual} instead of {expected}"
                data = bytes_of(tensor)
                file.write(data)
                file.check()
                if tensor_name in digested:
                    digests[tensor_name] = hashlib.sha256(data).hexdigest()
                file_of[tensor_name] = name
                advance(len(data))
            files[name] = file.finish()
        with safe_open(folder / name, framework="pt") as written:  # checks the header against the file's size
            assert set(written.keys()) == set(shard), name
    assert next(tensors, None) is None, "more tensors than planned"
    if len(shards) > 1:
        metadata = {"total_size": sum(plan.nbytes for plan in planned.values())}
        content = {"metadata": metadata, "weight_map": dict(sorted(file_of.items()))}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return files, digests


def split_into_shards(planned: Mapping[str, torch.Tensor], shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    """The tensors of each file, in their order, up to `shard_bytes` per file.  A larger tensor gets its own file."""
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
        content[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data that follows
    return len(text).to_bytes(8, "little") + text
