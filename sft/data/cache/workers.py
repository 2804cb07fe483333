"""Tokenises a file in parts.  Any process can make a part; parts stay on disk until all of them are complete.

The rows and bytes of a file determine its parts; the number of processes does not.  A part is used only if its digest
matches.  A process receives the number of a part, reads the rows from the file, and returns a few counts.  `prepare.py`
concatenates parts, and ends the work at the first bad row in file order.

With a tokenizer from a folder, only processes with limits make parts (`limited.py`), because the files of the folder
are untrusted.
"""

import hashlib
import io
import json
import os
import uuid
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sft.config import DataConfig
from sft.data import limited
from sft.data.cache.encoder import EncodedRows, encode_rows
from sft.data.cache.folders import Stamp, check_unchanged, work_folder
from sft.data.cache.omissions import RowOmission
from sft.data.cache.row_report import Reject
from sft.data.cache.teacher_rows import TeacherTable
from sft.data.cache.tree_tables import TreeTables
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer, template_name
from sft.data.read.rows import DataFile, RowIndex, read_rows, row_name
from sft.data.work import Work
from sft.errors import DataError

# With small parts, a killed preparation loses only seconds of work, and all processes end at about the same time.  The
# memory of a process is a few times the bytes of a part.
ROWS_PER_PART = 2048
BYTES_PER_PART = 16 << 20
_DIGEST_BYTES = 32
_NUM_ARRAYS = 4  # the first fields of EncodedRows; tables of trees and teacher follow, if any.  The others are JSON
_ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class FileJob:
    """One file to tokenise."""

    file: DataFile
    data: DataConfig
    tokenizer: ChatTokenizer
    index: RowIndex
    ranges: tuple[tuple[int, int], ...]  # rows of each part, counted from 0
    store: Path  # the folder of the finished store
    stamp: Stamp  # the stamp of the file before its digest was computed; a file with another stamp is refused

    @property
    def folder(self) -> Path:
        """The folder of the parts."""
        return work_folder(self.store)


class PartResult(NamedTuple):
    """The outcome of making a part."""

    num_rows: int = 0
    num_tokens: int = 0
    weights: tuple[float, ...] = ()
    rejects: Sequence[Reject] = ()
    omitted: RowOmission | None = None  # the first omission of the part
    was_there: bool = False  # whether another preparation, earlier or concurrent, made the part
    error: str | None = None  # begins with the name of a row
    work: Work = Work()  # of the process that made the part now


def part_ranges(index: RowIndex, teacher_width: int = 0) -> tuple[tuple[int, int], ...]:
    """The rows of each part: at most 2,048 rows and 16 MiB.  A longer row is a part by itself.

    5,000 short rows -> (0, 2048), (2048, 4096), (4096, 5000)
    teacher_width: number of tokens of a teacher's distribution.  Each takes 8 bytes for about 4 bytes of the file, so
    parts have fewer rows
    """
    num_rows, num_bytes = (max(1, limit // (1 + 2 * teacher_width)) for limit in (ROWS_PER_PART, BYTES_PER_PART))
    ranges: list[tuple[int, int]] = []
    start = 0
    while start < index.num_rows:
        stop = min(start + num_rows, index.num_rows)
        if index.offsets is not None:
            beyond = int(np.searchsorted(index.offsets, index.offsets[start] + num_bytes, side="right"))
            if beyond < index.num_rows:  # the row before `beyond` ends at or before the limit
                stop = min(stop, max(start + 1, beyond - 1))
        ranges.append((start, stop))
        start = stop
    return tuple(ranges)


def make_part(job: FileJob, number: int) -> PartResult:
    """Tokenises part `number` and writes it, unless it exists.  The result holds the error of a bad row.

    Raises OSError if the part cannot be written, and DataError if the file cannot be read or has changed.
    """
    path, (start, stop) = part_path(job, number), job.ranges[number]
    encoded = read_part(path, job.data)
    was_there, before = encoded is not None, job.tokenizer.work
    if encoded is None:
        try:
            encoded = encode_rows(read_rows(job.file, job.index, start, stop), job.file, job.data, job.tokenizer)
        except DataError as error:
            check_unchanged(job.file, job.stamp)  # raises a clearer error if the file changed
            return PartResult(error=str(error))
        except OSError as error:
            raise DataError(f"data file {job.file} cannot be read: {error}.") from error
        check_unchanged(job.file, job.stamp)
        _write_part(path, encoded)
    weights, omitted = tuple(encoded.weights.tolist()), next(iter(encoded.omitted), None)
    work = job.tokenizer.work.since(before)
    return PartResult(stop - start, len(encoded.tokens), weights, encoded.rejects, omitted, was_there, work=work)


def part_path(job: FileJob, number: int) -> Path:
    """The file of part `number`, named by the rows of the part, such as part-000002048-000004096."""
    start, stop = job.ranges[number]
    return job.folder / f"part-{start:09}-{stop:09}"


def read_part(path: Path, data: DataConfig) -> EncodedRows | None:
    """A part, or None if it is missing or damaged.  data: the settings with which it was made"""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    stream = io.BytesIO(payload)
    tokens, mask, weights, lines = (np.load(stream) for _ in range(_NUM_ARRAYS))
    trees = TreeTables(*(np.load(stream) for _ in TreeTables._fields)) if data.turns == "each" else None
    has_teacher = data.teacher.k is not None
    teacher = TeacherTable(*(np.load(stream) for _ in TeacherTable._fields)) if has_teacher else None
    lists = json.loads(stream.read())
    if len(lists) != len(EncodedRows._fields) - _NUM_ARRAYS - 2:  # another version of sft made the part
        return None
    rejects, omitted, *counts = lists
    rejects, omitted = [Reject(*fields) for fields in rejects], [RowOmission(*fields) for fields in omitted]
    return EncodedRows(tokens, mask, weights, lines, rejects, omitted, *counts)._replace(trees=trees, teacher=teacher)


def _write_part(path: Path, encoded: EncodedRows) -> None:
    """Writes a part under a temporary name and renames it, so that no reader finds an incomplete part."""
    stream = io.BytesIO()
    for array in (*encoded[:_NUM_ARRAYS], *(encoded.trees or ()), *(encoded.teacher or ())):
        np.save(stream, array)
    stream.write(json.dumps(encoded[_NUM_ARRAYS:-2]).encode())
    payload = stream.getbuffer()
    temp = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}")
    for attempt in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temp.open("wb") as file:
                file.write(hashlib.sha256(payload).digest())
                file.write(payload)
            os.replace(temp, path)
            return
        except FileNotFoundError:  # another process finished the store and removed the folder
            if attempt == _ATTEMPTS - 1:
                raise
        except OSError:
            temp.unlink(missing_ok=True)
            raise


def make_parts(jobs: Sequence[FileJob], num_workers: int) -> Generator[tuple[FileJob, PartResult], None, None]:
    """Makes all parts of all files in at most `num_workers` processes, and yields their results in order.

    If one process is enough and all files use the byte tokenizer, the calling process itself makes the parts.  Raises
    the errors of `make_part`, and DataError if a child process reaches a limit or is killed.
    """
    parts = [(i, number) for i, job in enumerate(jobs) for number in range(len(job.ranges))]
    num_workers = min(num_workers, len(parts))
    if num_workers <= 1 and all(isinstance(job.tokenizer, ByteTokenizer) for job in jobs):
        for i, number in parts:
            yield jobs[i], make_part(jobs[i], number)
        return
    try:
        with closing(limited.run(_make_in_child, parts, num_workers, (_keep_jobs, list(jobs)))) as results:
            for (i, _), result in zip(parts, results, strict=True):
                yield jobs[i], result
    except limited.LimitReached as reached:
        i, number = parts[reached.task]
        raise DataError(_beyond(jobs[i], number, reached, num_workers)) from reached


def _beyond(job: FileJob, number: int, reached: limited.LimitReached, num_workers: int) -> str:
    first, stop = job.ranges[number]
    numbers = job.index.numbers if job.index.numbers is not None else np.arange(1, job.index.num_rows + 1)
    rows = f"{row_name(job.file, int(numbers[first]))} to {row_name(job.file, int(numbers[stop - 1]))}"
    fewer = num_workers > 1 and reached.is_memory
    advice = f"  Use fewer processes than data.num_workers = {num_workers}." if fewer else ""
    if isinstance(job.tokenizer, ByteTokenizer) or job.tokenizer.chat_template is None:
        template, further = "", ""
    else:
        template, further = f" with chat template {template_name(job.tokenizer)}", reached.advice
    return (
        f"the process that tokenised the rows from {rows}{template} {reached.why}.  Finished parts are kept, and no "
        f"row was left out.{advice}{further}"
    )


# Each child receives the jobs once, because sending the tokenizer with every part would take longer than the work.
_jobs: list[FileJob] = []


def _keep_jobs(jobs: list[FileJob]) -> None:
    _jobs[:] = jobs


def _make_in_child(job_index: int, number: int) -> PartResult:
    return make_part(_jobs[job_index], number)
