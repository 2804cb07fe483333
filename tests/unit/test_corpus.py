"""Files to samples: every fault named, every loss counted, every cache either right or rebuilt."""

import json
import shutil
from itertools import count as counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.cache import workers
from sft.data.cache.corpus import Corpus
from sft.data.cache.folders import store_folder
from sft.data.cache.row_report import RowReport
from sft.data.chat.tokenizer import load_tokenizer
from sft.errors import DataError
from tests.unit.corpora import LONG, ROW, corpus_of, write
from tests.unit.fixtures.folder import config, make_folder, template


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
    assert corpus.digest != corpus_of(second, first).digest
    assert corpus.summary().splitlines()[1].endswith("b.jsonl: 1 samples, 39 tokens (12.8% supervised), longest 39")


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


def ledger(**counts: Any) -> RowReport:
    """Every row is a chat."""
    nothing = {name: () if "tuple" in str(kind) else 0 for name, kind in RowReport.__annotations__.items()}
    return RowReport(**nothing | {"chats": counts.get("rows", 0)} | counts)


def test_over_long_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, LONG, ROW)
    corpus = corpus_of(path, seq_length=64, over_long="drop")
    assert corpus.lengths.tolist() == [39, 39] and corpus.name(1).endswith("a.jsonl:3")
    assert corpus.row_reports == {
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
    assert corpus.row_reports == {
        Path(path): ledger(
            rows=4, rows_whole=1, samples=3, tokens_kept=39 + 38 + 38, supervised_kept=15, longest=39,
            rows_cut=2, tokens_cut=78 + 108, supervised_cut=4, cut=(2, 4),
            rows_dropped=1, tokens_dropped=163, supervised_dropped=10, dropped=(3,),
        )
    }  # fmt: skip


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
    assert corpus.row_reports == {
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


def test_cache_follows_all_that_samples_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P100: content, kind, tokenizer, template, releases of libraries and settings each make a new store."""
    path, folder = tmp_path / "a.jsonl", make_folder(tmp_path / "tokenizer", template("chatml"))
    write(path, ROW)
    llama = tmp_path / "llama.jinja"
    llama.write_text(template("llama3"))

    def name(file: Path = path, **overrides: Any) -> str:
        data = config(**overrides)
        return store_folder(tmp_path, file, data, load_tokenizer(data)).name

    settings: list[dict[str, Any]] = [
        {"seq_length": 2048}, {"doc_multiple": 16}, {"over_long": "drop"}, {"on_bad_row": "skip"}, {"supervise": "all"},
        {"tokenizer": str(folder)}, {"tokenizer": str(folder), "chat_template": str(llama)},
    ]  # fmt: skip
    names = [name(), *(name(**overrides) for overrides in settings)]
    assert names[0] == name(num_workers=7)
    names.append(name(Path(shutil.copy(path, tmp_path / "a.json"))))
    (tmp_path / "saved").mkdir()
    names.append(name(Path(shutil.copy(path, tmp_path / "saved")).parent))
    for file in (path, tmp_path / "saved" / "a.jsonl"):
        file.write_text(file.read_text().replace("Fine", "Good"))
    names += [name(), name(tmp_path / "saved")]
    template_file = folder / "chat_template.jinja"
    template_file.write_text(template_file.read_text().replace("# Tools", "# TOOLS"))
    names.append(name(tokenizer=str(folder)))
    monkeypatch.setattr("sft.data.cache.folders.version", lambda library: "99.0")
    names.append(name(tokenizer=str(folder)))
    assert len(set(names)) == len(names) == 14


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of rows, 8 seconds each; blank lines are no rows."""
    monkeypatch.setattr(workers, "ROWS_PER_PART", 64)
    path = write(tmp_path / "a.jsonl", *[ROW] * 50, "", *[ROW] * 50)
    log, seconds = [], counter(0, 8)
    corpus_of(path, log=log, clock=lambda: next(seconds))
    assert log[:2] == [
        f"tokenising {path}: 64 of 100 rows (64%), 2,496 tokens, 8 rows/s, left 0:00:05",
        f"tokenising {path}: 100 of 100 rows (100%), 3,900 tokens, 6.2 rows/s, left 0:00:00",
    ]
