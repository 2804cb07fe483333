"""Tokenised samples of one file on disk: written once, atomically, and memory-mapped afterwards.

    tokens.npy   int32 [total]   all samples end to end
    mask.npy     bool  [total]   the same for their loss masks
    rows.npy     int64 [rows, 5] one line per row of the file, dropped rows included (columns: `encode.Block`)
    ledger.json  what became of the samples, and digests of the three arrays; written last

A store is used only if its digests match what is on disk; anything else is rebuilt, never trusted.  Writers
work in a folder of their own and rename it, so any number of them may build the same store at once.
Does not decide when a store is out of date: its name is made of everything that it depends on (`corpus.py`).
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sft.data.encode import Block
from sft.data.ledger import count_rows

_ARRAYS = {"tokens": np.dtype(np.int32), "mask": np.dtype(np.bool_), "rows": np.dtype(np.int64)}
_HASH_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Store:
    """The memory-mapped arrays of one file's samples."""

    tokens: np.ndarray
    mask: np.ndarray
    rows: np.ndarray
    digest: str


def open_store(folder: Path) -> Store | None:
    """The store in `folder`, or None if there is none, or not a whole and unchanged one."""
    try:
        ledger = json.loads((folder / "ledger.json").read_text(encoding="utf-8"))
        arrays = {name: _map(folder / f"{name}.npy") for name in _ARRAYS}
    except (OSError, ValueError, EOFError):
        return None
    digests = {name: _digest(array) for name, array in arrays.items()}
    if not isinstance(ledger, dict) or ledger.get("digests") != digests:
        return None
    return Store(**arrays, digest=hashlib.sha256("".join(digests.values()).encode()).hexdigest())


def write_store(folder: Path, blocks: Iterable[Block]) -> None:
    """Writes the blocks as the store `folder`, which appears whole or not at all.

    Where another process published the same store first, its copy stays.  Memory stays at one block and 40
    bytes per row, whatever the size of the file.
    """
    temp = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:12]}")
    temp.mkdir(parents=True)
    try:
        _write_arrays(temp, blocks)
        _publish(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _write_arrays(temp: Path, blocks: Iterable[Block]) -> None:
    tables = [np.empty((0, 5), dtype=np.int64)]
    total = 0
    with (temp / "tokens.npy").open("wb") as tokens, (temp / "mask.npy").open("wb") as mask:
        _write_header(tokens, _ARRAYS["tokens"], 0)
        _write_header(mask, _ARRAYS["mask"], 0)
        for block in blocks:
            tokens.write(block.tokens.astype(_ARRAYS["tokens"], copy=False).tobytes())
            mask.write(block.mask.tobytes())
            tables.append(block.table)
            total += len(block.tokens)
        _write_header(tokens, _ARRAYS["tokens"], total)
        _write_header(mask, _ARRAYS["mask"], total)
    rows = np.concatenate(tables)
    np.save(temp / "rows.npy", rows)
    digests = {name: _digest(_map(temp / f"{name}.npy")) for name in _ARRAYS}
    ledger = {"samples": asdict(count_rows(rows)), "digests": digests}
    (temp / "ledger.json").write_text(json.dumps(ledger, indent=2) + "\n", encoding="utf-8")


def _write_header(file: BinaryIO, dtype: np.dtype[Any], length: int) -> None:
    """The .npy header at the file's start; numpy pads it so that the first dimension may grow in place."""
    file.seek(0)
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, description)


def _publish(temp: Path, folder: Path) -> None:
    for _ in range(3):
        try:
            os.rename(temp, folder)
            return
        except OSError:  # something lies there: another process was first, or it is damaged
            if open_store(folder) is not None:
                return
        aside = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:12]}")
        with suppress(FileNotFoundError):  # another process is mending the same store
            os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
    os.rename(temp, folder)


def _map(path: Path) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r"))  # slices of a plain array cost less than of a np.memmap


def _digest(array: np.ndarray) -> str:
    """Hash of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    flat = array.reshape(-1)
    step = _HASH_BYTES // array.itemsize
    for start in range(0, len(flat), step):
        digest.update(np.ascontiguousarray(flat[start : start + step]).data)
    return digest.hexdigest()
