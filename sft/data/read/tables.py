"""Rows of parquet files, Arrow files and datasets saved to disk.

Decides how a table's row becomes what the same row is in JSON.  Arrow gives all objects of a column the same keys and
fills those that an object did not have with nulls, so a null key of an object (Arrow's struct) is left out, at every
depth.  Whether the writer meant a null, and the order of keys, cannot be known from a table; a column of JSON text
keeps both.  Read through pyarrow, some rows at a time: nothing else of `datasets` is needed for it.
Does not decide which files belong together (`rows.py`), or what a row means (`formats.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sft.data.read.strict_json import Unreadable, parse_json
from sft.errors import DataError

_ROWS_AT_ONCE = 64  # rows of long documents are large once they are Python objects
_ARROW_FILE = b"ARROW1"  # begins the file format; datasets writes the stream format

Convert = Callable[[Any], Any]
Part = tuple[int, Callable[[], Iterable[Any]]]  # number of rows, and what loads them as record batches


def count_table(files: Sequence[Path]) -> int:
    """Rows of the files together, by their headers."""
    return sum(num_rows for file in files for num_rows, _ in _guarded(file, _parts(file)))


def read_table(files: Sequence[Path], start: int) -> Iterator[dict[str, Any] | Unreadable]:
    """Rows from `start` (from 0) on; row groups and batches before it are not loaded."""
    for file in files:
        for num_rows, load in _guarded(file, _parts(file)):
            if start >= num_rows:
                start -= num_rows
                continue
            for batch in _guarded(file, load()):
                skipped = min(start, batch.num_rows)
                start -= skipped
                for first in range(skipped, batch.num_rows, _ROWS_AT_ONCE):
                    yield from _rows(batch.slice(first, _ROWS_AT_ONCE))


def _parts(file: Path) -> Iterator[Part]:
    """Row groups of parquet, record batches of Arrow."""
    import pyarrow  # slow to import, and most runs read JSON lines
    from pyarrow import parquet

    if file.suffix == ".parquet":
        with parquet.ParquetFile(file) as table:
            for group in range(table.num_row_groups):
                load = partial(table.iter_batches, batch_size=_ROWS_AT_ONCE, row_groups=[group])
                yield table.metadata.row_group(group).num_rows, load
        return
    with pyarrow.memory_map(str(file)) as source:
        if source.read(len(_ARROW_FILE)) == _ARROW_FILE:
            table = pyarrow.ipc.open_file(source)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        else:
            source.seek(0)
            batches = iter(pyarrow.ipc.open_stream(source))
        for batch in batches:
            yield batch.num_rows, partial(iter, [batch])


def _guarded(file: Path, parts: Iterable[Any]) -> Iterator[Any]:
    """Passes parts of a file on; whatever pyarrow raises while it reads one becomes a DataError."""
    try:
        yield from parts
    except Exception as error:  # its own errors, OSError, ValueError, KeyError, ...
        reason = str(error).strip().splitlines()
        kind = file.suffix.removeprefix(".")
        raise DataError(f"{file} cannot be read as {kind}: {reason[0] if reason else type(error).__name__}") from error


def _rows(batch: Any) -> Iterator[dict[str, Any] | Unreadable]:
    """The rows of a batch; where one cannot be converted, it alone is unreadable."""
    if len(set(batch.schema.names)) < len(batch.schema.names):
        raise DataError(f"the table has two columns of one name among {', '.join(batch.schema.names)}.  Rename one.")
    convert = _struct(batch.schema)
    try:
        yield from [convert(row) for row in batch.to_pylist(maps_as_pydicts="strict")]
    except (ValueError, OverflowError, KeyError, DataError) as error:  # text that is not UTF-8, a time beyond Python's
        if batch.num_rows == 1:
            yield Unreadable(str(error) if isinstance(error, DataError) else f"cannot be read: {error}")
        else:
            for i in range(batch.num_rows):
                yield from _rows(batch.slice(i, 1))


def _struct(fields: Iterable[Any]) -> Convert:
    """Leaves out keys that are null, and converts the others by their types."""
    converts = {field.name: _convert(field.type) for field in fields}
    return lambda value: {key: converts[key](item) for key, item in value.items() if item is not None}


def _convert(kind: Any) -> Convert:
    """What turns the Python value that pyarrow gives for a type into that of JSON."""
    import pyarrow

    if isinstance(kind, pyarrow.BaseExtensionType):  # datasets keeps columns of mixed types as JSON text
        return parse_json if kind.extension_name == "arrow.json" else _convert(kind.storage_type)
    if pyarrow.types.is_struct(kind):
        return _struct(kind)
    if pyarrow.types.is_map(kind):
        item = _convert(kind.item_type)
        return lambda pairs: {key: None if v is None else item(v) for key, v in pairs.items()}
    if hasattr(kind, "value_field"):  # the kinds of lists
        convert = _convert(kind.value_type)
        return _same if convert is _same else lambda items: [None if v is None else convert(v) for v in items]
    return _same


def _same(value: Any) -> Any:
    return value
