"""What the rows of a data file are, and how a row is called in an error.

JSON and JSON lines are read by a strict reader of our own: the one in `datasets` reports broken lines by a
position in some block, without file or line.  Parquet and Arrow files are read through `datasets`.
Does not look inside a row (`chat.py`).

Accepted on purpose: a UTF-8 byte order mark at the very start of a file (editors add it, it carries no data),
CRLF line ends, and blank lines (they keep their number).  Refused: any other deviation from JSON in UTF-8,
duplicate keys, NaN and Infinity included.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft.errors import DataError

_BOM = b"\xef\xbb\xbf"
_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")

Row = tuple[int, Any]  # number from 1 (a line of JSONL, a row of other kinds), and bytes of JSON or a dict


def check_file(path: Path) -> None:
    """Raises DataError where a file is missing, a folder, unreadable, empty or of unknown kind."""
    if not path.exists():
        raise DataError(f"data file {path} does not exist (folder {Path.cwd()}).")
    if not path.is_file():
        raise DataError(f"{path} is not a file.  data.train and data.eval list {', '.join(_SUFFIXES)} files.")
    if path.suffix not in _SUFFIXES:
        raise DataError(f"data file {path} is of unknown kind; expected one of {', '.join(_SUFFIXES)}.")
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise DataError(f"data file {path} is empty.")
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror}.") from error


def row_name(path: Path, number: int) -> str:
    """`chat.jsonl:1841` for lines, `chat.parquet row 1841` for rows without lines."""
    return f"{path}:{number}" if is_lines(path) else f"{path} row {number}"


def is_lines(path: Path) -> bool:
    """Whether the file holds one JSON object per line.  Many .json files do."""
    if path.suffix == ".json":
        with path.open("rb") as file:
            return not file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")
    return path.suffix == ".jsonl"


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a file in order, streamed (a .json list is read whole).

    the lines `{"messages": ...}`, nothing, `{"messages": ...}`  ->  (1, b'{"me...'), (3, b'{"me...')
    """
    if is_lines(path):
        yield from _read_lines(path)
    elif path.suffix == ".json":
        yield from enumerate(_read_list(path), start=1)
    else:
        yield from enumerate(_read_table(path), start=1)


def parse(content: Any) -> Any:
    """The value of a row: JSON bytes are parsed strictly, anything else is passed on.  Raises DataError."""
    return _parse_json(content) if isinstance(content, bytes) else content


def _read_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = (line.removeprefix(_BOM) if number == 1 else line).strip(b" \t\r\n")
            if line:
                yield number, line


def _read_list(path: Path) -> list[Any]:
    try:
        rows = _parse_json(path.read_bytes().removeprefix(_BOM))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} must be a list of rows or one row per line.")
    return rows


def _read_table(path: Path) -> Iterator[dict[str, Any]]:
    import datasets  # slow to import, and most runs read JSON lines

    kind = path.suffix.removeprefix(".")
    try:
        yield from datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
    except Exception as error:  # datasets passes on whatever pyarrow, fsspec and it itself raise
        reason = str(error.__cause__ or error).strip().splitlines()
        raise DataError(f"{path} cannot be read as {kind}: {reason[0] if reason else type(error).__name__}") from error


def _parse_json(content: bytes) -> Any:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8: byte {content[error.start]:#04x} at position {error.start + 1}.  " "Convert the file to UTF-8."
        ) from error
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise DataError(f"not JSON: {error.msg} at {where} of {len(text):,} characters.") from error
    except RecursionError:
        raise DataError("not usable JSON: nested too deeply.") from None
    except ValueError as error:  # integers beyond Python's limit of digits
        raise DataError(f"not usable JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise DataError(f"key {next(name for name in names if names.count(name) > 1)!r} is given twice in one object.")
    return value


def _no_constant(name: str) -> Any:
    raise DataError(f"{name} is not JSON.")
