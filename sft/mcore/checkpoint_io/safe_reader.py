"""What a torch_dist checkpoint holds, read without running any of it.

Stock readers run code that a file names in three places: the index `.metadata` (plain pickle), every byte object inside
the shards (random states, extra states, since core 0.19 the plain values) and, one step later, Transformer Engine,
which up to 2.17 unpickles the extra states it is handed.  Here the index is taken apart by `index.py`; byte objects go
through torch's weights-only unpickler with a short list of classes; extra states come out as None, but for `scales.py`.

Decides what may be read.  What a checkpoint must hold to suit a model is `shards.py`'s business.
"""

import argparse
import functools
import importlib
import io
import pathlib
import pickle
import re
import signal
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as md
from megatron.core.dist_checkpointing.strategies.checkpointable import LocalShardsContainer
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from sft.errors import CheckpointError
from sft.mcore.checkpoint_io.chunk_index import Parts
from sft.mcore.checkpoint_io.metadata_index import check_files, first_line, read_index, regular_file

COMMON_FILE = "common.pt"  # the plain values up to core 0.18
COMMON_OBJECT = "common_state/shard_0_1"  # and from 0.19 on
EXTRA_STATE = re.compile(r"(^|\.)_extra_state\d*(/|$)")


class _Dtype:
    """numpy.dtype, but of numbers and text alone: one of objects has numpy take bytes of the file for pointers."""

    def __init__(self, code: str, *_: Any) -> None:
        self._code, self._order = str(code), "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = state[1]

    def numpy(self) -> np.dtype[Any]:
        if not re.fullmatch(r"[biufcSU]\d{1,6}", self._code) or self._order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"numpy array of type {self._code!r}")
        return np.dtype(self._order + self._code)


class _Array(np.ndarray[Any, Any]):
    """numpy.ndarray, filled by its own __setstate__ from a _Dtype and bytes, and made in no other way."""

    def __new__(cls, *_: Any) -> "_Array":
        return super().__new__(cls, 0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if type(dtype) is not _Dtype or type(data) is not bytes:
            raise pickle.UnpicklingError("numpy array of other than plain bytes")
        super().__setstate__((1, shape, dtype.numpy(), bool(fortran), data))  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()  # saved again, it is an array like any other


# Megatron-LM's own list (megatron.core.safe_globals), of all supported versions.
_MEGATRON = (
    "megatron.core.enums:ModelType",
    "megatron.core.optimizer:OptimizerConfig",
    "megatron.core.rerun_state_machine:RerunDiagnostic",
    "megatron.core.rerun_state_machine:RerunMode",
    "megatron.core.rerun_state_machine:RerunState",
    "megatron.core.transformer.enums:AttnBackend",
    "megatron.core.transformer.enums:CudaGraphModule",
    "megatron.core.transformer.enums:CudaGraphScope",
    "megatron.core.transformer.enums:InferenceCudaGraphScope",
)


@functools.cache
def _allowed() -> list[tuple[Any, str]]:
    """What a byte object may name, and under which name."""
    classes = [
        argparse.Namespace,
        types.SimpleNamespace,
        pathlib.PosixPath,
        io.BytesIO,
        signal.Signals,
        torch.Generator,
    ]
    for module, _, name in (entry.partition(":") for entry in _MEGATRON):
        found = getattr(importlib.import_module(module), name, None)
        classes += [found] if found is not None else []
    numpy = [(_Dtype, "numpy.dtype"), (_Array, "numpy.ndarray")]
    numpy += [(_Array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]  # numpy 1, 2
    return [(found, f"{found.__module__}.{found.__qualname__}") for found in classes] + numpy


@contextmanager
def _only(classes: list[tuple[Any, str]]) -> Iterator[None]:
    """Have torch.load know these classes and no others.

    torch's own context manager adds to what was registered before; core registers numpy's own types as it is imported,
    and of two objects under one name torch takes either.
    """
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(classes)  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(registered)


def _values(stream: io.BytesIO, what: str) -> Any:
    """The plain values and tensors that torch.save wrote.  what: for the error, e.g. the file."""
    try:
        with _only(_allowed()):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken or hostile file can provoke
        raise CheckpointError(
            f"{what} does not hold plain values: {_refusal(error)}.  Nothing of it was run.  Take the checkpoint from "
            f"a source you trust, or save it again without that object."
        ) from error


def _refusal(error: Exception) -> str:
    """What torch.load says, without its advice to load unsafely."""
    named = re.search(r"GLOBAL (\S+) (?:was not|whose)", str(error))
    if named:
        return f"it names {named[1]}, which is not on the list of harmless classes"
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
    return text.splitlines()[0].rstrip(". ")


class Reader(dcp.FileSystemReader):
    """torch's reader of a checkpoint folder, which trusts nothing in it.

    Its errors are CheckpointError; through torch's own `load` they get out as such inside `unwrapped`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = Path(folder)
        self._index: md.Metadata | None = None
        self._reading: _StorageInfo | None = None

    def read_metadata(self) -> md.Metadata:  # without **kwargs torch asks for no other index
        """The checked index; read once.  Every file it names is there, and long enough."""
        if self._index is None:
            index = read_index(self.folder)
            check_files(self.folder, index.storage_data)
            self._index = index
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        try:
            with _only([]):  # tensors need none
                return super().read_data(plan, planner)
        except CheckpointError:
            raise
        except Exception as error:  # whatever a broken or hostile file can provoke
            raise CheckpointError(f"{self._where()} cannot be read: {_refusal(error)}.") from error

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        self._reading = sinfo
        return super()._slice_file(file, sinfo)

    def _where(self) -> str:
        keys = [key.fqn for key, place in self.storage_data.items() if place is self._reading]
        return f"{keys[0]} in {self.folder / self._reading.relative_path}" if self._reading else str(self.folder)


def _reader(source: Path | Reader) -> Reader:
    """A folder is read by a reader of its own, which reads the index again: 1.5 s where there are many experts."""
    return source if isinstance(source, Reader) else Reader(source)


class Planner(MCoreLoadPlanner):
    """Core's planner (shapes checked, FP8 targets), quick for many experts, with byte objects read as plain values."""

    state_dict: dict[str, Any]

    def __init__(self, *, extra_states: bool = False, **arguments: Any) -> None:
        """extra_states: as they are stored, for `scales.py`, and not None; nobody else may be handed them."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, **arguments)
        self._extra_states = extra_states

    def create_local_plan(self) -> LoadPlan:
        everything, entries = self.state_dict, self.metadata.state_dict_metadata
        many = {
            key: Parts(key, entries[key]).items(value.__create_chunk_list__())
            for key, value in everything.items()
            if isinstance(value, LocalShardsContainer) and isinstance(entries.get(key), md.TensorStorageMetadata)
        }
        self.state_dict = {key: value for key, value in everything.items() if key not in many}
        try:
            rest = super().create_local_plan().items
        finally:
            self.state_dict = everything
        return LoadPlan([*rest, *(item for items in many.values() for item in items)])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        found = _values(value, f"The object {key} of the checkpoint")
        if EXTRA_STATE.search(key) and not self._extra_states:
            # FP8 scales, as a pickle inside: Transformer Engine would run it.  None means that there are none.
            found = [None] * len(found) if isinstance(found, list) else None
        self.state_dict[key] = found


@contextmanager
def unwrapped(folder: Path) -> Iterator[None]:
    """torch's CheckpointException, which is no Exception and wraps the real one, as a CheckpointError."""
    try:
        yield
    except dcp.CheckpointException as failure:
        causes = [cause for cause, _ in failure.failures.values()]
        ours = [cause for cause in causes if isinstance(cause, CheckpointError)]
        if ours:
            raise ours[0] from failure
        if not isinstance(causes[0], Exception):  # an interrupt
            raise causes[0] from failure
        raise CheckpointError(f"{folder} cannot be loaded: {first_line(causes[0])}.") from failure


def load(wanted: dict[str, Any], source: Path | Reader, planner: Planner | None = None) -> None:
    """Replace the values of `wanted`, {key: tensor or anything in the place of an object}, by what the folder holds.

    Not collective: every process reads for itself, with or without a process group.
    """
    reader = _reader(source)
    reader.read_metadata()  # torch would swallow its error
    with unwrapped(reader.folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(wanted, storage_reader=reader, planner=planner or Planner(), no_dist=True)


def common_state(source: Path | Reader) -> dict[str, Any]:
    """The plain values of a checkpoint, wherever its version of core put them.  Not collective."""
    reader = _reader(source)
    folder = reader.folder
    if (folder / COMMON_FILE).exists() or (folder / COMMON_FILE).is_symlink():
        what = str(folder / COMMON_FILE)
        # From memory: of a file, torch also tries a tar format of long ago, and unpacks it before it looks inside.
        found = _values(io.BytesIO(regular_file(folder, COMMON_FILE).read_bytes()), what)
    elif COMMON_OBJECT in objects(reader):
        what, wanted = f"The object {COMMON_OBJECT} of {folder}", {COMMON_OBJECT: io.BytesIO()}
        load(wanted, reader)
        stored: Any = wanted[COMMON_OBJECT]
        found = stored[0] if isinstance(stored, list) and len(stored) == 1 else stored
    else:
        raise CheckpointError(f"{folder} has no plain values: neither {COMMON_FILE} nor an object {COMMON_OBJECT}.")
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} is a {type(found).__name__}, not the plain values of a checkpoint by name.")
    return found


def tensors(source: Path | Reader) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global shape and type of each stored tensor, by key."""
    entries = _reader(source).read_metadata().state_dict_metadata.items()
    return {k: (tuple(e.size), e.properties.dtype) for k, e in entries if isinstance(e, md.TensorStorageMetadata)}


def objects(source: Path | Reader) -> set[str]:
    """Keys of what is stored beside tensors."""
    entries = _reader(source).read_metadata().state_dict_metadata.items()
    return {key for key, entry in entries if isinstance(entry, md.BytesStorageMetadata)}
