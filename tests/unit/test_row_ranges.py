"""Where the rows of a file are: any range of them is what a whole reading gives there, in memory that does not grow."""

import gzip
import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft.data.read import json_rows
from sft.data.read.json_rows import read_blocks
from sft.data.read.rows import index_rows, read_rows
from sft.errors import DataError
from tests.unit.corpora import save

ROW = b'{"messages": [{"role": "user", "content": "Hello, friend!"}, {"role": "assistant", "content": "Fine"}]}'


def test_index_of_lines(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", b"\xef\xbb\xbf{}\r\n\r\n \t\n {}\n\n[]")
    index = index_rows(path)
    assert index.num_rows == 3 and index.size == 19
    assert index.offsets is not None and index.offsets.tolist() == [3, 12, 17] and index.offsets.dtype == np.int64
    assert index.numbers is not None and index.numbers.tolist() == [1, 4, 6] and index.numbers.dtype == np.int64
    assert list(read_rows(path, index, 1)) == [(4, b"{}"), (6, b"[]")]


def test_index_of_lines_without_blank_ones_has_no_numbers(tmp_path: Path) -> None:
    index = index_rows(save(tmp_path / "a.jsonl", b"{}\n{}\n\n"))
    assert (index.num_rows, index.numbers) == (2, None)
    assert len(pickle.dumps(index)) < 1000


def test_index_of_a_list(tmp_path: Path) -> None:
    path = save(tmp_path / "a.json", b' [{"a": "],[\\"\\\\"}, [1, 2] ,7\n]\n')
    index = index_rows(path)
    assert index.offsets is not None and index.offsets.tolist() == [2, 19, 28]
    assert list(read_rows(path)) == [(1, b'{"a": "],[\\"\\\\"}'), (2, b"[1, 2]"), (3, b"7")]
    assert list(read_rows(path, index, 1, 2)) == [(2, b"[1, 2]")]


LINES = st.lists(
    st.sampled_from([b"{}", b"", b" ", b"\t\r", b"[1, 2]", b' {"a": "b"} ', b"x" * 7, b"\r", b'"\\\\\\" ] [ , "']),
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=LINES,
    end=st.sampled_from([b"\n", b"\r\n"]),
    closed=st.booleans(),
    mark=st.booleans(),
    block=st.integers(4, 9),
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_ranges_give_the_rows_of_the_whole(
    tmp_path: Path, name: str, lines: list[bytes], end: bytes, closed: bool, mark: bool, block: int
) -> None:
    """Wherever a block ends: inside a line, between its end's two bytes, in blank lines."""
    content = (b"\xef\xbb\xbf" if mark else b"") + end.join(lines) + (end if closed else b"")
    path = tmp_path / name
    save(path, gzip.compress(content) if path.suffix == ".gz" else content)
    expected = [(i, line.strip()) for i, line in enumerate(lines, start=1) if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_blocks, "__defaults__", (block,))
        index = index_rows(path)
        assert index.num_rows == len(expected)
        assert list(read_rows(path)) == expected
        for start in range(len(expected) + 1):
            assert list(read_rows(path, index, start)) == expected[start:]
            assert list(read_rows(path, index, start, start + 2)) == expected[start : start + 2]
            assert list(read_rows(path, None, start, start + 2)) == expected[start : start + 2]


VALUES = st.recursive(
    st.none() | st.integers() | st.text('a "\\[]{},é', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a "\\[]{},', max_size=3), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(VALUES, max_size=6), indent=st.sampled_from([None, 1]), block=st.integers(1, 9))
def test_elements_of_a_list_are_those_of_json(rows: list[Any], indent: int | None, block: int) -> None:
    text = json.dumps(rows, indent=indent).encode()[1:] + b" \n"
    blocks = (text[i : i + block] for i in range(0, len(text), block))
    elements = list(json_rows.read_elements(blocks, Path("a.json"), 1))
    assert [json.loads(content) for _, content in elements] == rows
    assert all(text[at:].strip().startswith(content) for at, content in elements)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "file.arrow", "saved"])
def test_ranges_of_tables(tmp_path: Path, name: str) -> None:
    import datasets
    import pyarrow
    from pyarrow import parquet

    rows = [{"n": i} for i in range(500)]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=150)
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=3)
    path = tmp_path / name
    index = index_rows(path)
    assert (index.num_rows, index.offsets, index.numbers) == (500, None, None)
    for start, stop in ((0, None), (149, 151), (150, 150), (210, 500), (499, 900), (500, None), (166, 335)):
        expected = [(i + 1, {"n": i}) for i in range(500)][start:stop]
        assert list(read_rows(path, index, start, stop)) == expected, (start, stop)
        assert list(read_rows(path, None, start, stop)) == expected, (start, stop)


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", ROW + b"\n" + ROW + b"\n")
    index = index_rows(path)
    save(path, ROW + b"\n")
    with pytest.raises(DataError, match=r"a.jsonl was changed while it was read: it had 208 bytes, now 104\."):
        list(read_rows(path, index))
    save(path, (ROW + b"\n") * 3)
    with pytest.raises(DataError, match="it had 208 bytes, now 312"):
        list(read_rows(path, index))
    save(path, ROW + b"\n" + b" " * 104)
    with pytest.raises(DataError, match=r"a.jsonl was changed while it was read: it had 2 rows\."):
        list(read_rows(path, index))


MEMORY = 12 * 2**20  # a block of 1 MiB several times over: as numpy's masks, as lines, and what gzip holds


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    """30 MB in rows of 2,000 bytes."""
    line = b'{"text": "' + b"x" * 1986 + b'"}'
    content = b"[" + b",\n".join([line] * 15_000) + b"]" if name == "a.json" else b"\n".join([line] * 15_000)
    path = save(tmp_path / name, gzip.compress(content, 1) if name.endswith(".gz") else content)
    del content
    tracemalloc.start()
    try:
        index = index_rows(path)
        count = sum(1 for _ in read_rows(path, index))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == index.num_rows == 15_000
    assert peak < MEMORY, f"{peak / 2**20:.1f} MiB"
