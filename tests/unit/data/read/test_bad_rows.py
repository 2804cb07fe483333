"""A bad row is named with its reason, and the rows around it are read as if it did not exist."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sft.data.read import json_rows
from sft.data.read.rows import index_rows, read_rows
from sft.data.read.strict_json import Unreadable, parse
from sft.data.rows.formats import read_row
from sft.errors import DataError
from tests.unit.corpora import ROW, corpus_of, save

USER, ANSWER = ROW["messages"]
GOOD = json.dumps(ROW).encode()
CUT_LINE = GOOD[: len(GOOD) // 2]


def turn(**message: Any) -> bytes:
    return json.dumps({"messages": [USER, message]}).encode()


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "more after the object": (b'{"messages": []} x', "not JSON: Extra data at column 18"),
    "last line cut": (CUT_LINE, "not JSON: Unterminated string starting at column 43 of 51 characters."),
    "NaN": (b'{"messages": NaN}', "NaN is not JSON."),
    "number without end": (b'{"messages": 1e999}', "not usable JSON: the number 1e999 is too large."),
    "huge integer": (b"1" * 5000, "not usable JSON: Exceeds the limit"),
    "duplicate keys": (b'{"messages": [{"role": "user", "role": "user"}]}', "key 'role' appears twice in one object."),
    "invalid UTF-8": (b'{"messages": "\xff"}', "not UTF-8: byte 0xff at position 15."),
    "UTF-16": (GOOD.decode().encode("utf-16-le"), "not JSON: Expecting property name"),
    "deep nesting": (b"[" * 100_000, "nested too deeply, beyond 100 levels."),
    "half a surrogate pair": (b'{"messages": "\\ud83d"}', "contains half a surrogate pair (\\ud83d), which is not "
                                                          "valid text."),
    "a number": (b"7", "a row must be an object; got 7."),
    "no known shape": (b'{"body": "a", "messages": null}', "This row has the keys body, messages (null)."),
    "id beyond the tokenizer": (b'{"tokens": [1, 259], "loss_mask": [0, 1]}', "token 2 is 259, but the"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_row_is_named_and_alone(tmp_path: Path, name: str) -> None:
    """The message has the file, the line and the reason; the rows around it can be read."""
    line, complaint = BAD_LINES[name]
    path = save(tmp_path / "chat.jsonl", GOOD + b"\n\n" + line + b"\n" + GOOD + b"\n")
    with pytest.raises(DataError) as error:
        corpus_of(str(path))
    assert str(error.value).startswith(f"{path}:3: ") and complaint in str(error.value)
    assert not list(tmp_path.glob("cache/*"))
    (first, good), (third, _), (fourth, last) = read_rows(path)
    assert (first, third, fourth) == (1, 3, 4) and parse(good) == parse(last) == ROW


# If a string or bracket of a row does not close, the rest of a JSON list cannot be read.
UNCLOSED = ("last line cut", "deep nesting", "UTF-16")


@pytest.mark.parametrize("name", [name for name in BAD_LINES if name not in UNCLOSED])
def test_a_bad_row_of_a_list_is_named_and_alone(tmp_path: Path, name: str) -> None:
    line, complaint = BAD_LINES[name]
    path = save(tmp_path / "chat.json", b"[" + b",\n".join([GOOD, line, GOOD]) + b"]")
    with pytest.raises(DataError) as error:
        corpus_of(str(path))
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
        corpus_of(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_row_over_the_limit_is_named_and_alone(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "MAX_ROW_BYTES", 3_000_000)
    long = b'{"messages": "' + b"x" * 4_999_984 + b'"}'
    files = {"a.jsonl": GOOD + b"\n" + long + b"\n" + GOOD, "a.json": b"[" + GOOD + b"," + long + b"," + GOOD + b"]"}
    for name, content in files.items():
        path = tmp_path / f"{name}{ending}"
        save(path, gzip.compress(content, 1) if ending else content)
        (_, first), (number, bad), (_, last) = read_rows(path)
        assert number == 2 and parse(first) == parse(last) == ROW
        with pytest.raises(DataError, match=r"^5,000,000 bytes long; a row may have at most 3,000,000 bytes\.  A line"):
            parse(bad)
        assert index_rows(path).num_rows == 3


def test_accepted_on_purpose(tmp_path: Path) -> None:
    """A byte order mark at the start, CRLF, blank lines, no line break at the end, and a line of 3 MB."""
    long = json.dumps({"messages": [{"role": "user", "content": "x" * 3_000_000}, ANSWER]}).encode()
    path = save(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + GOOD + b"\r\n \t\r\n" + long + b"\r\n\r\n\n" + GOOD)
    corpus = corpus_of(str(path), seq_length=20_000_000)
    assert corpus.lengths.tolist() == [39, 3_000_025, 39]
    assert [corpus.name(i) for i in range(3)] == [f"{path}:1", f"{path}:3", f"{path}:6"]


RENAME = "  If the file is one JSON list of rows, give it a name that ends with .json instead of .jsonl."
JOIN = "  If an object fills several lines, write it in one line, or put all objects into a list in a .json file."
NO_COMMA = "Expecting ',' delimiter at column 16 of 15 characters."
SKIP = "  data.on_bad_row=skip leaves out such rows, up to a tenth of a file."
NO_NAME = "not JSON: Expecting property name enclosed in double quotes at column 2 of 1 characters."
PRETTY = json.dumps(ROW, indent=1).encode()
HINTS = [
    ("a.jsonl", b"[" + GOOD + b"]\n", f"a.jsonl:1: a row must be an object; got a list.{RENAME}"),
    ("a.jsonl", b"[\n" + GOOD + b"]", f"a.jsonl:1: not JSON: Expecting value at column 2 of 1 characters.{RENAME}"),
    ("pretty.json", PRETTY, f"pretty.json:1: {NO_NAME}{JOIN}"),
    ("pretty.jsonl", PRETTY, f"pretty.jsonl:1: {NO_NAME}{JOIN}"),
    ("a.jsonl", b'{"messages": []', f"a.jsonl:1: not JSON: {NO_COMMA}{SKIP}"),
    ("a.json", b"[[]]", f"a.json row 1: a row must be an object; got an empty list.{SKIP}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "complaint"), HINTS, ids=range(len(HINTS)))
def test_json_of_another_kind_is_recognised(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    with pytest.raises(DataError) as error:
        corpus_of(str(save(tmp_path / name, content)))
    assert str(error.value) == f"{tmp_path}/{complaint}"


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


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=ANY_BYTES)
@example(content=b'{"messages": [{"role": [], "content": {}}]}')
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.bz2", "a.json.zst", "a.arrow"])
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
    | st.sampled_from(["user", "assistant", "tool", "text", "thinking"])
    | st.sampled_from(["function", "a", '{"a": 1}', "[]", "gpt", "function_call"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(
            "role content messages tool_calls tools function name arguments id tool_call_id weight train from value "
            "type text prompt completion instruction output input history system tokens input_ids labels loss_mask "
            "conversations reasoning thinking function_call chat_template_kwargs documents functions reasoning_details "
            "system_prompt label mask images attention_mask position_ids cu_seqlens loss_scale".split()
        ),
        inner,
        max_size=5,
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(row=VALUES)
def test_no_row_raises_anything_but_data_errors(row: Any) -> None:
    try:
        read_row(parse(json.dumps(row).encode()))
    except DataError as error:
        assert len(str(error)) < 700
