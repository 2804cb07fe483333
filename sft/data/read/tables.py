"""Reads rows of parquet files, Arrow files and datasets saved to disk.

Converts a row of a table to the value that the same row has in JSON.  Keys with null are left out at every depth:
Arrow gives all objects (structs) of a column the same keys, and stores null for a key that an object did not have.  So
a table preserves neither nulls that the writer meant nor the order of keys; a column of JSON text preserves both.  Rows
are read through pyarrow, a few at a time, without `datasets`.

`rows.py` and `named_dataset.py` decide which files belong together.  `rows/formats.py` decides what a row means.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from sft.data.read.strict_json import Unreadable, parse_json
from sft.errors import DataError
from sft.parallel.messages import message

# Small numbers, because long rows need much memory as Python objects, distributions of a teacher above all.
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 64, 8 << 20
_ARROW_FILE = b"ARROW1"  # the first bytes of Arrow's file format; datasets writes Arrow's stream format

Convert = Callable[[Any], Any]
Columns = Sequence[tuple[str, str]]  # (key of a row, column of the table)
Part = tuple[int, Callable[[], Iterable[Any]]]  # number of rows, and a function that loads them as record batches


@message
class TableSlice(NamedTuple):
    """Rows `first` to `stop` of an Arrow file, counted from 0."""

    file: Path
    first: int
    stop: int


def count_table(files: Sequence[Path]) -> int:
    """The number of rows of all files, read from their headers.  Raises DataError if a file cannot be read."""
    return sum(num_rows for file in files for num_rows, _ in _guarded(file, _parts(file)))


def column_names(file: Path) -> list[str]:
    """The names of the columns of an Arrow file; empty if the file has no record batch."""
    for _, load in _guarded(file, _parts(file)):
        for batch in load():
            return list(batch.schema.names)
    return []


def read_slices(
    slices: Sequence[TableSlice], start: int, columns: Columns | None = None
) -> Iterator[dict[str, Any] | Unreadable]:
    """Yields the rows of slices of Arrow files from row `start` on, counted from 0 over all slices."""
    for file, first, stop in slices:
        if first + start < stop:
            yield from islice(read_table([file], first + start, columns), stop - first - start)
        start = max(0, start - (stop - first))


def read_table(
    files: Sequence[Path], start: int, columns: Columns | None = None
) -> Iterator[dict[str, Any] | Unreadable]:
    """Yields the rows from row `start` on, counted from 0; row groups and batches before row `start` are not loaded.

    columns  pairs (key, column): only these columns are kept, under these keys; None: all columns, with their names
    """
    for file in files:
        for num_rows, load in _guarded(file, _parts(file)):
            if start >= num_rows:
                start -= num_rows
                continue
            for batch in _guarded(file, load()):
                skipped = min(start, batch.num_rows)
                start -= skipped
                chosen = batch if columns is None else _renamed(batch, columns)
                step = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * batch.num_rows // max(1, chosen.nbytes)))
                for first in range(skipped, batch.num_rows, step):
                    yield from _rows(chosen.slice(first, min(step, batch.num_rows - first)))


def _renamed(batch: Any, columns: Columns) -> Any:
    """The chosen columns of a batch, renamed to the keys of `columns`."""
    import pyarrow

    indices = [batch.schema.get_field_index(column) for _, column in columns]
    fields = [batch.schema.field(i).with_name(key) for i, (key, _) in zip(indices, columns, strict=True)]
    return pyarrow.RecordBatch.from_arrays([batch.column(i) for i in indices], schema=pyarrow.schema(fields))


def _parts(file: Path) -> Iterator[Part]:
    """Yields the row groups of a parquet file, or the record batches of an Arrow file."""
    import pyarrow  # imported late: the import is slow, and most runs read JSON lines
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
    """Yields `parts`; converts every error that pyarrow raises while it reads a part to a DataError."""
    try:
        yield from parts
    except Exception as error:  # pyarrow's errors, OSError, ValueError, KeyError, ...
        reason = str(error).strip().splitlines()
        kind = file.suffix.removeprefix(".")
        raise DataError(f"{file} cannot be read as {kind}: {reason[0] if reason else type(error).__name__}") from error


def _rows(batch: Any) -> Iterator[dict[str, Any] | Unreadable]:
    """Yields the rows of a batch.  A row that cannot be converted becomes Unreadable; the other rows are not affected.

    Raises DataError if two columns have the same name.
    """
    if len(set(batch.schema.names)) < len(batch.schema.names):
        repeated = next(name for name, count in Counter(batch.schema.names).items() if count > 1)
        raise DataError(f"the table has several columns with the name {repeated}.  Rename one.")
    convert = _struct(batch.schema)
    try:
        yield from [convert(row) for row in batch.to_pylist(maps_as_pydicts="strict")]
    except (ValueError, OverflowError, KeyError, DataError) as error:  # not UTF-8, or a time beyond Python's range
        if batch.num_rows == 1:
            yield Unreadable(str(error) if isinstance(error, DataError) else f"cannot be read: {error}")
        else:
            for i in range(batch.num_rows):
                yield from _rows(batch.slice(i, 1))


def _struct(fields: Iterable[Any]) -> Convert:
    """A function that converts the values of an object by their types, and leaves out keys with null."""
    converts = {field.name: _convert(field.type) for field in fields}
    return lambda value: {key: converts[key](item) for key, item in value.items() if item is not None}


def _convert(kind: Any) -> Convert:
    """A function that converts a Python value from pyarrow, of Arrow type `kind`, to the value in JSON."""
    import pyarrow

    if isinstance(kind, pyarrow.BaseExtensionType):  # datasets stores columns of mixed types as JSON text
        return parse_json if kind.extension_name == "arrow.json" else _convert(kind.storage_type)
    if pyarrow.types.is_struct(kind):
        return _struct(kind)
    if pyarrow.types.is_map(kind):
        item = _convert(kind.item_type)
        return lambda pairs: {key: None if v is None else item(v) for key, v in pairs.items()}
    if hasattr(kind, "value_field"):  # all list types
        convert = _convert(kind.value_type)
        return _same if convert is _same else lambda items: [None if v is None else convert(v) for v in items]
    return _same


def _same(value: Any) -> Any:
    return value
