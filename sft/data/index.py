"""Where the rows of a data file are, so that any process can read some of them by itself.

MERGE: replaced by `index_rows` and `read_rows` of `rows.py`; only `parts.py` and `prepare.py` import this.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sft.data import rows
from sft.data.rows import Row

_BOM = b"\xef\xbb\xbf"


class RowIndex(NamedTuple):
    """Rows of a file.  JSON lines have their line numbers [n] and offsets [n + 1]; other kinds are only counted."""

    num_rows: int
    numbers: np.ndarray | None = None
    offsets: np.ndarray | None = None


def index_rows(path: Path) -> RowIndex:
    """Lines `{}`, nothing, `{}` of 3 + 1 + 3 bytes -> 2 rows, numbers [1, 3], offsets [0, 4, 7]"""
    if not rows.is_lines(path):
        return RowIndex(sum(1 for _ in rows.read_rows(path)))
    numbers, offsets, offset = [], [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if (line.removeprefix(_BOM) if number == 1 else line).strip(b" \t\r\n"):
                numbers.append(number)
                offsets.append(offset)
            offset += len(line)
    return RowIndex(len(numbers), np.array(numbers, dtype=np.int64), np.array([*offsets, offset], dtype=np.int64))


def read_rows(path: Path, index: RowIndex, start: int, stop: int) -> Iterator[Row]:
    """Rows start to stop, counted from 0, with their numbers."""
    if index.offsets is None or index.numbers is None:
        yield from (_listed(path)[start:stop] if path.suffix == ".json" else islice(rows.read_rows(path), start, stop))
        return
    with path.open("rb") as file:
        for i in range(start, stop):
            file.seek(int(index.offsets[i]))
            line = file.read(int(index.offsets[i + 1] - index.offsets[i]))
            number = int(index.numbers[i])
            yield number, (line.removeprefix(_BOM) if number == 1 else line).strip(b" \t\r\n")


@lru_cache(maxsize=1)
def _listed(path: Path) -> list[tuple[int, Any]]:
    return list(rows.read_rows(path))
