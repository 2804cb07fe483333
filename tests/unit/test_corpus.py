"""Files to samples: every fault named, every loss counted, every cache either right or rebuilt."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.corpus import Corpus
from sft.data.ledger import Ledger
from sft.data.prepare import prepare
from sft.data.tokenizer import load_tokenizer
from sft.errors import DataError
from tests.unit.fixtures.folder import config, make_folder, template

# In bytes: 1 + "user\n" + 14 + 2 = 22 and 1 + "assistant\n" + 4 + 2 = 17, together 39 tokens,
# 5 of them supervised.  LONG adds 1 + 5 + 53 + 2 = 61 and 1 + 10 + 3 + 2 = 16: 116 tokens, 9 supervised.
ROW = {"messages": [{"role": "user", "content": "Hello, friend!"}, {"role": "assistant", "content": "Fine"}]}
LONG = {"messages": ROW["messages"] + [{"role": "user", "content": "x" * 53}, {"role": "assistant", "content": "Yes"}]}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def corpus_of(
    *paths: str, cache: Path | None = None, log: list[str] | None = None, verify: bool = False, **overrides: Any
) -> Corpus:
    data = config(**overrides)
    lines = log if log is not None else []
    cache_dir = cache or Path(paths[0]).parent / "cache"
    return prepare(paths, data, load_tokenizer(data), cache_dir, lines.append, verify=verify)


def texts(corpus: Corpus) -> list[str]:
    byte = load_tokenizer(config())
    return [byte.decode(corpus.sample(i).tokens) for i in range(len(corpus))]


def test_samples(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", ROW, "", LONG), write(tmp_path / "b.jsonl", ROW)
    corpus = corpus_of(first, second)
    assert len(corpus) == 3
    assert corpus.lengths.tolist() == [39, 116, 39] and corpus.lengths.dtype == np.int64
    assert corpus.num_supervised.tolist() == [5, 9, 5] and corpus.num_supervised.dtype == np.int64
    sample = corpus.sample(2)
    assert sample.sample_id == 2 and sample.num_supervised == 5
    assert sample.tokens.dtype == np.int32 and sample.weights.dtype == np.float32
    assert bytes(sample.tokens[sample.weights > 0][:4].tolist()) == b"Fine"
    assert [corpus.name(i).removeprefix(f"{tmp_path}/") for i in range(3)] == [
        "a.jsonl:1",
        "a.jsonl:3",
        "b.jsonl:1",
    ]
    assert corpus.summary().splitlines()[1].endswith("b.jsonl: 1 samples, 39 tokens (12.8% supervised), longest 39")


def test_formats_give_the_same_samples(tmp_path: Path) -> None:
    import datasets

    rows = [ROW, LONG]
    lines = write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    write(tmp_path / "lines.json", *rows)
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + Path(lines).read_bytes().replace(b"\n", b"\r\n"))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(tmp_path / "a.arrow")
    expected = texts(corpus_of(lines))
    for name in ("list.json", "lines.json", "bom.jsonl", "a.parquet", "a.arrow"):
        assert texts(corpus_of(str(tmp_path / name))) == expected, name


BAD_LINES: list[tuple[bytes, str]] = [
    (b'{"messages": [', "not JSON: Expecting value at column 15 of 14 characters."),
    (b'{"messages": []} x', "not JSON: Extra data at column 18"),
    (b'{"messages": NaN}', "NaN is not JSON."),
    (b'{"messages": [{"role": "user", "role": "user", "content": "a"}]}', "key 'role' is given twice in one"),
    (b'{"messages": "\xff"}', "not UTF-8: byte 0xff at position 15."),
    (b"\xef\xbb\xbf{}", "not JSON: "),  # a byte order mark anywhere but at the start of the file
    (b'{"messages": "\x00"}', "not JSON: Invalid control character"),
    (b"[" * 100_000, "nested too deeply"),
    (b"1" * 5000, "Exceeds the limit"),
    (b"7", "a row is an object with messages; got 7."),
    (b"{}", "no messages: a row is an object with messages; the keys here are: none."),
    (b'{"messages": [{"role": "assitant", "content": "a"}]}', 'message 1 has role "assitant"; expected one'),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "no assistant turn"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "complaint"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_lines_are_named(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(DataError) as error:
        corpus_of(str(path))
    assert str(error.value).startswith(f"{path}:3: ") and complaint in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_bad_rows_without_lines_are_named_by_number(tmp_path: Path) -> None:
    bad = {"messages": [{"role": "user", "content": "a"}]}
    (tmp_path / "list.json").write_text(json.dumps([ROW, bad], indent=1))
    with pytest.raises(DataError, match="list.json row 2: no assistant turn"):
        corpus_of(str(tmp_path / "list.json"))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.jsonl", b"\n \n", "a.jsonl has no rows"),
        ("a.json", b"[]", "a.json has no rows"),
        ("a.json", b'[{"messages": 1},\n x]', r"a.json: not JSON: Expecting value at line 2, column 2"),
        ("a.csv", b"messages", "a.csv is of unknown kind; expected one of .jsonl, .json, .parquet, .arrow"),
        ("a.parquet", b"PAR1", "a.parquet cannot be read as parquet: "),
        ("a.arrow", b"x", "a.arrow cannot be read as arrow: "),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        corpus_of(str(tmp_path / name))


def test_missing_file_is_found_before_any_work(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", ROW)
    with pytest.raises(DataError, match="data file .*b.jsonl does not exist"):
        corpus_of(good, str(tmp_path / "b.jsonl"))
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match="is not a file"):
        corpus_of(str(tmp_path))


def test_over_long_is_an_error_by_default(tmp_path: Path) -> None:
    """P97: a sample of twice the limit."""
    path = write(tmp_path / "a.jsonl", ROW, LONG)
    with pytest.raises(DataError) as error:
        corpus_of(path, seq_length=64, doc_multiple=16)
    assert str(error.value) == (
        f"{path}:2: 116 tokens (128 when padded to a multiple of 16) do not fit data.seq_length = 64.  Raise "
        "it to 128, or set data.over_long to drop, cut_turns or windows (what is lost is counted)."
    )
    assert len(corpus_of(path, seq_length=128, doc_multiple=16)) == 2


def test_over_long_counts_padded_length(tmp_path: Path) -> None:
    """P07: 39 tokens fit 40, but not once they are padded to a multiple of 16."""
    path = write(tmp_path / "a.jsonl", ROW)
    assert len(corpus_of(path, seq_length=40, doc_multiple=8)) == 1
    with pytest.raises(DataError, match=r"39 tokens \(48 when padded to a multiple of 16\) do not fit"):
        corpus_of(path, seq_length=40, doc_multiple=16)


def ledger(**counts: Any) -> Ledger:
    return Ledger(**{name: () if "tuple" in str(kind) else 0 for name, kind in Ledger.__annotations__.items()} | counts)


def test_over_long_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, LONG, ROW)
    corpus = corpus_of(path, seq_length=64, over_long="drop")
    assert corpus.lengths.tolist() == [39, 39] and corpus.name(1).endswith("a.jsonl:3")
    assert corpus.ledgers == {
        Path(path): ledger(
            rows=3, rows_whole=2, samples=2, tokens_kept=78, supervised_kept=10, longest=39,
            rows_dropped=1, tokens_dropped=116, supervised_dropped=9, dropped=(2,),
        )
    }  # fmt: skip
    assert "; dropped 1 samples of 116 tokens (9 supervised): row 2" in corpus.summary()


def test_over_long_cut_after_a_turn(tmp_path: Path) -> None:
    hopeless = {"messages": [{"role": "user", "content": "x" * 99}, *ROW["messages"][1:], *ROW["messages"]]}
    asked = {"messages": [*ROW["messages"], {"role": "user", "content": "x" * 99}]}
    path = write(tmp_path / "a.jsonl", ROW, LONG, hopeless, asked)
    corpus = corpus_of(path, seq_length=64, over_long="cut_turns")
    begun = "<|im_start|>user\nHello, friend!<|im_end|>\n<|im_start|>assistant\nFine<|im_end|>"
    assert texts(corpus) == [begun + "\n", begun, begun]
    assert corpus.num_supervised.tolist() == [5, 5, 5]
    assert corpus.ledgers == {
        Path(path): ledger(
            rows=4, rows_whole=1, samples=3, tokens_kept=39 + 38 + 38, supervised_kept=15, longest=39,
            rows_cut=2, tokens_cut=78 + 108, supervised_cut=4, cut=(2, 4),
            rows_dropped=1, tokens_dropped=163, supervised_dropped=10, dropped=(3,),
        )
    }  # fmt: skip


def test_cutting_keeps_as_many_turns_as_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": ROW["messages"] * 10})  # 39 tokens a turn pair
    for seq_length, tokens in ((38, 38), (76, 38), (77, 77), (350, 350), (388, 350), (389, 389), (390, 390)):
        corpus = corpus_of(path, seq_length=seq_length, doc_multiple=1, over_long="cut_turns")
        assert corpus.lengths.tolist() == [tokens], seq_length


def test_over_long_in_windows(tmp_path: Path) -> None:
    """Room 64: the prompt of 33 tokens and its answer of 5 leave 26, too few for the next turn: 4 tokens and the 74
    between.  Its own window has 60 for what is before the turn: half for the prompt's end, half for the message's."""
    path = write(tmp_path / "a.jsonl", ROW, LONG)
    corpus = corpus_of(path, seq_length=64, over_long="windows")
    assert corpus.lengths.tolist() == [39, 38, 64] and corpus.num_supervised.tolist() == [5, 5, 4]
    assert [corpus.name(i).removeprefix(f"{tmp_path}/") for i in range(3)] == [
        "a.jsonl:1",
        "a.jsonl:2 window 1 of 2",
        "a.jsonl:2 window 2 of 2",
    ]
    prompt = "<|im_start|>user\nHello, friend!<|im_end|>\n<|im_start|>assistant\n"  # 33 tokens
    assert texts(corpus)[1] == prompt + "Fine<|im_end|>"
    assert texts(corpus)[2] == (
        prompt.removeprefix("<|im_start|>us") + "x" * 17 + "<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>"
    )
    assert corpus.ledgers == {
        Path(path): ledger(
            rows=2, rows_whole=1, samples=3, tokens_kept=39 + 38 + 64, supervised_kept=14, longest=64,
            rows_windowed=1, samples_windowed=2, tokens_repeated=30, tokens_cut=116 - 38 - 34, windowed=(2,),
        )
    }  # fmt: skip


def test_no_sample_left(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW)
    with pytest.raises(DataError, match="no sample is left of .*over_long = drop and data.seq_length = 32"):
        corpus_of(path, seq_length=32, over_long="drop")
    both = corpus_of(write(tmp_path / "b.jsonl", LONG), path, seq_length=64, over_long="drop")
    assert both.name(0).endswith("a.jsonl:1") and len(both) == 1


def test_cache_is_used(tmp_path: Path) -> None:
    path, log = write(tmp_path / "a.jsonl", ROW), []
    first = corpus_of(path, log=log)
    moved = Path(path).rename(tmp_path / "moved.jsonl")
    second = corpus_of(str(moved), log=log)
    assert log[0].endswith("s)") and "tokenised in" in log[0]
    assert log[1].endswith("moved.jsonl: 1 samples, 39 tokens (12.8% supervised), longest 39 (cached)")
    assert first.digest == second.digest and second.name(0).endswith("moved.jsonl:1")
    counts = json.loads(next((tmp_path / "cache").iterdir()).joinpath("ledger.json").read_text())["rows"]
    assert counts["samples"] == 1 and counts["tokens_kept"] == 39
    assert json.loads(json.dumps(first.report())) == {"digest": first.digest, "files": {path: counts}}


def test_cache_follows_all_that_samples_depend_on(tmp_path: Path) -> None:
    """P100: content, tokenizer, template, over_long, on_bad_row, seq_length and doc_multiple each make a
    new store."""
    path = tmp_path / "a.jsonl"
    write(path, ROW)
    folder = make_folder(tmp_path / "tokenizer", template("chatml"))
    llama = tmp_path / "llama.jinja"
    llama.write_text(template("llama3"))
    tokenizer = str(folder)
    settings: list[dict[str, Any]] = [
        {}, {"seq_length": 2048}, {"doc_multiple": 16}, {"over_long": "drop"}, {"on_bad_row": "skip"},
        {"tokenizer": tokenizer},
        {"tokenizer": tokenizer, "chat_template": str(llama)},
    ]  # fmt: skip
    for count, overrides in enumerate(settings, start=1):
        for _ in range(2):
            corpus_of(str(path), **overrides)
            assert len(list((tmp_path / "cache").iterdir())) == count, overrides
    template_file = folder / "chat_template.jinja"
    template_file.write_text(template_file.read_text().replace("# Tools", "# Functions"))
    corpus_of(str(path), tokenizer=tokenizer)
    write(path, {"messages": [{"role": "user", "content": "hello, friend!"}, ROW["messages"][1]]})
    corpus_of(str(path))
    assert len(list((tmp_path / "cache").iterdir())) == 9
