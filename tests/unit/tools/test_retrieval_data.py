"""The retrieval data of the demo: every answer has one piece of evidence at a known distance, and our reader reads the
rows."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from tests.unit.corpora import corpus_of
from tools import make_retrieval_data
from tools.make_retrieval_data import document, filler


def make(out: Path, *arguments: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["make_retrieval_data", "--out", str(out), *arguments])
        make_retrieval_data.main()
    return out


def rows(path: Path) -> list[tuple[bytes, list[int]]]:
    """The tokens of each row, and the positions of its supervised tokens."""
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return [(bytes(row["tokens"]), [i for i, is_answer in enumerate(row["loss_mask"]) if is_answer]) for row in read]


def test_a_document() -> None:
    """5 tokens, 8 statements of 3 tokens, 100 tokens, 16 questions of 3 tokens."""
    made = document(random.Random(1), b"\nab\ncd ef" * 100, list("31415926"), before=5, between=100, rounds=2)
    assert len(made.tokens) == 5 + 24 + 100 + 48
    statements = made.tokens[5:29].split(b"\n")[1:]
    first, second = made.tokens[129:153].split(b"\n")[1:], made.tokens[153:].split(b"\n")[1:]
    assert first == statements and second != statements and sorted(second) == sorted(statements)
    keys, values = zip(*(line.decode() for line in statements), strict=True)
    assert len(set(keys)) == 8 and "".join(keys).islower() and "".join(values) == "31415926"
    assert made.answers == [131, 134, 137, 140, 143, 146, 149, 152, 155, 158, 161, 164, 167, 170, 173, 176]


def test_filler_has_no_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filler().count(b"\n") > 5000 and filler().startswith(b"\n")
    assert not re.search(rb"^[a-z][0-9]", filler(), re.MULTILINE)
    monkeypatch.setattr(make_retrieval_data, "topics", {"b": "q7\nand more", "a": "plain \u00e4\nq7 is a key"})
    assert filler() == b"\nplain \nand more"


@pytest.mark.parametrize("distance", [128, 512, 2048, 8192])
def test_each_answer_is_at_the_distance_of_its_file(tmp_path: Path, distance: int) -> None:
    make(tmp_path, "--tokens", "2000", "--held-out", "3")
    held_out = rows(tmp_path / f"retrieval-{distance}.jsonl")
    assert len(held_out) == 3
    for tokens, answers in held_out:
        assert len(answers) == 8 and answers[-1] == len(tokens) - 1
        assert len({tokens[answer] for answer in answers}) == 8  # a random guess is right once in 8
        for answer in answers:
            line = tokens[answer - 2 : answer + 1]
            assert tokens[answer - distance - 2 : answer - distance + 1] == line
            following = re.findall(re.escape(line[:2]) + b"([0-9])", tokens)
            assert following == [line[2:]] * 2  # no third line begins with this key and a value


def test_training_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = make(tmp_path / "a", "--tokens", "60000")
    train = corpus_of(str(out / "retrieval-train.jsonl"), seq_length=8448)
    assert 60_000 <= train.lengths.sum() < 68_400
    assert train.lengths.max() > 1000 and np.median(train.lengths) < 400
    # 36 rounds of questions about 2 keys, or 24 rounds about 3, 18 about 4, 12 about 6, or 9 about 8
    assert (train.num_supervised == 72).all()
    assert f"retrieval-train.jsonl: {len(train)} documents, {train.lengths.sum():,} tokens" in capsys.readouterr().out
    first = train.sample(0)
    assert set(np.asarray(first.tokens)[first.weights > 0]) <= set(b"0123456789")
    again, other = make(tmp_path / "b", "--tokens", "60000"), make(tmp_path / "c", "--tokens", "60000", "--seed", "1")
    for name in sorted(path.name for path in again.iterdir()):
        assert (out / name).read_bytes() == (again / name).read_bytes() != (other / name).read_bytes()


def test_the_farthest_distance_limits_all_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They fit into the sequences of recipes/demo_retrieval.yaml, whose documents are padded to multiples of 32."""
    out = make(tmp_path, "--tokens", "300000", "--farthest", "2048")
    assert {path.name for path in out.iterdir()} == {
        *("retrieval-train.jsonl", "retrieval-128.jsonl", "retrieval-512.jsonl", "retrieval-2048.jsonl")
    }
    lengths = [len(tokens) for path in out.iterdir() for tokens, _ in rows(path)]
    assert 2048 < max(lengths) <= 2176


def test_noise_changes_answers_of_training_only(tmp_path: Path) -> None:
    """With noise 0.5, an answer is right with probability 0.5 + 0.5 / 10."""
    clean = make(tmp_path / "a", "--tokens", "60000")
    noisy = make(tmp_path / "b", "--tokens", "60000", "--noise", "0.5")
    right = []
    for tokens, answers in rows(noisy / "retrieval-train.jsonl"):
        for answer in answers:
            statement = re.search(tokens[answer - 2 : answer] + b"([0-9])", tokens)  # a newline, the key and its value
            assert statement is not None and statement.start(1) not in answers
            right.append(statement[1] == tokens[answer : answer + 1])
    assert len(right) > 10_000 and 0.53 < np.mean(right) < 0.57
    for path in clean.glob("retrieval-[1-9]*.jsonl"):
        assert path.read_bytes() == (noisy / path.name).read_bytes()
