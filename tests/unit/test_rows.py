"""Reading rows: every kind of file gives the same rows, any range of them, and a bad row is named and alone."""

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
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sft.console import QUIET
from sft.data.cache.corpus import Corpus
from sft.data.cache.prepare import prepare
from sft.data.chat.formats import read_row
from sft.data.chat.tokenizer import load_tokenizer
from sft.data.read import json_rows
from sft.data.read.json_rows import read_blocks
from sft.data.read.rows import check_file, index_rows, read_rows, row_name
from sft.data.read.strict_json import Unreadable, parse
from sft.errors import DataError
from tests.unit.fixtures.folder import config

USER, ANSWER = {"role": "user", "content": "Hello, friend!"}, {"role": "assistant", "content": "Fine"}
ROW = {"messages": [USER, ANSWER]}
GOOD = json.dumps(ROW).encode()


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def save_zst(path: Path, content: bytes) -> Path:
    import pyarrow

    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(content)
    return path


def save_datasets(folder: Path, rows: list[dict[str, Any]], num_shards: int = 1) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(folder, num_shards=num_shards)
    return folder


def prepared(path: Path) -> Corpus:
    data = config(train=[str(path)], seq_length=20_000_000)
    return prepare(data.train, data, load_tokenizer(data), path.parent / "cache", QUIET)


def samples(path: Path) -> list[tuple[list[int], list[float]]]:
    corpus = prepared(path)
    return [(corpus.sample(i).tokens.tolist(), corpus.sample(i).weights.tolist()) for i in range(len(corpus))]


def values(path: Path, *bounds: Any) -> list[Any]:
    return [(number, parse(content)) for number, content in read_rows(path, *bounds)]


COMPRESS: dict[str, Callable[[Path, bytes], Path]] = {
    ".gz": lambda path, content: save(path, gzip.compress(content)),
    ".bz2": lambda path, content: save(path, bz2.compress(content)),
    ".xz": lambda path, content: save(path, lzma.compress(content)),
    ".zst": save_zst,
}


# What a file may be


def schema(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": parameters}}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": f"call-{name}", "function": {"name": name, "arguments": arguments}}


# Tools with other keys in every row, calls with other arguments: Arrow gives all of them the keys of all.
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
    {"messages": [USER, ANSWER]},
]
TOOL_TEXTS = [
    '{"type": "function", "function": {"name": "add", "parameters": {"properties": '
    '{"x": {"type": "integer"}, "y": {"type": "integer", "minimum": 0}}}}}',
    '{"type": "function", "function": {"name": "look", "parameters": {"properties": {"place": {"type": "object"}}}}}',
    '{"type": "function", "function": {"name": "add", "parameters": {"properties": {"x": {"type": "integer"}}}}}',
]
EXPECTED_TEXTS = [
    f"<|im_start|>system\n# Tools\n{TOOL_TEXTS[0]}<|im_end|>\n<|im_start|>user\nHello, friend!<|im_end|>\n"
    '<|im_start|>assistant\n<tool_call>\n{"type": "function", "id": "call-add", "function": '
    '{"name": "add", "arguments": {"x": 1, "y": 2}}}\n</tool_call><|im_end|>\n'
    "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\nThree.<|im_end|>\n",
    f"<|im_start|>system\n# Tools\n{TOOL_TEXTS[1]}\n{TOOL_TEXTS[2]}<|im_end|>\n"
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello, friend!<|im_end|>\n"
    '<|im_start|>assistant\n<tool_call>\n{"type": "function", "id": "call-look", "function": '
    '{"name": "look", "arguments": {"place": {"city": "Rome"}}}}\n</tool_call><|im_end|>\n',
    "<|im_start|>user\nHello, friend!<|im_end|>\n<|im_start|>assistant\nFine<|im_end|>\n",
]


def test_every_kind_of_file_gives_the_same_samples(tmp_path: Path) -> None:
    """The same rows with tools of differing keys, in twenty ways of writing them: tokens and weights."""
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
    expected = samples(paths[0])
    byte = load_tokenizer(config())
    assert [byte.decode(tokens) for tokens, _ in expected] == EXPECTED_TEXTS
    for path in paths[1:]:
        check_file(path)
        assert samples(path) == expected, path.name


@pytest.mark.parametrize("ending", list(COMPRESS))
def test_compressed_parts_end_to_end_are_one_file(tmp_path: Path, ending: str) -> None:
    """As pigz and pbzip2 write them, and as `cat a.gz b.gz` makes them; a row may span two parts."""
    parts = [
        COMPRESS[ending](tmp_path / f"{i}{ending}", part).read_bytes() for i, part in enumerate((b"[1", b", 2]\n[3]"))
    ]
    path = save(tmp_path / f"a.jsonl{ending}", b"".join(parts))
    assert list(read_rows(path)) == [(1, b"[1, 2]"), (2, b"[3]")]


def text_columns(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its messages and tools as JSON text, as datasets of differing tools are usually written."""
    return {key: json.dumps(value) for key, value in row.items()}


def test_tables_lose_nulls_and_json_does_not(tmp_path: Path) -> None:
    """A null in an object of a table may be Arrow's own; a null in JSON, or in a table's JSON text, was written."""
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


def test_a_split_is_named_by_its_folder(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict(train=datasets.Dataset.from_list([ROW])).save_to_disk(tmp_path / "chats")
    with pytest.raises(DataError) as error:
        check_file(tmp_path / "chats")
    assert str(error.value) == (
        f"{tmp_path}/chats holds several splits.  Name the folder of one: {tmp_path}/chats/train."
    )
    check_file(tmp_path / "chats" / "train")
    assert values(tmp_path / "chats" / "train") == [(1, ROW)]
    assert row_name(tmp_path / "chats" / "train", 1) == f"{tmp_path}/chats/train row 1"


EXPECTED_KINDS = (
    ".jsonl, .json, .parquet, .arrow, .jsonl or .json followed by .gz, .bz2, .xz or .zst, or a folder written by "
    "save_to_disk of datasets"
)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b"", "data file DIR/a.jsonl is empty."),
        ("a.jsonl", b"\n \n", "data file DIR/a.jsonl has no rows."),
        ("a.json", b"[]", "data file DIR/a.json has no rows."),
        ("a.json", b' [\n{"messages": 1}, x]', "DIR/a.json row 1: messages must be a list of at least one"),
        ("a.json", b"[x, 1]", "DIR/a.json row 1: not JSON: Expecting value at column 1 of 1 characters."),
        ("a.json", b"[" + GOOD + b",]", "DIR/a.json row 2: not JSON: Expecting value at column 1 of 0"),
        ("a.json", b"[" + GOOD + b" {}]", "DIR/a.json row 1: not JSON: Extra data at column"),
        ("a.json", b"[" + GOOD + b"] x", "DIR/a.json is not JSON: there is more after the list of rows."),
        ("a.json", b"[" + GOOD + b', {"a": "]', "DIR/a.json is not JSON: the file ends in row 2, and the list of"),
        ("a.json", b"[" + GOOD + b"]]", "DIR/a.json is not JSON: there is more after"),
        ("a.csv", b"messages", f"data file DIR/a.csv is of unknown kind; expected {EXPECTED_KINDS}."),
        ("a.gz", b"messages", "data file DIR/a.gz is of unknown kind"),
        ("a.parquet.gz", b"messages", "data file DIR/a.parquet.gz is a compressed table.  Decompress it"),
        ("a.parquet", b"PAR1", "DIR/a.parquet cannot be read as parquet: "),
        ("a.arrow", b"x", "DIR/a.arrow cannot be read as arrow: "),
        ("a.arrow", b"ARROW1xxxxxxxxx", "DIR/a.arrow cannot be read as arrow: "),
        ("a.jsonl.gz", b"x", "data file DIR/a.jsonl.gz cannot be decompressed: Not a gzipped file (b'x')."),
        ("a.jsonl.gz", gzip.compress(GOOD)[:-9], "cannot be decompressed: Compressed file ended before the end-of"),
        ("a.jsonl.gz", gzip.compress(GOOD) + b"x", "cannot be decompressed: Not a gzipped file"),
        ("a.jsonl.bz2", bz2.compress(GOOD)[:-9], "cannot be decompressed: compressed file ended before the end-of"),
        ("a.jsonl.bz2", bz2.compress(GOOD) + b"junk", "cannot be decompressed: Invalid data stream."),
        ("a.jsonl.xz", lzma.compress(GOOD)[:-9], "cannot be decompressed: compressed file ended before the end-of"),
        ("a.jsonl.xz", lzma.compress(GOOD) + b"junk" * 4, "cannot be decompressed: Input format not supported"),
        ("a.jsonl.zst", b"junk", "cannot be decompressed: ZSTD decompress failed: "),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    path = save(tmp_path / name, content)
    with pytest.raises(DataError) as error:
        prepared(path)
    assert complaint.replace("DIR", str(tmp_path)) in str(error.value)


def test_truncated_zst(tmp_path: Path) -> None:
    path = save_zst(tmp_path / "a.jsonl.zst", (GOOD + b"\n") * 1000)
    save(path, path.read_bytes()[:-5])
    with pytest.raises(DataError, match="a.jsonl.zst cannot be decompressed: Truncated compressed stream"):
        index_rows(path)


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder without state.json, so not a dataset written by save_to_disk"):
        check_file(tmp_path)
    saved = save_datasets(tmp_path / "saved", [ROW])
    state = saved / "state.json"
    for text, complaint in (
        ("{", "state.json is not that of a saved dataset: DataError"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', "was saved in a way that is not understood"),
        ('{"_data_files": [{"filename": "b.arrow"}]}', "lacks its file b.arrow"),
    ):
        state.write_text(text)
        with pytest.raises(DataError, match=complaint):
            check_file(saved)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data file .*b\.jsonl does not exist \(folder "):
        check_file(tmp_path / "b.jsonl")


# Bad rows

CUT_LINE = GOOD[: len(GOOD) // 2]


def turn(**message: Any) -> bytes:
    return json.dumps({"messages": [USER, message]}).encode()


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "broken JSON": (b'{"messages": [', "not JSON: Expecting value at column 15 of 14 characters."),
    "more after the object": (b'{"messages": []} x', "not JSON: Extra data at column 18"),
    "last line cut": (CUT_LINE, "not JSON: Unterminated string starting at column 43 of 51 characters."),
    "NaN": (b'{"messages": NaN}', "NaN is not JSON."),
    "number without end": (b'{"messages": 1e999}', "not usable JSON: the number 1e999 is too large."),
    "huge integer": (b"1" * 5000, "not usable JSON: Exceeds the limit"),
    "duplicate keys": (b'{"messages": [{"role": "user", "role": "user"}]}', "key 'role' is given twice in one object."),
    "invalid UTF-8": (b'{"messages": "\xff"}', "not UTF-8: byte 0xff at position 15."),
    "UTF-16": (GOOD.decode().encode("utf-16-le"), "not JSON: Expecting property name"),
    "byte order mark inside": (b"\xef\xbb\xbf{}", "not JSON: "),
    "NUL byte": (b'{"messages": "\x00"}', "not JSON: Invalid control character"),
    "deep nesting": (b"[" * 100_000, "nested too deeply, beyond 100 levels."),
    "nesting beyond the limit": (b"[" * 101 + b"]" * 101, "nested too deeply, beyond 100 levels."),
    "half a surrogate pair": (b'{"messages": "\\ud83d"}', "holds half a surrogate pair (\\ud83d), which is not text."),
    "a number": (b"7", "a row is an object; got 7."),
    "a list": (b"[1]", "a row is an object; got a list."),
    "no known shape": (b'{"text": "a", "messages": null}', "The keys here are: text, messages (null)."),
    "two shapes": (
        b'{"messages": [], "tokens": []}',
        "has messages as well as tokens, so it is not clear which is meant",
    ),
    "no messages": (b'{"messages": []}', "messages must be a list of at least one message; got an empty list."),
    "null message": (b'{"messages": [null]}', "message 1 must be an object with role and content; got null."),
    "unknown role": (turn(role="assitant", content="a"), 'message 2 has role "assitant"; expected one of'),
    "no role": (turn(content="a"), "message 2 has no role; expected one of system, user, assistant"),
    "no assistant": (turn(role="user", content="a"), "no assistant turn, so there is nothing to learn from."),
    "empty assistant": (turn(role="assistant", content=" \n"), "message 2 (assistant) is empty"),
    "null content": (turn(role="assistant", content=None), "message 2 (assistant) must have a string as content"),
    "content a number": (turn(role="assistant", content=7), "must have a string as content; got 7."),
    "image": (turn(role="user", content=[{"type": "image_url"}]), 'a part of type "image_url"; only text'),
    "tools not a list": (GOOD[:-1] + b', "tools": 7}', "tools must be a list of objects; got 7."),
    "negative weight": (turn(role="assistant", content="a", weight=-1), "the weight of message 2 is -1; expected 0"),
    "tokens without a mask": (b'{"tokens": [1, 2]}', "tokens needs one of loss_mask, assistant_masks and labels"),
    "other lengths": (b'{"tokens": [1, 2], "loss_mask": [0, 1, 1]}', "tokens has 2 numbers and loss_mask 3."),
    "id beyond the tokenizer": (b'{"tokens": [1, 259], "loss_mask": [0, 1]}', "token 2 is 259, but the"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_row_is_named_and_alone(tmp_path: Path, name: str) -> None:
    """By file and line, with its reason; the rows around it can be read."""
    line, complaint = BAD_LINES[name]
    path = save(tmp_path / "chat.jsonl", GOOD + b"\n\n" + line + b"\n" + GOOD + b"\n")
    with pytest.raises(DataError) as error:
        prepared(path)
    assert str(error.value).startswith(f"{path}:3: ") and complaint in str(error.value)
    assert not list(tmp_path.glob("cache/*"))
    (first, good), (third, bad), (fourth, last) = read_rows(path)
    assert (first, third, fourth) == (1, 3, 4) and parse(good) == parse(last) == ROW
    with pytest.raises(DataError):
        data = read_row(parse(bad))
        raise DataError("only its ids are wrong") if name == "id beyond the tokenizer" else AssertionError(data)


# Text whose strings and brackets do not close takes the rest of a list with it.
UNCLOSED = ("broken JSON", "last line cut", "deep nesting", "UTF-16")


@pytest.mark.parametrize("name", [name for name in BAD_LINES if name not in UNCLOSED])
def test_a_bad_row_of_a_list_is_named_and_alone(tmp_path: Path, name: str) -> None:
    line, complaint = BAD_LINES[name]
    path = save(tmp_path / "chat.json", b"[" + b",\n".join([GOOD, line, GOOD]) + b"]")
    with pytest.raises(DataError) as error:
        prepared(path)
    assert str(error.value).startswith(f"{path} row 2: ") and complaint in str(error.value)
    (_, first), _, (number, last) = read_rows(path)
    assert number == 3 and parse(first) == parse(last) == ROW


def test_a_bad_row_of_a_table_is_named_and_alone(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    texts = pyarrow.array([GOOD[13:-1], b'"\xff"', GOOD[13:-1]], pyarrow.binary())
    bad_text = pyarrow.StringArray.from_buffers(3, *texts.buffers()[1:])
    parquet.write_table(pyarrow.table({"messages": bad_text}), tmp_path / "a.parquet")
    first, second, third = read_rows(tmp_path / "a.parquet")
    assert read_row(parse(first[1])) == read_row(parse(third[1])) == read_row(ROW)
    assert isinstance(second[1], Unreadable) and "can't decode byte 0xff" in second[1].reason
    with pytest.raises(DataError, match="a.parquet row 2: cannot be read: 'utf-8' codec can't decode byte 0xff"):
        prepared(tmp_path / "a.parquet")


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_row_over_the_limit_is_named_and_alone(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "MAX_ROW_BYTES", 3_000_000)
    long = b'{"messages": "' + b"x" * 4_999_984 + b'"}'
    lines, listed = GOOD + b"\n" + long + b"\n" + GOOD, b"[" + GOOD + b"," + long + b"," + GOOD + b"]"
    for name, content in (("a.jsonl", lines), ("a.json", listed)):
        path = tmp_path / f"{name}{ending}"
        save(path, gzip.compress(content, 1) if ending else content)
        (_, first), (number, bad), (_, last) = read_rows(path)
        assert number == 2 and parse(first) == parse(last) == ROW
        with pytest.raises(DataError) as error:
            parse(bad)
        assert str(error.value) == "5,000,000 bytes long; a row may have 3,000,000.  Is a line end missing?"
        assert index_rows(path).num_rows == 3


def test_accepted_on_purpose(tmp_path: Path) -> None:
    """A byte order mark at the start, CRLF, blank lines, no end of the last line, and a line of 10 MB."""
    long = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}, ANSWER]}).encode()
    path = save(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + GOOD + b"\r\n \t\r\n" + long + b"\r\n\r\n\n" + GOOD)
    corpus = prepared(path)
    assert corpus.lengths.tolist() == [39, 10_000_025, 39]
    assert [corpus.name(i) for i in range(3)] == [f"{path}:1", f"{path}:3", f"{path}:6"]


ANY_BYTES = st.one_of(
    st.binary(max_size=200),
    st.lists(
        st.sampled_from(
            [b'{"messages":', b'{"tokens":', b'"role":', b'"user"', b'"content":', b'"tool_calls":', b'"name"', b"["]
            + [b"]", b"{", b"}", b",", b":", b'"', b"\\", b"null", b"1", b"-1", b"\n", b"\r\n", b"\xef\xbb\xbf"]
            + [GOOD, b'"weight":', b'"tools":', b'"loss_mask":', b'\\ud800', b"true", b"\xff", b'"from":', b'"value":']
        ),
        max_size=30,
    ).map(b"".join),
)  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=ANY_BYTES)
@example(content=b'{"messages": [{"role": [], "content": {}}]}')
@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.bz2", "a.jsonl.xz", "a.json.zst", "a.arrow"]
)
def test_no_bytes_raise_anything_but_data_errors(tmp_path: Path, name: str, content: bytes) -> None:
    path = save(tmp_path / name, content)
    try:
        index_rows(path)
        for _, row in read_rows(path):
            try:
                read_row(parse(row))
            except DataError:
                pass
    except DataError:
        pass


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "tool", "text", "function", "a", '{"a": 1}', "[]", "gpt", "function_call"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(
            "role content messages tool_calls tools function name arguments id tool_call_id weight train from value "
            "type text prompt completion instruction output input history system tokens input_ids labels loss_mask "
            "conversations reasoning thinking function_call".split()
        ),
        inner,
        max_size=5,
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(row=VALUES)
def test_no_row_raises_anything_but_data_errors(row: Any) -> None:
    try:
        read_row(parse(json.dumps(row).encode()))
    except DataError as error:
        assert len(str(error)) < 700


# The index


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


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=LINES,
    end=st.sampled_from([b"\n", b"\r\n"]),
    closed=st.booleans(),
    mark=st.booleans(),
    block=st.integers(4, 9),
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz"])
def test_ranges_give_the_rows_of_the_whole(
    tmp_path: Path, name: str, lines: list[bytes], end: bytes, closed: bool, mark: bool, block: int
) -> None:
    """Wherever a block ends: inside a line, between its end's two bytes, in blank lines."""
    content = (b"\xef\xbb\xbf" if mark else b"") + end.join(lines) + (end if closed else b"")
    path = tmp_path / name
    save(path, content) if path.suffix == ".jsonl" else COMPRESS[path.suffix](path, content)
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
    import pyarrow
    from pyarrow import parquet

    rows = [{"n": i} for i in range(500)]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=150)
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    save_datasets(tmp_path / "saved", rows, num_shards=3)
    path = tmp_path / name
    index = index_rows(path)
    assert (index.num_rows, index.offsets, index.numbers) == (500, None, None)
    for start, stop in ((0, None), (149, 151), (150, 150), (210, 500), (499, 900), (500, None), (166, 335)):
        expected = [(i + 1, {"n": i}) for i in range(500)][start:stop]
        assert list(read_rows(path, index, start, stop)) == expected, (start, stop)
        assert list(read_rows(path, None, start, stop)) == expected, (start, stop)


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", GOOD + b"\n" + GOOD + b"\n")
    index = index_rows(path)
    save(path, GOOD + b"\n")
    with pytest.raises(DataError, match=r"a.jsonl was changed while it was read: it had 208 bytes, now 104\."):
        list(read_rows(path, index))
    save(path, GOOD + b"\n" + b" " * 104)
    with pytest.raises(DataError, match=r"a.jsonl was changed while it was read: it had 2 rows\."):
        list(read_rows(path, index))


def test_names(tmp_path: Path) -> None:
    for name, content, expected in (
        ("chat.jsonl", b"{}", "chat.jsonl:7"),
        ("chat.jsonl.gz", gzip.compress(b"{}"), "chat.jsonl.gz:7"),
        ("lines.json", b"{}", "lines.json:7"),
        ("list.json", b"\xef\xbb\xbf [{}]", "list.json row 7"),
        ("list.json.gz", gzip.compress(b"[{}]"), "list.json.gz row 7"),
        ("chat.parquet", b"", "chat.parquet row 7"),
    ):
        assert row_name(save(tmp_path / name, content), 7) == f"{tmp_path}/{expected}"


MEMORY = 12 * 2**20  # a block of 1 MiB several times over: as numpy's masks, as lines, and what gzip holds


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    """50 MB in rows of 2,000 bytes."""
    line = b'{"text": "' + b"x" * 1986 + b'"}'
    content = b"[" + b",\n".join([line] * 25_000) + b"]" if name == "a.json" else b"\n".join([line] * 25_000)
    path = save(tmp_path / name, gzip.compress(content, 1) if name.endswith(".gz") else content)
    del content
    tracemalloc.start()
    try:
        index = index_rows(path)
        count = sum(1 for _ in read_rows(path, index))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == index.num_rows == 25_000
    assert peak < MEMORY, f"{peak / 2**20:.1f} MiB"


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import ipc

    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    with ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as file:
        file.write_table(table)
    with pytest.raises(DataError, match="two columns of one name among a, a"):
        list(read_rows(tmp_path / "t.arrow"))


def test_nulls_of_structs_inside_maps_are_left_out(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    kind = pyarrow.map_(pyarrow.string(), pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.int64())]))
    rows = pyarrow.array([[("k", {"a": 1, "b": None})]], type=kind)
    parquet.write_table(pyarrow.table({"m": rows}), tmp_path / "t.parquet")
    assert list(read_rows(tmp_path / "t.parquet")) == [(1, {"m": {"k": {"a": 1}}})]
