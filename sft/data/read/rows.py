"""Reads the rows of a data file, indexes where each row begins, and names rows in errors.

Decides which kinds of file are read.  A faulty row does not affect other rows, because `read_rows` yields rows
unparsed, and `strict_json.parse` raises the error of a row.  `json_rows.py` streams JSON and `tables.py` streams
tables; their memory does not grow with the file.  `rows/formats.py` interprets the content of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from sft.data.read.json_rows import COMPRESSED, find_first_row, read_blocks, read_elements, read_lines, scan_lines
from sft.data.read.named_dataset import LoadedDataset
from sft.data.read.remote_files import url_of
from sft.data.read.strict_json import Content, parse_json
from sft.data.read.tables import count_table, read_slices, read_table
from sft.errors import DataError, first_few
from sft.files.folder_files import LIST_BYTES, UnsafeFileError, read_file

Kind = Literal["jsonl", "json", "parquet", "arrow", "folder"]

_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
_EXPECTED = (
    f"{', '.join(_KINDS)}, .jsonl or .json followed by {', '.join(COMPRESSED[:-1])} or {COMPRESSED[-1]}, or a folder "
    "written by save_to_disk of datasets"
)

_CSV = (
    "Move it to a folder of its own: data.train='{csv: {dataset: ./FOLDER}}' reads the CSV files there, with columns "
    "prompt and completion, or others: columns: {prompt: A, completion: B}."
)

DataFile = Path | LoadedDataset  # a file, a saved dataset (folder), or a dataset by name
Row = tuple[int, Content]  # the number, from 1, is a line number in JSONL and a row number in other kinds


@dataclass(frozen=True, kw_only=True, eq=False)
class RowIndex:
    """The positions of the rows of a file, with which `read_rows` finds any row.

        b'{}\\n\\n{}\\n'  ->  num_rows 2, size 7, offsets 0 4, numbers 1 3

    offsets  int64 [num_rows], the byte where each row begins, counted in decompressed bytes; None for tables
    numbers  int64 [num_rows], the line or row number of each row; None if the numbers are 1, 2, 3, ...
    """

    num_rows: int
    size: int  # bytes of the file on disk; read_rows refuses the index if the file now has another size
    offsets: np.ndarray | None = None
    numbers: np.ndarray | None = None


def check_file(path: DataFile) -> None:
    """Raises DataError if a file or folder is missing, unreadable, empty or of unknown kind."""
    if isinstance(path, LoadedDataset):
        return  # `named_dataset.py` checked it
    if not path.exists():
        raise DataError(f"data file {path} does not exist (folder {Path.cwd()}).")
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"{path} is not a file; expected {_EXPECTED}.")
    kind_of(path)
    for file in data_files(path):
        try:
            with file.open("rb") as content:
                if not content.read(1):
                    raise DataError(f"data file {file} is empty.")
        except OSError as error:
            raise DataError(f"data file {file} cannot be read: {error.strerror}.") from error


def kind_of(path: Path) -> Kind:
    """The kind of a file by its name: `chat.jsonl.gz` -> jsonl.  A directory is a folder.

    Raises DataError for an unknown ending, or a compressed table.
    """
    if path.is_dir():
        return "folder"
    kind = _KINDS.get(path.suffix)
    if path.suffix in COMPRESSED:
        kind = _KINDS.get(path.with_suffix("").suffix)
        if kind in ("parquet", "arrow"):
            raise DataError(
                f"data file {path} is a compressed table.  Decompress the file; tables have internal compression."
            )
    if kind is None:
        raise DataError(
            f"data file {path} has an unknown file type; expected {_EXPECTED}." + f"  {_CSV}" * (path.suffix == ".csv")
        )
    return kind


def data_files(path: DataFile) -> list[Path]:
    """The files that hold the rows, in order: the file itself, or the files of a dataset.

    Raises DataError if a folder is no dataset of one split that save_to_disk wrote.
    """
    if isinstance(path, LoadedDataset):
        return path.files
    if not path.is_dir():
        return [path]
    try:
        state = parse_json(read_file(path / "state.json", LIST_BYTES))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except FileNotFoundError:
        splits = sorted(str(state.parent) for state in path.glob("*/state.json"))
        if splits:
            raise DataError(
                f"{path} holds several splits.  Name the folder of one split: {', '.join(first_few(splits))}."
            ) from None
        raise DataError(
            f"{path} is a folder without state.json, so save_to_disk did not write it.  Name a data file."
        ) from None
    except (OSError, UnsafeFileError, DataError, KeyError, TypeError) as error:
        raise DataError(f"{path / 'state.json'} does not describe a saved dataset: {error!r}.") from error
    if state.get("_indices_data_files") or not names or any(name != Path(name).name for name in names):
        raise DataError(f"{path} was saved in an unknown format.  Load the dataset and save it again with datasets.")
    for name in names:
        if not (path / name).is_file():
            raise DataError(f"the file {name} of saved dataset {path} is missing.")
    return [path / name for name in names]


def row_name(path: DataFile, number: int) -> str:
    """The name of a row in messages.

    chat.jsonl:1841                                   a line of a file, compressed or not
    chat.parquet row 1841                             a row of any other file
    s3://bucket/chat.jsonl:1841                       a line of a copy, which has the name of the URL
    HuggingFaceH4/ultrachat_200k train_sft row 1841   a row of a dataset by name, counted in the recipe's split
    """
    if isinstance(path, LoadedDataset):
        return f"{path} row {number}"
    kind = kind_of(path)
    is_lines = kind == "jsonl" or (kind == "json" and not find_first_row(path, may_be_list=True)[0])
    return f"{file_name(path)}:{number}" if is_lines else f"{file_name(path)} row {number}"


def file_name(path: DataFile) -> str:
    """The name of a file in messages: the URL of a copy, the path of another file, and what a recipe says of a
    dataset."""
    url = url_of(path) if isinstance(path, Path) else None
    return url or str(path)


def hint(path: DataFile, content: Content) -> str:
    """Advice to append to a row's error if the file seems to hold JSON that is not one object per line; else ""."""
    if isinstance(path, LoadedDataset) or kind_of(path) not in ("jsonl", "json") or not isinstance(content, bytes):
        return ""
    if content.startswith(b"[") and kind_of(path) == "jsonl":
        return "  If the file is one JSON list of rows, give it a name that ends with .json instead of .jsonl."
    if content == b"{":
        return (
            "  If an object fills several lines, write it in one line, or put all objects into a list in a .json file."
        )
    return ""


def index_rows(path: DataFile) -> RowIndex:
    """The index of a file, made in one pass over its bytes, or over the headers of a table.

    Raises DataError if the file cannot be read.
    """
    if isinstance(path, LoadedDataset):
        return RowIndex(num_rows=path.num_rows, size=_size(path))
    size, kind = _size(path), kind_of(path)
    if kind not in ("jsonl", "json"):
        return RowIndex(num_rows=count_table(data_files(path)), size=size)
    is_list, begin = find_first_row(path, may_be_list=kind == "json")
    blocks = read_blocks(path, begin)
    if is_list:
        starts = np.fromiter((begin + start for start, _ in read_elements(blocks, path, 1)), dtype=np.int64)
        return RowIndex(num_rows=len(starts), size=size, offsets=starts)
    offsets, numbers = scan_lines(blocks, begin)
    plain = not len(numbers) or numbers[-1] == len(numbers)
    return RowIndex(num_rows=len(offsets), size=size, offsets=offsets, numbers=None if plain else numbers)


def read_rows(path: DataFile, index: RowIndex | None = None, start: int = 0, stop: int | None = None) -> Iterator[Row]:
    """Yields the rows from `start` to `stop` - 1, counted from 0, of a file.  Each has its number (`Row`).

    With an index, row `start` is found without reading the rows before it; a compressed file is still decompressed from
    its beginning.  Raises DataError if the file cannot be read, or differs from the index.

    the lines `{"messages": ...}`, nothing, `{"messages": ...}`  ->  (1, b'{"me...'), (3, b'{"me...')
    """
    assert start >= 0 and (stop is None or stop >= start), f"rows {start} to {stop}"
    if index is None:
        yield from islice(_rows_from(path, None, 0), start, stop)
        return
    if index.size != _size(path):
        raise DataError(f"{path} was changed while it was read: it had {index.size:,} bytes, now {_size(path):,}.")
    wanted = min(index.num_rows, index.num_rows if stop is None else stop) - start
    if wanted <= 0:
        return
    count = 0
    for count, row in enumerate(islice(_rows_from(path, index, start), wanted), start=1):
        yield row
    if count < wanted:
        raise DataError(f"{path} was changed while it was read: it no longer has {index.num_rows:,} rows.")


def _rows_from(path: DataFile, index: RowIndex | None, start: int) -> Iterator[Row]:
    """Yields all rows from row `start` on, counted from 0.  Without an index, `start` matters only for tables."""
    if isinstance(path, LoadedDataset):
        yield from enumerate(read_slices(path.slices, start, path.columns), start=start + 1)
        return
    kind = kind_of(path)
    if kind not in ("jsonl", "json"):
        files = data_files(path)
        yield from enumerate(read_table(files, start), start=start + 1)
        return
    number = 1
    has_offsets = index is not None and index.offsets is not None
    is_list, begin = (False, 0) if kind == "jsonl" and has_offsets else find_first_row(path, may_be_list=kind == "json")
    if index is not None and index.offsets is not None:
        begin = int(index.offsets[start])
        number = start + 1 if index.numbers is None else int(index.numbers[start])
    blocks = read_blocks(path, begin)
    if is_list:
        yield from enumerate((content for _, content in read_elements(blocks, path, number)), start=number)
    else:
        yield from read_lines(blocks, number)


def _size(path: DataFile) -> int:
    try:
        return sum(file.stat().st_size for file in data_files(path))
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror}.") from error
