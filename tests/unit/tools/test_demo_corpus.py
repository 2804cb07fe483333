"""The demo corpus is real, long enough and repeatable, and our reader reads it."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.unit.corpora import corpus_of

TOOL = Path(__file__).parents[3] / "tools" / "make_demo_corpus.py"


def make(out: Path, *arguments: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_demo_corpus.py", "--out", str(out), *arguments])
        runpy.run_path(str(TOOL), run_name="__main__")
    return out


def test_demo_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = make(tmp_path / "a", "--samples", "60")
    names = ("train.jsonl", "heldout.jsonl")
    train, held_out = (corpus_of(str(out / name), seq_length=12_288) for name in names)
    assert (len(train), len(held_out)) == (54, 6)
    assert 8192 <= train.lengths.max() <= 12_000 and 8192 <= held_out.lengths.max() <= 12_000
    assert sorted(train.lengths)[27] < 2000  # mostly short ones, so that packing has an effect
    assert (train.num_supervised > 0).all()
    assert f"train.jsonl: 54 chats, {train.lengths.sum():,} tokens" in capsys.readouterr().out
    again = make(tmp_path / "b", "--samples", "60")
    assert all((out / name).read_bytes() == (again / name).read_bytes() for name in names)
    rows = [[json.loads(line) for line in (out / name).read_text().splitlines()] for name in names]
    asked, held_back = ({row["messages"][0]["content"] for row in part} for part in rows)
    assert not asked & held_back


def test_the_smallest_corpus(tmp_path: Path) -> None:
    made = make(tmp_path, "--samples", "80", "--max-tokens", "6000")  # four of the chats are long
    assert corpus_of(str(made / "train.jsonl"), seq_length=6016).lengths.max() <= 6000


def test_long_documents(tmp_path: Path) -> None:
    made = make(tmp_path, "--samples", "40", "--long", "70000", "--seed", "1")
    train = corpus_of(str(made / "train.jsonl"), seq_length=70_016)
    assert 65_536 <= train.lengths.max() <= 70_000
    longest = int(train.lengths.argmax())
    supervised = train.sample(longest).weights
    assert supervised.sum() < 1000 and supervised[-800:].any() and not supervised[:60_000].any()
