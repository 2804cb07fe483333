"""The demo corpus: real, long enough, repeatable, and readable by our own reader."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from sft.console import QUIET
from sft.data.cache.corpus import Corpus
from sft.data.cache.prepare import prepare
from sft.data.chat.tokenizer import load_tokenizer
from tests.unit.fixtures.folder import config

TOOL = Path(__file__).parents[2] / "tools" / "make_demo_corpus.py"


def make(out: Path, *arguments: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_demo_corpus.py", "--out", str(out), *arguments])
        runpy.run_path(str(TOOL), run_name="__main__")
    return out


def corpus_of(path: Path, seq_length: int) -> Corpus:
    data = config(seq_length=seq_length)
    return prepare([str(path)], data, load_tokenizer(data), path.parent / "cache", QUIET)


def test_demo_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = make(tmp_path / "a", "--samples", "60")
    train, held_out = (corpus_of(out / name, 12_288) for name in ("train.jsonl", "heldout.jsonl"))
    assert (len(train), len(held_out)) == (54, 6)
    assert 8192 <= train.lengths.max() <= 12_000 and 8192 <= held_out.lengths.max() <= 12_000
    assert sorted(train.lengths)[27] < 2000  # mostly short ones, so that packing matters
    assert (train.num_supervised > 0).all()
    assert f"train.jsonl: 54 chats, {train.lengths.sum():,} tokens" in capsys.readouterr().out
    again = make(tmp_path / "b", "--samples", "60")
    assert all((out / name).read_bytes() == (again / name).read_bytes() for name in ("train.jsonl", "heldout.jsonl"))
    questions = [
        {json.loads(line)["messages"][0]["content"] for line in (out / name).read_text().splitlines()}
        for name in ("train.jsonl", "heldout.jsonl")
    ]
    assert not questions[0] & questions[1]


def test_long_documents(tmp_path: Path) -> None:
    train = corpus_of(make(tmp_path, "--samples", "40", "--long", "70000", "--seed", "1") / "train.jsonl", 70_016)
    assert 65_536 <= train.lengths.max() <= 70_000
    longest = int(train.lengths.argmax())
    supervised = train.sample(longest).weights
    assert supervised.sum() < 1000 and supervised[-800:].any() and not supervised[:60_000].any()


def test_too_small_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make(tmp_path, "--max-tokens", "100")
    assert "--max-tokens and --long at least 2000" in capsys.readouterr().err
