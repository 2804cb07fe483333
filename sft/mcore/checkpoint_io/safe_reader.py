"""Reads a torch_dist checkpoint without running code from its files.

A checkpoint holds pickles in three places, and other readers run code from them:

    the index `.metadata`                  read by `metadata_index.py`
    byte objects inside the shards         read by torch's weights-only unpickler with a short list of classes.  They
                                           are random states, extra states, and since core 0.19 the plain values
    the content of an extra state          read as None, because Transformer Engine up to 2.17 would unpickle it.
                                           Only `fp8_state.py` reads the content

This module decides which contents of files may be read.  `engine_state.py` decides what a checkpoint must hold to suit
a model.
"""

import functools
import io
import mmap
import os
import pickle
import re
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
from megatron.core.safe_globals import SAFE_GLOBALS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from sft.errors import CheckpointError, SftError
from sft.files.atomic_files import unusable
from sft.files.folder_files import LIST_BYTES, UnsafeFileError, read_file
from sft.mcore.checkpoint_io.chunk_index import ChunkIndex
from sft.mcore.checkpoint_io.metadata_index import check_files, first_line, read_index, regular_file

COMMON_FILE = "common.pt"  # holds the plain values up to core 0.18
COMMON_OBJECT = "common_state/shard_0_1"  # holds the plain values from core 0.19 on
EXTRA_STATE = re.compile(r"(^|\.)_extra_state\d*(/|$)")


class _SafeDtype:
    """Replaces numpy.dtype, for numbers and text only: with an object dtype, numpy uses stored bytes as pointers."""

    def __init__(self, code: str, *_: Any) -> None:
        self._code, self._order = str(code), "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = state[1]

    def numpy(self) -> np.dtype[Any]:
        if not re.fullmatch(r"[biufcSU]\d{1,6}", self._code) or self._order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"numpy array of type {self._code!r}")
        return np.dtype(self._order + self._code)


class _SafeArray(np.ndarray[Any, Any]):
    """Replaces numpy.ndarray.  Only __setstate__ can fill the array, from a _SafeDtype and bytes."""

    def __new__(cls, *_: Any) -> "_SafeArray":
        return super().__new__(cls, 0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if type(dtype) is not _SafeDtype or type(data) is not bytes:
            raise pickle.UnpicklingError("numpy array of objects")
        super().__setstate__((1, shape, dtype.numpy(), bool(fortran), data))  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()  # saved as a plain array


@functools.cache
def _allowed() -> list[tuple[Any, str]]:
    """(class, name) of each class that a byte object may name: core's list, with safe classes instead of numpy's."""
    classes = [known for known in SAFE_GLOBALS if known.__module__.partition(".")[0] != "numpy"]
    numpy = [(_SafeDtype, "numpy.dtype"), (_SafeArray, "numpy.ndarray")]
    numpy += [(_SafeArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]  # numpy 1, 2
    # Core's list contains torch.Generator only from 0.19 on.
    return [(known, f"{known.__module__}.{known.__qualname__}") for known in {*classes, torch.Generator}] + numpy


@contextmanager
def _only_safe_globals(classes: list[tuple[Any, str]]) -> Iterator[None]:
    """A context in which torch.load accepts these classes and no others.

    torch's own context manager only adds to the registered classes.  Core registers numpy's classes when it is
    imported.  If two classes are registered under one name, torch may take either.
    """
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(classes)  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(registered)


def _plain_values(stream: io.BytesIO, subject: str) -> Any:
    """The plain values and tensors that torch.save wrote to `stream`.  subject: what an error message is about"""
    try:
        with _only_safe_globals(_allowed()):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken or hostile file can raise any error
        if "WeightsUnpickler error" not in str(error) and "GLOBAL" not in str(error):
            raise CheckpointError(
                f"{subject} cannot be read: {type(error).__name__}: {first_line(error)}.  The file is damaged, and no "
                "value was loaded from it.  Use another checkpoint, or copy this one again."
            ) from error
        raise CheckpointError(
            f"{subject} contains other objects than plain values: {_refusal(error)}.  No code of the file was run.  "
            "Take the checkpoint from a source you trust, or save it again without that object."
        ) from error


def _refusal(error: Exception) -> str:
    """The message of torch.load, without its advice to load unsafely."""
    named = re.search(r"GLOBAL (\S+) (?:was not|whose)", str(error))
    if named:
        return f"it names {named[1]}, which is not an allowed class"
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
    return text.splitlines()[0].rstrip(". ")


class SafeReader(dcp.FileSystemReader):
    """torch's reader of a checkpoint folder, which checks every file before it reads from it.

    Raises CheckpointError if a file is damaged or unsafe, and StorageError if the disk fails.  torch's own `load` wraps
    these errors in a CheckpointException; `unwrapped` extracts them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = Path(folder)
        self._index: md.Metadata | None = None
        self._current: _StorageInfo | None = None

    def read_metadata(self) -> md.Metadata:  # without **kwargs, so that torch asks for no other index
        """The index, which is read and checked only once.  Every file that it names exists and is long enough."""
        if self._index is None:
            index = read_index(self.folder)
            check_files(self.folder, index.storage_data)
            self._index = index
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        with self._reading_tensors():
            return super().read_data(plan, planner)

    def mapped_chunk(self, index: md.MetadataIndex) -> torch.Tensor:
        """One stored chunk, as a tensor over the memory-mapped file.  The caller must only read the tensor."""
        info: _StorageInfo = self.storage_data[index]
        with self._reading_tensors(), (self.folder / info.relative_path).open("rb") as file:
            with FakeTensorMode():  # torch then records where the elements are, and does not read them
                chunk = torch.load(self._slice_file(file, info), map_location="cpu", weights_only=True)
            storage = chunk.untyped_storage()
            start = info.offset + storage._checkpoint_offset
            if start + storage.nbytes() > min(info.offset + info.length, os.fstat(file.fileno()).st_size):
                raise CheckpointError(f"{self._position()} cannot be read: it ends before its last number.")
            if not storage.nbytes():
                return torch.empty(chunk.shape, dtype=chunk.dtype)
            padding = start % mmap.ALLOCATIONGRANULARITY
            content = mmap.mmap(
                file.fileno(), padding + storage.nbytes(), access=mmap.ACCESS_COPY, offset=start - padding
            )
            count = storage.nbytes() // chunk.itemsize
            numbers = torch.frombuffer(content, dtype=chunk.dtype, count=count, offset=padding)
            return numbers.as_strided(chunk.shape, chunk.stride(), chunk.storage_offset())

    @contextmanager
    def _reading_tensors(self) -> Iterator[None]:
        try:
            with _only_safe_globals([]):  # tensors need no classes
                yield
        except CheckpointError:
            raise
        except OSError as error:  # an error of the disk does not mean that the file is damaged
            raise unusable(f"{self._position()} cannot be read", self.folder, error, CheckpointError) from error
        except Exception as error:  # a broken or hostile file can raise any error
            raise CheckpointError(f"{self._position()} cannot be read: {_refusal(error)}.") from error

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        self._current = sinfo
        return super()._slice_file(file, sinfo)

    def _position(self) -> str:
        """Key and file of the entry that is being read, for an error message."""
        if self._current is None:
            return str(self.folder)
        keys = [key.fqn for key, info in self.storage_data.items() if info is self._current]
        return f"{keys[0]} in {self.folder / self._current.relative_path}"


def _reader(source: Path | SafeReader) -> SafeReader:
    """`source` itself, or a new reader of the folder, which reads the index again (5 s with many experts)."""
    return source if isinstance(source, SafeReader) else SafeReader(source)


class SafeLoadPlanner(MCoreLoadPlanner):
    """Core's planner, which checks shapes and fills FP8 targets.

    This subclass reads byte objects safely, and is also fast with many experts (`ChunkIndex`).
    """

    state_dict: dict[str, Any]

    def __init__(self, *, extra_states: bool = False, **arguments: Any) -> None:
        """extra_states: read extra states as they are stored (only for `fp8_state.py`); False: read them as None"""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, **arguments)
        self._extra_states = extra_states

    def create_local_plan(self) -> LoadPlan:
        state_dict, entries = self.state_dict, self.metadata.state_dict_metadata
        indexed = {
            key: ChunkIndex(key, entries[key]).read_items(value.__create_chunk_list__())
            for key, value in state_dict.items()
            if isinstance(value, LocalShardsContainer) and isinstance(entries.get(key), md.TensorStorageMetadata)
        }
        self.state_dict = {key: value for key, value in state_dict.items() if key not in indexed}
        try:
            others = super().create_local_plan().items
        finally:
            self.state_dict = state_dict
        return LoadPlan([*others, *(item for items in indexed.values() for item in items)])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        values = _plain_values(value, f"The object {key} of the checkpoint")
        if EXTRA_STATE.search(key) and not self._extra_states:
            # An extra state contains a pickle that Transformer Engine would run.  None: the layer has no FP8 scales.
            values = [None] * len(values) if isinstance(values, list) else None
        self.state_dict[key] = values


@contextmanager
def unwrapped(folder: Path) -> Iterator[None]:
    """A context that replaces torch's CheckpointException, which is a BaseException, by an error of a rank inside it.

    It raises the first SftError as it is.  If there is none, it raises the first error if this is KeyboardInterrupt or
    SystemExit, else CheckpointError with the message of the first error.
    folder: the checkpoint, for the message
    """
    try:
        yield
    except dcp.CheckpointException as failure:
        causes = [cause for cause, _ in failure.failures.values()]
        known = [cause for cause in causes if isinstance(cause, SftError)]
        if known:
            raise known[0] from failure
        if not isinstance(causes[0], Exception):  # KeyboardInterrupt, SystemExit
            raise causes[0] from failure
        raise CheckpointError(f"{folder} cannot be loaded: {first_line(causes[0])}.") from failure


def load(wanted: dict[str, Any], source: Path | SafeReader, planner: SafeLoadPlanner | None = None) -> None:
    """Fill `wanted` from a checkpoint.  Not collective: every process reads for itself, also without a process group.

    wanted: {key: value}.  A value that is a tensor is filled in place.  The stored object replaces any other value

    Raises CheckpointError if a file is damaged or unsafe, or if an entry is missing.
    """
    reader = _reader(source)
    reader.read_metadata()  # now, because torch's load would lose an error of the index
    with unwrapped(reader.folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(wanted, storage_reader=reader, planner=planner or SafeLoadPlanner(), no_dist=True)


def common_state(source: Path | SafeReader) -> dict[str, Any]:
    """The plain values of a checkpoint, which core 0.16 writes as a file, and 0.19 as an object.  Raises as `load`."""
    reader = _reader(source)
    folder = reader.folder
    if (folder / COMMON_FILE).exists() or (folder / COMMON_FILE).is_symlink():
        subject = str(folder / COMMON_FILE)
        # Read from memory: given a path, torch also tries an old tar format and unpacks it before any check.
        values = _plain_values(io.BytesIO(_content(folder, COMMON_FILE)), subject)
    elif COMMON_OBJECT in objects(reader):
        subject, wanted = f"The object {COMMON_OBJECT} of {folder}", {COMMON_OBJECT: io.BytesIO()}
        load(wanted, reader)
        stored: Any = wanted[COMMON_OBJECT]
        values = stored[0] if isinstance(stored, list) and len(stored) == 1 else stored
    else:
        raise CheckpointError(
            f"{folder} has neither the file {COMMON_FILE} nor an object {COMMON_OBJECT}, so its step and settings are "
            "unknown."
        )
    if not isinstance(values, dict):
        raise CheckpointError(f"{subject} is a {type(values).__name__}, not a dict of plain values.")
    return values


def _content(folder: Path, name: str) -> bytes:
    path = regular_file(folder, name)
    try:
        return read_file(path, LIST_BYTES)
    except OSError as error:
        raise unusable(f"{path} cannot be read", folder, error, CheckpointError) from error
    except UnsafeFileError as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}.") from error


def tensors(source: Path | SafeReader) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global shape and dtype of each stored tensor, by key."""
    entries = _reader(source).read_metadata().state_dict_metadata.items()
    return {k: (tuple(e.size), e.properties.dtype) for k, e in entries if isinstance(e, md.TensorStorageMetadata)}


def objects(source: Path | SafeReader) -> set[str]:
    """Keys of the stored entries that are objects, not tensors."""
    entries = _reader(source).read_metadata().state_dict_metadata.items()
    return {key for key, entry in entries if isinstance(entry, md.BytesStorageMetadata)}
