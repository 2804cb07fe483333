"""Reads the index of a checkpoint (`.metadata`) without running code from it, and checks the files that it names.

torch writes the index as a pickle, and a pickle can call any function.  This module's unpickler replaces every class of
torch by an inert record.  It checks each value of the records and builds a new index from these values.

Time and memory grow linearly with the size of the file, which is at most INDEX_BYTES.  A pickle can refer to one object
many times, so a few hundred bytes can describe a tuple of 10**15 parts.  This module visits no object more than once.
"""

import io
import pickle
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.metadata as md
from torch.distributed.checkpoint.filesystem import _StorageInfo

from sft.errors import CheckpointError
from sft.files import folder_files
from sft.files.atomic_files import unusable

INDEX = ".metadata"
INDEX_BYTES = 1 << 30  # largest index that is read; 48 layers of 128 experts with their optimizer states have 8 MB
_AXES = 16  # most axes of a tensor; ours have at most 4
_ARGUMENTS = 16  # most arguments of a record; torch's records have at most 5
_CHUNK_BYTES = 16  # fewest bytes that a chunk takes in the pickle


class InertRecord:
    """Replaces each class that an index names.  Stores the arguments and the state of an object, and runs no code.

    Without __setstate__, a pickle could set attributes of the class itself.
    """

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        # The pickle may hold one long tuple, and name it as the arguments of many records, which each copy it.
        if len(arguments) > _ARGUMENTS:
            raise pickle.UnpicklingError(f"a record has {len(arguments)} arguments")
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _records(module: str, names: str) -> dict[tuple[str, str], type]:
    return {(module, name): type(name, (InertRecord,), {}) for name in names.split()}


# Classes that torch 2.13 writes with core 0.16.1 and 0.19.2, and two classes of core up to 0.15 (MCoreMetadata,
# MCoreSavePlan).  The index also holds the save plans of all ranks, which are ignored.
_DCP = "torch.distributed.checkpoint"
_INDEX_NAMES: dict[tuple[str, str], Any] = {
    **_records("torch", "Size"),
    ("torch.serialization", "_get_layout"): InertRecord,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **_records(f"{_DCP}.metadata", "Metadata MetadataIndex StorageMeta TensorProperties _MEM_FORMAT_ENCODING"),
    **_records(f"{_DCP}.metadata", "TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata"),
    **_records(f"{_DCP}.filesystem", "_StorageInfo"),
    **_records(f"{_DCP}.planner", "SavePlan WriteItem WriteItemType TensorWriteData"),
    **_records("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata MCoreSavePlan"),
    **_records("pathlib", "PosixPath"),
    **_records("pathlib._local", "PosixPath"),  # Python 3.13
}


_FEW = reprlib.Repr()
_FEW.maxlevel, _FEW.maxstring, _FEW.maxother = 2, 80, 80
# Operations that the unpickler lacks: sets, which hash their elements, and operations that read data from outside the
# pickle.
_LEFT_OUT = {
    operation[0]
    for operation in (
        *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8, pickle.NEXT_BUFFER),
        *(pickle.READONLY_BUFFER, pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
    )
}


_PythonUnpickler: Any = pickle._Unpickler  # its methods are missing from the stubs of the standard library


class _IndexUnpickler(_PythonUnpickler):
    """The unpickler written in Python, restricted: a key of a dict is a string or a record.

    A dict hashes its keys.  The hash of a tuple visits each part as often as the tuple contains it: 2^40 times if 40
    nested tuples contain the next one twice.  Operations that an index does not need are left out.  This unpickler
    takes three times as long as Python's unpickler in C, whose operations cannot be replaced.
    """

    dispatch: dict[int, Callable[[Any], None]] = {
        code: operation for code, operation in _PythonUnpickler.dispatch.items() if code not in _LEFT_OUT
    }

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])  # keys and values since the last mark
        super().load_setitems()

    def load_dict(self) -> None:
        _check_keys(self.stack[::2])
        super().load_dict()

    dispatch |= {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.DICT[0]: load_dict}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _INDEX_NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which an index never contains") from None


def _check_keys(keys: list[Any]) -> None:
    for key in keys:
        if type(key) is not str and not isinstance(key, InertRecord):
            raise pickle.UnpicklingError(f"a key is of the type {type(key).__name__}")


def _sizes(value: Any) -> torch.Size:
    sizes = value.arguments[0] if _kind(value) == "Size" and value.arguments else value
    if type(sizes) is not tuple or len(sizes) > _AXES or not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"{_shown(sizes)} is not a shape")
    return torch.Size(sizes)


def _shown(value: Any) -> str:
    """A short text of the value for an error message, however large the value is."""
    return _FEW.repr(value)


def _kind(record: Any) -> str:
    return type(record).__name__ if isinstance(record, InertRecord) else ""


def _entry(record: Any, left: list[int]) -> md.TensorStorageMetadata | md.BytesStorageMetadata:
    if _kind(record) == "BytesStorageMetadata":
        return md.BytesStorageMetadata()
    if _kind(record) != "TensorStorageMetadata":
        raise ValueError(f"an entry is a {type(record).__name__}")
    dtype = record.state["properties"].state[0]  # the other properties are deprecated and never read
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{_shown(dtype)} is not a dtype")
    left[0] -= len(record.state["chunks"])
    if left[0] < 0:
        raise ValueError("entries share their chunks")
    chunks = [
        md.ChunkStorageMetadata(_sizes(c.state["offsets"]), _sizes(c.state["sizes"])) for c in record.state["chunks"]
    ]
    return md.TensorStorageMetadata(md.TensorProperties(dtype=dtype), _sizes(record.state["size"]), chunks)


def _storage_info(record: Any) -> _StorageInfo:
    name, offset, length = (record.state[field] for field in ("relative_path", "offset", "length"))
    if type(name) is not str or type(offset) is not int or type(length) is not int:
        raise ValueError(f"a chunk is at {_shown(name)}, {_shown(offset)}, {_shown(length)}")
    if "/" in name or not folder_files.is_name(name):
        raise ValueError(f"it places a chunk of the checkpoint at {_shown(name)}, not directly in the folder")
    if offset < 0 or length < 0:
        raise ValueError(f"it places a chunk of {name} at offset {offset}, length {length}")
    if record.state.get("transform_descriptors"):
        raise ValueError(f"chunks of {name} are compressed or encoded, but Megatron does not compress")
    return _StorageInfo(name, offset, length)


def _metadata_index(record: Any) -> md.MetadataIndex:
    name, offset = record.state["fqn"], record.state.get("offset")
    if type(name) is not str:
        raise ValueError(f"{_shown(name)} is not a key")
    return md.MetadataIndex(name, None if offset is None else _sizes(offset))


def read_index(folder: Path) -> md.Metadata:
    """Read the index of the checkpoint in `folder` without running code from its pickle.

    Raises CheckpointError if the index is unsafe, and StorageError if the disk fails.
    """
    path = regular_file(folder, INDEX)
    try:
        content = folder_files.read(folder, INDEX, INDEX_BYTES)
        record = _IndexUnpickler(io.BytesIO(content)).load()
        if _kind(record) not in ("Metadata", "MCoreMetadata"):
            raise ValueError(f"it holds a {type(record).__name__}")
        left = [len(content) // _CHUNK_BYTES]  # chunks that the file can hold
        entries = {str(key): _entry(entry, left) for key, entry in record.state["state_dict_metadata"].items()}
        storage = {_metadata_index(key): _storage_info(info) for key, info in record.state["storage_data"].items()}
    except OSError as error:  # an error of the disk does not mean that the index is damaged
        raise unusable(f"{path} cannot be read", folder, error, CheckpointError) from error
    except Exception as error:  # a broken or hostile file can raise any error
        raise CheckpointError(
            f"{path} is not the index of a torch_dist checkpoint, or contains other objects: {first_line(error)}.  No "
            "code of the file was run.  Take the checkpoint from a source you trust, or save it again."
        ) from error
    return md.Metadata(state_dict_metadata=entries, storage_data=storage, storage_meta=md.StorageMeta())


def check_files(folder: Path, storage: dict[md.MetadataIndex, _StorageInfo]) -> None:
    """Raise CheckpointError if a file that the index names is missing or too short."""
    num_bytes: dict[str, int] = {}
    for info in storage.values():
        name = info.relative_path
        if name not in num_bytes:
            num_bytes[name] = regular_file(folder, name).stat().st_size
        if info.offset + info.length > num_bytes[name]:
            raise CheckpointError(
                f"{folder / name} is cut short: {num_bytes[name]} bytes, and {INDEX} names chunks of it up to byte "
                f"{info.offset + info.length}.  The rest was lost in a copy or on the disk: copy the file again, or "
                "use another checkpoint."
            )


def regular_file(folder: Path, name: str) -> Path:
    """The path of the file `name` in the folder.

    Raises CheckpointError if the file is missing, is a pipe (reading it would block), or is a link to another folder.
    """
    path = folder / name
    try:
        return folder_files.regular_file(folder, name)
    except folder_files.UnsafeFileError as error:
        raise CheckpointError(f"{error}.  It was not opened; a checkpoint must not contain it.") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} is missing or unreadable ({first_line(error)}), so {folder} is not a complete torch_dist "
            "checkpoint."
        ) from error


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".,")
