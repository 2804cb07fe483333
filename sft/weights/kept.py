"""Writes and reads the folder `hf/` of a run or an imported checkpoint, from which `sft export` completes a model.

    run.dir/hf/
        config.json                     copy of the model's file
        generation_config.json          copy of the model's file, with the end tokens of the run
        tokenizer, chat template        files of the run (`served_files.py`), or copies of the model's files
        passed_through.safetensors      tensors that are not trained, unchanged; several files if larger than 5 GB
        source.json                     the name of the model; types and shapes of the tensors that an export must have;
                                        size and SHA-256 of each other file; SHA-256 of each tensor that is not trained;
                                        switches, date and end tokens in the tokenizer files and templates

A run writes the folder before its first step, because the cache of the hub may be emptied while the run trains.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sft.checkpoint import manifest
from sft.checkpoint.manifest import Manifest, Verify
from sft.console import size
from sft.errors import CheckpointError
from sft.files.file_digest import Entry, entry_of
from sft.files.folder_files import LIST_BYTES, check_name
from sft.files.folder_files import copy as copy_file
from sft.files.folder_files import matching, read_json
from sft.hf.hub import CONFIG, IMPORTED, imported
from sft.hf.safetensors_writer import SHARD_BYTES, TYPES, bytes_of, write_tensors
from sft.hf.source import Expected, Source, open_source
from sft.weights.atomic_folder import copy_companions, new_folder
from sft.weights.serving import served_files
from sft.weights.serving.served import Record, Served, read_record

SOURCE, STEM = "source.json", "passed_through"
FORMAT = "sft source 1"
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A folder `hf/`, as its source.json describes it."""

    folder: Path
    name: str  # the model as the recipe names it
    commit: str | None = None  # commit on the hub, if the files came from the cache of the hub
    origin: Path  # the folder from which the files were copied
    files: dict[str, Entry] = field(default_factory=dict)
    tensors: Mapping[str, Expected] | None = None  # tensors that an export must have; None: unknown
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of each tensor that is passed through
    has_mtp: bool = False  # whether the block for multi-token prediction is trained
    served: Record | None = None  # settings of the run in tokenizer and template; None: both are the model's files

    def damage(self, verify: Verify) -> list[str]:
        """One line for each file that is missing or differs."""
        return manifest.damage(self.folder, Manifest(files=self.files, facts={}), verify=verify)

    def passed_through(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are passed through, one at a time, in the order of `digests`."""
        files: dict[str, Path] = {}
        for path in matching(self.folder, f"{STEM}*.safetensors"):
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        return read_tensors({name: files[name] for name in self.digests})


def read_beside(parent: Path) -> "Kept | None":
    """The folder hf/ in `parent`, a run or an imported checkpoint; None if there is no hf/ with a source.json."""
    return read(imported(parent)) if (parent / IMPORTED / SOURCE).exists() else None


def read(folder: Path) -> Kept | None:
    """The contents of source.json in `folder`, a folder `hf/`; None if there is no source.json.

    Raises CheckpointError if source.json is damaged.  The other files are not read.
    """
    path = folder / SOURCE
    if not path.exists():
        return None
    try:
        content = read_json(folder, SOURCE, LIST_BYTES)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        tensors = content["tensors"]
        return Kept(
            folder=folder,
            name=str(content["name"]),
            commit=None if content["commit"] is None else str(content["commit"]),
            origin=Path(content["origin"]),
            files={check_name(name): _entry(entry) for name, entry in content["files"].items()},
            tensors=None if tensors is None else {name: _expected(values) for name, values in tensors.items()},
            digests=dict(content["digests"]),
            has_mtp=bool(content.get("has_mtp", False)),
            served=read_record(content.get("served")),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).") from error


def _entry(values: dict[str, Any]) -> Entry:
    entry = Entry(**values)
    if type(entry.num_bytes) is not int or entry.num_bytes < 0 or not isinstance(entry.sha256, str):
        raise ValueError("a file has no size and SHA-256")
    return entry


def _expected(values: dict[str, Any]) -> Expected:
    expected = Expected(**{**values, "shape": tuple(values["shape"])})
    if not all(type(length) is int and length >= 0 for length in expected.shape):
        raise ValueError("a shape is no list of lengths")
    return expected


def keep(source: Source, target: Path, served: Served | None = None) -> None:
    """Write the folder `target` for a run that starts from the weights of `source`.

    served: tokenizer and template of the run; None: copies those of `source`
    Raises StorageError if the disk has no room, and CheckpointError if the source cannot be read.
    """
    planned = {name: on_meta(source.manifest[name], name) for name in source.names("passed through")}
    with new_folder(target, sum(tensor.nbytes for tensor in planned.values())) as folder:
        digests: dict[str, str] = {}
        if planned:
            tensors = not_trained(source)
            _, digests = write_tensors(folder, planned, tensors, SHARD_BYTES, stem=STEM, digested=planned)
        _copy_small_files(source.folder, folder)
        model = Kept(folder=folder, name=source.name, origin=source.folder, tensors=source.manifest, digests=digests)
        _write(replace(model, has_mtp=source.architecture.model.has_mtp, served=served_files.write(folder, served)))


def keep_files(folder: Path, name: str, target: Path, served: Served | None = None) -> None:
    """Write the folder `target` for a run whose weights do not come from the Hugging Face folder `folder`."""
    with new_folder(target, 0) as temporary:
        _copy_small_files(folder, temporary)
        _write(Kept(folder=temporary, name=name, origin=folder, served=served_files.write(temporary, served)))


def copy(kept: Kept, target: Path, served: Served | None = None, *, origin: Path | None = None) -> None:
    """Copy the folder of another run or of an imported checkpoint to `target`.

    served: tokenizer and template of the run; None: copies those of `kept`
    origin: the folder that the copy records as its origin; None: the folder that is copied
    Raises CheckpointError if the folder is damaged.
    """
    with new_folder(target, sum(entry.num_bytes for entry in kept.files.values())) as folder:
        for name, entry in kept.files.items():
            copy_file(kept.folder, name, folder)
            if entry_of(folder / name) != entry:
                raise CheckpointError(f"{kept.folder / name} is damaged: its size or SHA-256 is another.")
        record = served_files.write(folder, served)
        _write(replace(kept, folder=folder, origin=origin or kept.folder, served=record))


def restore(kept: Kept, served: Served | None = None) -> None:
    """Replace the damaged folder by a new copy of its origin.

    served: tokenizer and template of the run; used only if the damaged folder had them, too
    Raises CheckpointError, ConfigError or OSError if the origin is missing or has changed.
    """
    served = None if kept.served is None else served
    remade = kept.folder.with_name(f"{kept.folder.name}.tmp-{secrets.token_hex(4)}")
    try:
        if (other := read(kept.origin)) is not None:
            copy(other, remade, served)
        elif kept.tensors is None:
            keep_files(kept.origin, kept.name, remade, served)
        else:
            keep(open_source(kept.origin, kept.name, has_mtp=kept.has_mtp), remade, served)
        new = read(remade)
        if new is None or (new.files, new.tensors) != (kept.files, kept.tensors):
            raise CheckpointError(f"{kept.origin} has changed since the run began.")
        _rename(remade, kept.folder)
    finally:
        shutil.rmtree(remade, ignore_errors=True)


def serve(kept: Kept, served: Served) -> None:
    """Replace the model's tokenizer and template in a folder of an earlier version by those of the run."""
    remade = kept.folder.with_name(f"{kept.folder.name}.tmp-{secrets.token_hex(4)}")
    copy(kept, remade, served, origin=kept.origin)
    _rename(remade, kept.folder)


def _rename(new: Path, folder: Path) -> None:
    """Rename the folder `new` to `folder`, and remove the old `folder`."""
    old = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def on_meta(tensor: Expected, name: str) -> torch.Tensor:
    """A tensor of this type and shape without values.  Raises CheckpointError for a type that cannot be copied."""
    if tensor.dtype not in TYPES:
        raise CheckpointError(f"{name} has the type {tensor.dtype}, which cannot be copied; only {', '.join(TYPES)}.")
    return torch.empty(tensor.shape, dtype=TYPES[tensor.dtype], device="meta")


def not_trained(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and value of each tensor of `source` that is passed through.  Quantised tensors are dequantised."""
    for name in source.names("passed through"):
        yield name, read_tensor(source, name)


def read_tensor(source: Source, name: str) -> torch.Tensor:
    """The value of a tensor of `source`.  A quantised tensor is dequantised."""
    expected = source.manifest[name]
    values = torch.empty(expected.shape, dtype=TYPES[expected.dtype])
    target, start = memoryview(bytes_of(values)).cast("B"), 0
    for block in source.stored.raw_blocks(name, _BLOCK_BYTES):
        target[start : start + len(block)] = block
        start += len(block)
    return values


def read_tensors(file_of: Mapping[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Read tensors of safetensors files, one at a time.  file_of: the file of each tensor"""
    for name, path in file_of.items():
        with safe_open(path, framework="pt") as file:
            yield name, file.get_tensor(name)


def _copy_small_files(source: Path, target: Path) -> None:
    copy_file(source, CONFIG, target)
    copy_companions(source, target)


def _write(kept: Kept) -> None:
    """Write source.json, which lists all other files of the folder."""
    folder, origin, commit = kept.folder, kept.origin.absolute(), kept.commit
    if commit is None and origin.parent.name == "snapshots":  # in the cache of the hub
        commit = origin.name
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    content = {
        "format": FORMAT,
        "name": kept.name,
        "commit": commit,
        "origin": str(origin),
        "files": {str(path.relative_to(folder)): asdict(entry_of(path)) for path in paths},
        "tensors": None if kept.tensors is None else {key: asdict(tensor) for key, tensor in kept.tensors.items()},
        "digests": kept.digests,
        **({"has_mtp": True} if kept.has_mtp else {}),
        **({"served": asdict(kept.served)} if kept.served else {}),
    }
    (folder / SOURCE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as a tensor, for comparisons: as numbers, 0.0 equals -0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes of a tensor."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def describe(kept: Kept) -> str:
    """A line for the log: kept 341 tensors that are not trained and the files of Qwen/... in runs/a/hf (1.2 GiB)"""
    passed, num_bytes = len(kept.digests), sum(entry.num_bytes for entry in kept.files.values())
    tensors = f"{passed:,} tensor{'s that are' if passed > 1 else ' that is'} not trained and " if passed else ""
    return f"kept {tensors}the files of {kept.name} in {kept.folder} ({size(num_bytes)}), for exports"
