"""Stores the tokenised samples of one file on disk: writes them once, atomically, and memory-maps them afterwards.

    tokens.npy     int32 [total]   all samples concatenated
    mask.npy       uint8 [total]   the index of each token's weight
    rows.npy       LINE [lines]    one line per sample, and one per dropped document (`row_report.LINE`)
    trees.npy, documents.npy, texts.npy, spans.npy
                   with data.turns = each: the trees of the samples (`tree_tables.py`)
    teacher_counts.npy, teacher.npy
                   with data.teacher.k: the distributions of a teacher (`teacher_rows.py`)
    rejects.jsonl  rows that were skipped: {"row": 1841, "reason": "..."}; missing if no row was skipped
    questions.jsonl
                   with questions of a long-context suite: what they are (`long/suite.py`)
    omitted.jsonl  texts that the chat template left out, by row, role and kind (`omissions.py`); missing if none
    ledger.json    the row report, the weights that mask.npy indexes, the largest ids, sizes and digests of the other
                   files, and a digest of itself; written last

The content of a store does not depend on the file's name, on the machine, on the time, or on the number of processes.
A store is never out of date: its name is a hash of everything that it depends on (`folders.py`).
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sft.data.cache.encoder import EncodedRows
from sft.data.cache.omissions import add_up
from sft.data.cache.row_report import LINE, RowCounts, RowReport, count_rows
from sft.data.cache.teacher_rows import TeacherTable
from sft.data.cache.tree_tables import DTYPES, Trees, TreeTables
from sft.files.atomic_files import flush

_ARRAYS: dict[str, np.dtype[Any]] = {"tokens": np.dtype(np.int32), "mask": np.dtype(np.uint8), "rows": LINE}
_TREE_ARRAYS: dict[str, np.dtype[Any]] = dict(zip(TreeTables._fields, DTYPES, strict=True))
_TEACHER_ARRAYS = "teacher_counts", "teacher"
LAST_FILE = "ledger.json"  # written last: the store is complete
_REJECTS, _OMITTED = "rejects.jsonl", "omitted.jsonl"
QUESTIONS = "questions.jsonl"
_HASH_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Store:
    """The memory-mapped arrays of one file's samples."""

    tokens: np.ndarray
    mask: np.ndarray
    rows: np.ndarray
    weights: np.ndarray  # float32 [at most 256]: token i weighs weights[mask[i]]
    row_report: RowReport
    digest: str  # depends on all tokens, weights, lines, trees and distributions
    trees: Trees | None = None  # None unless data.turns = each
    largest_id: int | None = None  # the largest token id; -1: no token; None: an older version made the store
    teacher: TeacherTable | None = None  # None without data.teacher.k
    largest_teacher_id: int = -1  # the largest id of a distribution


def open_store(folder: Path, *, verify: bool = False) -> Store | None:
    """The store in `folder`, or None if it is missing, incomplete or changed.  Raises OSError if it cannot be read.

    Always checks sizes and the digest of ledger.json.  Checks all bytes only with `verify`: otherwise each rank would
    read the whole corpus before its first step (100 GB at 1 GB/s take 2 minutes; a thousand ranks on one file system
    need much longer).  A store gets its final name only after it is complete and flushed, so damage that `verify` finds
    comes from a failing disk or from edited files.
    """
    try:
        content = json.loads((folder / LAST_FILE).read_text(encoding="utf-8"))
        if content.pop("digest") != _json_digest(content):
            return None
        if any((folder / name).stat().st_size != file["bytes"] for name, file in content["files"].items()):
            return None
        arrays = {name: _map(folder / f"{name}.npy") for name in _ARRAYS}
        names = _array_names(folder)
        tables = [_map(folder / f"{name}.npy") for name in names if name in _TREE_ARRAYS]
        teacher = [_map(folder / f"{name}.npy") for name in names if name in _TEACHER_ARRAYS]
        if verify and content["files"] != _describe(folder):
            return None
        return Store(
            **arrays,
            weights=np.array(content["weights"], dtype=np.float32),
            row_report=RowReport.from_json(content["rows"]),
            largest_id=content.get("largest_id"),
            digest=_json_digest([content["weights"], [content["files"][f"{name}.npy"]["digest"] for name in names]]),
            trees=Trees(TreeTables(*tables)) if tables else None,
            teacher=TeacherTable(*teacher) if teacher else None,
            largest_teacher_id=content.get("largest_teacher_id", -1),
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, EOFError, KeyError, TypeError, AttributeError):
        return None  # any other OSError is a fault of the disk or of this process, not of the store


def write_store(temp: Path, parts: Iterable[EncodedRows], weights: np.ndarray, questions: str | None = None) -> None:
    """Writes the parts of a file as a store into the new folder `temp`, for `publish`.  Raises OSError.

    weights: the distinct weights of all parts, 0 and then rising.  The function holds one part and all rejects in
    memory, whatever the size of the file.
    questions: the content of questions.jsonl; None: the store has no such file
    """
    temp.mkdir(parents=True)
    if questions is not None:
        (temp / QUESTIONS).write_text(questions, encoding="utf-8")
    counts = _write_parts(temp, parts, weights)
    if counts.rejects:
        lines = [json.dumps(reject._asdict(), ensure_ascii=False) + "\n" for reject in counts.rejects]
        (temp / _REJECTS).write_text("".join(lines), encoding="utf-8")
    if (temp / "trees.npy").exists():
        counts.trees = Trees(TreeTables(*(_map(temp / f"{name}.npy") for name in _TREE_ARRAYS))).counts()
    content = {
        "rows": count_rows(_map(temp / "rows.npy"), counts).to_json(),
        "weights": weights.tolist(),
        "largest_id": int(_map(temp / "tokens.npy").max(initial=-1)),
        **({"largest_teacher_id": counts.largest_teacher_id} if (temp / "teacher.npy").exists() else {}),
        "files": _describe(temp),
    }
    text = json.dumps({**content, "digest": _json_digest(content)}, indent=2, ensure_ascii=False)
    (temp / LAST_FILE).write_text(text + "\n", encoding="utf-8")
    for path in temp.iterdir():
        flush(path)  # otherwise, a power failure could leave a renamed store without its bytes


def _write_parts(temp: Path, parts: Iterable[EncodedRows], weights: np.ndarray) -> RowCounts:
    """Writes the arrays and the list of omitted texts.  Returns the counts that the table of rows does not contain."""
    counts, parts = RowCounts(), iter(parts)
    first = next(parts, None)
    dtypes = _ARRAYS | _TREE_ARRAYS
    if first is not None and first.teacher is not None:
        dtypes |= {name: array.dtype for name, array in zip(_TEACHER_ARRAYS, first.teacher, strict=True)}
    sizes = dict.fromkeys(dtypes, 0)
    has_trees = False
    with ExitStack() as stack:
        files = {name: stack.enter_context((temp / f"{name}.npy").open("wb")) for name in dtypes}
        listed = stack.enter_context((temp / _OMITTED).open("w", encoding="utf-8"))
        for name, file in files.items():
            _write_header(file, dtypes[name], 0)
        for part in chain([] if first is None else [first], parts):
            mask = np.searchsorted(weights, part.weights).astype(np.uint8)[part.mask]
            has_trees |= part.trees is not None
            tables = {} if part.trees is None else part.trees._asdict()
            if part.teacher is not None:
                tables |= dict(zip(_TEACHER_ARRAYS, part.teacher, strict=True))
                largest = int(part.teacher.rows["ids"].max(initial=-1))
                counts.largest_teacher_id = max(counts.largest_teacher_id, largest)
            for name, array in {"tokens": part.tokens, "mask": mask, "rows": part.lines, **tables}.items():
                files[name].write(array.astype(dtypes[name], copy=False).tobytes())
                sizes[name] += len(array)
            counts.rejects += part.rejects
            counts.chats += part.num_chats
            counts.unused.add(part.unused)
            counts.unwanted += part.unwanted
            counts.spelled.update(dict(part.spelled))
            counts.variables.update(part.variables)
            counts.padded += part.num_padded
            counts.padding += part.num_padding
            counts.omitted = add_up([*counts.omitted, *(omission.file_omission() for omission in part.omitted)])
            listed.writelines(omission.as_line() for omission in part.omitted)
        for name, file in files.items():
            _write_header(file, dtypes[name], sizes[name])
    for name in () if has_trees else _TREE_ARRAYS:
        (temp / f"{name}.npy").unlink()
    if not counts.omitted:
        (temp / _OMITTED).unlink()
    return counts


def publish(temp: Path, folder: Path) -> None:
    """Gives a written store its final name.

    If another process has already published the store, its store stays, and `temp` stays where it is.  A damaged store
    of this name is moved next to `temp`.  Raises FileNotFoundError if another process removed `temp`.
    """
    for _ in range(3):
        try:
            os.rename(temp, folder)
            return
        except FileNotFoundError:
            raise
        except OSError:  # the name exists
            if open_store(folder, verify=True) is not None:
                return
        put_aside(folder, temp.parent)
    os.rename(temp, folder)


def put_aside(folder: Path, work: Path) -> None:
    """Moves a damaged store into the work folder, which the preparation removes at its end."""
    work.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # another process is replacing the same store
        os.rename(folder, work / f"damaged-{uuid.uuid4().hex[:12]}")


def _write_header(file: BinaryIO, dtype: np.dtype[Any], length: int) -> None:
    """Writes the .npy header at the start of the file.  numpy pads headers, so the final length fits over the first
    one."""
    file.seek(0)
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, description)


def _map(path: Path) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r"))  # a plain array is sliced faster than an np.memmap


def _array_names(folder: Path) -> list[str]:
    """The names of the arrays of a store, including those of trees and of a teacher if it has them."""
    further = [*(_TREE_ARRAYS if (folder / "trees.npy").exists() else ())]
    return [*_ARRAYS, *further, *(_TEACHER_ARRAYS if (folder / "teacher.npy").exists() else ())]


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and digest of every file except ledger.json."""
    described = {f"{name}.npy": _digest(_map(folder / f"{name}.npy")) for name in _array_names(folder)}
    for name in (_REJECTS, _OMITTED, QUESTIONS):
        if (folder / name).exists():
            with (folder / name).open("rb") as file:
                described[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return {name: {"bytes": (folder / name).stat().st_size, "digest": digest} for name, digest in described.items()}


def _digest(array: np.ndarray) -> str:
    """Hash of type, shape and bytes (a file's header may differ between releases of numpy)."""
    digest = hashlib.sha256(f"{array.dtype.descr} {array.shape}".encode())
    flat = array.reshape(-1)
    step = max(1, _HASH_BYTES // array.itemsize)
    for start in range(0, len(flat), step):
        digest.update(np.ascontiguousarray(flat[start : start + step]).view(np.uint8).data)
    return digest.hexdigest()


def _json_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
