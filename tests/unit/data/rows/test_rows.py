"""Reading rows: every kind of file gives the same rows and any range of them; a bad row is named alone."""

import bz2
import gzip
import json
import lzma
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft.data.read import json_rows
from sft.data.read.json_rows import read_blocks
from sft.data.read.rows import check_file, index_rows, read_rows, row_name
from sft.data.read.strict_json import parse
from sft.data.rows.formats import read_row
from sft.errors import DataError
from tests.unit.corpora import corpus_of, save

USER, ANSWER = {"role": "user", "content": "Hello, friend!"}, {"role": "assistant", "content": "Fine"}
ROW = {"messages": [USER, ANSWER]}
GOOD = json.dumps(ROW).encode()


def save_zst(path: Path, content: bytes) -> Path:
    import pyarrow

    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(content)
    return path


def save_datasets(folder: Path, rows: list[dict[str, Any]], num_shards: int = 1) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(folder, num_shards=num_shards)
    return folder


def samples(path: Path) -> list[tuple[list[int], list[float]]]:
    corpus = corpus_of(str(path))
    return [(corpus.sample(i).tokens.tolist(), corpus.sample(i).weights.tolist()) for i in range(len(corpus))]


def values(path: Path, *bounds: Any) -> list[Any]:
    return [(number, parse(content)) for number, content in read_rows(path, *bounds)]


COMPRESS: dict[str, Callable[[Path, bytes], Path]] = {
    ".gz": lambda path, content: save(path, gzip.compress(content)),
    ".bz2": lambda path, content: save(path, bz2.compress(content)),
    ".xz": lambda path, content: save(path, lzma.compress(content)),
    ".zst": save_zst,
}


# Forms of a file


def schema(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": parameters}}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": f"call-{name}", "function": {"name": name, "arguments": arguments}}


# Every row has tools with other keys and calls with other arguments; Arrow gives each of them the keys of all.
TOOL_ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [call("add", x=1, y=2)]},
            {"role": "tool", "content": "3", "tool_call_id": "call-add"},
            {"role": "assistant", "content": "Three."},
        ],
        "tools": [schema("add", x={"type": "integer"}, y={"type": "integer", "minimum": 0})],
    },
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call("look", place={"city": "Rome"})]},
        ],
        "tools": [schema("look", place={"type": "object"}), schema("add", x={"type": "integer"})],
    },
]


def test_every_kind_of_file_gives_the_same_samples(tmp_path: Path) -> None:
    """The same rows, with tools of various keys, written in twenty forms, give the same tokens and weights."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    lines = "".join(json.dumps(row) + "\n" for row in TOOL_ROWS).encode()
    listed = json.dumps(TOOL_ROWS, indent=1).encode()
    table = datasets.Dataset.from_list(TOOL_ROWS)
    table.to_parquet(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(TOOL_ROWS), tmp_path / "plain.parquet", row_group_size=1)
    parquet.write_table(pyarrow.Table.from_pylist([text_columns(row) for row in TOOL_ROWS]), tmp_path / "text.parquet")
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.data.table.schema) as writer:
        writer.write_table(table.data.table)
    shard = save_datasets(tmp_path / "one", TOOL_ROWS) / "data-00000-of-00001.arrow"
    mixed = datasets.Dataset.from_list(TOOL_ROWS, on_mixed_types="use_json")
    mixed.save_to_disk(tmp_path / "mixed")
    datasets.load_dataset(
        "json", data_files=str(save(tmp_path / "source.jsonl", lines)), split="train", cache_dir=str(tmp_path / "hf")
    ).to_parquet(tmp_path / "loaded.parquet")
    paths = [
        save(tmp_path / "a.jsonl", lines),
        save(tmp_path / "list.json", listed),
        save(tmp_path / "lines.json", lines),
        save(tmp_path / "bom.jsonl", b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n")),
        tmp_path / "a.parquet",
        tmp_path / "plain.parquet",
        tmp_path / "text.parquet",
        tmp_path / "loaded.parquet",
        tmp_path / "file.arrow",
        shard.rename(tmp_path / "stream.arrow"),
        save_datasets(tmp_path / "shards", TOOL_ROWS, num_shards=2),
        tmp_path / "mixed",
        *(COMPRESS[ending](tmp_path / f"a.jsonl{ending}", lines) for ending in COMPRESS),
        *(COMPRESS[ending](tmp_path / f"list.json{ending}", listed) for ending in COMPRESS),
    ]
    assert values(paths[0]) == [(1, TOOL_ROWS[0]), (2, TOOL_ROWS[1])]
    expected = samples(paths[0])
    for path in paths[1:]:
        check_file(path)
        assert samples(path) == expected, path.name


@pytest.mark.parametrize("ending", list(COMPRESS))
def test_compressed_parts_end_to_end_are_one_file(tmp_path: Path, ending: str) -> None:
    """pigz, pbzip2 and `cat a.gz b.gz` write such files; a row may span two parts."""
    parts = [
        COMPRESS[ending](tmp_path / f"{i}{ending}", part).read_bytes() for i, part in enumerate((b"[1", b", 2]\n[3]"))
    ]
    path = save(tmp_path / f"a.jsonl{ending}", b"".join(parts))
    assert list(read_rows(path)) == [(1, b"[1, 2]"), (2, b"[3]")]


def text_columns(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its messages and tools as JSON text, the usual form for datasets with different tools."""
    return {key: json.dumps(value) for key, value in row.items()}


def test_tables_lose_nulls_and_json_does_not(tmp_path: Path) -> None:
    """A null in an object of a table may come from Arrow; a null in JSON, or in JSON text of a table, comes from the
    author."""
    import datasets

    tool = {"name": "f", "parameters": {"x": {"default": None, "enum": ["a", None]}}}
    row = {**ROW, "tools": [tool]}
    datasets.Dataset.from_list([row, {**ROW, "tools": [{"name": "g", "strict": True}]}]).to_parquet(
        tmp_path / "a.parquet"
    )
    datasets.Dataset.from_list([text_columns(row)]).to_parquet(tmp_path / "text.parquet")
    bare = {"name": "f", "parameters": {"x": {"enum": ["a", None]}}}
    tools = {path.name: read_row(values(path)[0][1]).tools for path in tmp_path.glob("*.parquet")}
    assert tools == {"a.parquet": [bare], "text.parquet": [tool]}
    assert read_row(parse(json.dumps(row).encode())).tools == [tool]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import ipc

    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    with ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as file:
        file.write_table(table)
    with pytest.raises(DataError, match="several columns with the name a"):
        list(read_rows(tmp_path / "t.arrow"))


def test_nulls_of_structs_inside_maps_are_left_out(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    kind = pyarrow.map_(pyarrow.string(), pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.int64())]))
    rows = pyarrow.array([[("k", {"a": 1, "b": None})]], type=kind)
    parquet.write_table(pyarrow.table({"m": rows}), tmp_path / "t.parquet")
    assert list(read_rows(tmp_path / "t.parquet")) == [(1, {"m": {"k": {"a": 1}}})]


def test_a_split_is_named_by_its_folder(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict(train=datasets.Dataset.from_list([ROW])).save_to_disk(tmp_path / "chats")
    with pytest.raises(DataError, match="chats holds several splits.  Name the folder of one split: .*/chats/train."):
        check_file(tmp_path / "chats")
    assert values(tmp_path / "chats" / "train") == [(1, ROW)]
    assert row_name(tmp_path / "chats" / "train", 1) == f"{tmp_path}/chats/train row 1"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b"\n \n", "data file DIR/a.jsonl has no rows."),
        ("a.json", b"[]", "data file DIR/a.json has no rows."),
        ("a.json", b' [\n{"messages": 1}, x]', "DIR/a.json row 1: messages must be a list of at least one"),
        ("a.json", b"[" + GOOD + b",]", "DIR/a.json row 2: not JSON: Expecting value at column 1 of 0"),
        ("a.json", b"[" + GOOD + b" {}]", "DIR/a.json row 1: not JSON: Extra data at column"),
        ("a.json", b"[" + GOOD + b"] x", "DIR/a.json is not JSON: there is text after the list of rows."),
        ("a.json", b"[" + GOOD + b', {"a": "]', "DIR/a.json is not JSON: the file ends in row 2, and the list of"),
        ("a.csv", b"messages", "data file DIR/a.csv has an unknown file type; expected .jsonl, .json, .parquet, .arr"),
        ("a.parquet.gz", b"messages", "data file DIR/a.parquet.gz is a compressed table.  Decompress the file"),
        ("a.parquet", b"PAR1", "DIR/a.parquet cannot be read as parquet: "),
        ("a.arrow", b"x", "DIR/a.arrow cannot be read as arrow: "),
        ("a.jsonl.gz", b"x", "data file DIR/a.jsonl.gz cannot be decompressed: Not a gzipped file (b'x')."),
        ("a.jsonl.gz", gzip.compress(GOOD, mtime=0)[:-9], "cannot be decompressed: Compressed file ended before the"),
        ("a.jsonl.bz2", bz2.compress(GOOD) + b"junk", "cannot be decompressed: Invalid data stream."),
        ("a.jsonl.xz", lzma.compress(GOOD)[:-9], "cannot be decompressed: compressed file ended before the end-of"),
        ("a.jsonl.xz", lzma.compress(GOOD) + b"junk" * 4, "cannot be decompressed: Input format not supported"),
        ("a.jsonl.zst", b"junk", "cannot be decompressed: ZSTD decompress failed: "),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    path = save(tmp_path / name, content)
    with pytest.raises(DataError) as error:
        corpus_of(str(path))
    assert complaint.replace("DIR", str(tmp_path)) in str(error.value)


def test_bad_folders_and_files_that_end_too_early(tmp_path: Path) -> None:
    path = save_zst(tmp_path / "a.jsonl.zst", (GOOD + b"\n") * 1000)
    save(path, path.read_bytes()[:-5])
    with pytest.raises(DataError, match="a.jsonl.zst cannot be decompressed: Truncated compressed stream"):
        index_rows(path)
    with pytest.raises(DataError, match="is a folder without state.json, so save_to_disk did not write it"):
        check_file(tmp_path)
    saved = save_datasets(tmp_path / "saved", [ROW])
    state = saved / "state.json"
    for text, complaint in (
        ("{", "state.json does not describe a saved dataset: DataError"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', "was saved in an unknown format"),
        ('{"_data_files": [{"filename": "b.arrow"}]}', "the file b.arrow of saved dataset"),
    ):
        state.write_text(text)
        with pytest.raises(DataError, match=complaint):
            check_file(saved)
    with pytest.raises(DataError, match=r"data file .*b\.jsonl does not exist \(folder "):
        check_file(tmp_path / "b.jsonl")


def test_names(tmp_path: Path) -> None:
    for name, content, expected in (
        ("chat.jsonl", b"{}", "chat.jsonl:7"),
        ("lines.json", b"{}", "lines.json:7"),
        ("list.json", b"\xef\xbb\xbf [{}]", "list.json row 7"),
        ("list.json.gz", gzip.compress(b"[{}]", mtime=0), "list.json.gz row 7"),
        ("chat.parquet", b"", "chat.parquet row 7"),
    ):
        assert row_name(save(tmp_path / name, content), 7) == f"{tmp_path}/{expected}"


def test_index_of_lines(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", b"\xef\xbb\xbf{}\r\n\r\n \t\n {}\n\n[]")
    index = index_rows(path)
    assert index.num_rows == 3 and index.size == 19
    assert index.offsets is not None and index.offsets.tolist() == [3, 12, 17] and index.offsets.dtype == np.int64
    assert index.numbers is not None and index.numbers.tolist() == [1, 4, 6] and index.numbers.dtype == np.int64
    assert list(read_rows(path, index, 1)) == [(4, b"{}"), (6, b"[]")]
    index = index_rows(save(path, b"{}\n{}\n\n"))  # without blank lines in between, the index has no line numbers
    assert (index.num_rows, index.numbers) == (2, None)
    assert len(pickle.dumps(index)) < 1000


def test_index_of_a_list(tmp_path: Path) -> None:
    path = save(tmp_path / "a.json", b' [{"a": "],[\\"\\\\"}, [1, 2] ,7\n]\n')
    index = index_rows(path)
    assert index.offsets is not None and index.offsets.tolist() == [2, 19, 28]
    assert list(read_rows(path)) == [(1, b'{"a": "],[\\"\\\\"}'), (2, b"[1, 2]"), (3, b"7")]
    assert list(read_rows(path, index, 1, 2)) == [(2, b"[1, 2]")]


ANY_LINES = st.lists(
    st.sampled_from([b"{}", b"", b" ", b"\t\r", b"[1, 2]", b' {"a": "b"} ', b"x" * 7, b"\r", b'"\\\\\\" ] [ , "']),
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANY_LINES, st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans(), st.integers(4, 9))
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_ranges_give_the_rows_of_the_whole(
    tmp_path: Path, name: str, lines: list[bytes], end: bytes, closed: bool, mark: bool, block: int
) -> None:
    """Blocks may end anywhere: inside a line, between the two bytes of a line break, in blank lines."""
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
            assert list(read_rows(path, index, start, start + 2)) == expected[start : start + 2]
            assert list(read_rows(path, None, start, start + 2)) == expected[start : start + 2]


ANY_VALUES = st.recursive(
    st.none() | st.integers() | st.text('a "\\[]{},é', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a "\\[]{},', max_size=3), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(ANY_VALUES, max_size=6), indent=st.sampled_from([None, 1]), block=st.integers(1, 9))
def test_elements_of_a_list_are_those_of_json(rows: list[Any], indent: int | None, block: int) -> None:
    text = json.dumps(rows, indent=indent).encode()[1:] + b" \n"
    blocks = (text[i : i + block] for i in range(0, len(text), block))
    elements = list(json_rows.read_elements(blocks, Path("a.json"), 1))
    assert [json.loads(content) for _, content in elements] == rows
    assert all(text[at:].strip().startswith(content) for at, content in elements)


def test_ranges_of_tables(tmp_path: Path) -> None:
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
    numbered = [(i + 1, row) for i, row in enumerate(rows)]
    for name in ("a.parquet", "a.arrow", "file.arrow", "saved"):
        path = tmp_path / name
        index = index_rows(path)
        assert (index.num_rows, index.offsets, index.numbers) == (500, None, None)
        for start, stop in ((0, None), (149, 151), (150, 150), (210, 500), (499, 900), (500, None), (166, 335)):
            assert list(read_rows(path, index, start, stop)) == numbered[start:stop], (name, start, stop)
            assert list(read_rows(path, None, start, stop)) == numbered[start:stop], (name, start, stop)


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", GOOD + b"\n" + GOOD + b"\n")
    index = index_rows(path)
    save(path, GOOD + b"\n")
    with pytest.raises(DataError, match=r"a.jsonl was changed while it was read: it had 208 bytes, now 104\."):
        list(read_rows(path, index))
    save(path, (GOOD + b"\n") * 3)
    with pytest.raises(DataError, match="it had 208 bytes, now 312"):
        list(read_rows(path, index))
    save(path, GOOD + b"\n" + b" " * 104)
    with pytest.raises(DataError, match=r"a.jsonl was changed while it was read: it no longer has 2 rows\."):
        list(read_rows(path, index))


MEMORY = 12 * 2**20  # a block of 1 MiB several times: as masks of numpy, as lines, and in gzip


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    """30 MB in rows of 20,000 bytes."""
    line = b'{"text": "' + b"x" * 19_986 + b'"}'
    content = b"[" + b",\n".join([line] * 1500) + b"]" if name == "a.json" else b"\n".join([line] * 1500)
    path = save(tmp_path / name, gzip.compress(content, 1) if name.endswith(".gz") else content)
    del content
    tracemalloc.start()
    try:
        index = index_rows(path)
        count = sum(1 for _ in read_rows(path, index))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == index.num_rows == 1500
    assert peak < MEMORY, f"{peak / 2**20:.1f} MiB"
