"""A tokenizer may have more ids than the embedding has rows: what counts is which ids the data have."""

import json
from pathlib import Path

import pytest

from sft.cli import main
from sft.config import Config
from sft.console import QUIET
from sft.data.cache.corpus import Corpus
from sft.data.cache.prepare import prepare
from sft.data.cache.store import _json_digest
from sft.data.cache.vocabulary import check_ids
from sft.data.chat.tokenizer import ByteTokenizer
from sft.errors import DataError
from tests.builders import layout_config
from tests.unit.fixtures.folder import config
from tools.make_tiny_model import make


def _row(*tokens: int) -> str:
    return json.dumps({"tokens": tokens, "loss_mask": [1] * len(tokens)}) + "\n"


def corpus(folder: Path) -> Corpus:
    """Two files: 1 2 3 and 4 5, then 6 258."""
    (folder / "a.jsonl").write_text(_row(1, 2, 3) + _row(4, 5))
    (folder / "b.jsonl").write_text(_row(6, 258))
    files = [str(folder / name) for name in ("a.jsonl", "b.jsonl")]
    data = config(train=files)
    return prepare(data.train_files, data, ByteTokenizer(), folder / "cache", QUIET)


def test_the_first_token_beyond(tmp_path: Path) -> None:
    found = corpus(tmp_path)
    assert [store.largest_id for store in found._stores] == [5, 258]
    assert found.first_beyond(259) is None
    assert found.first_beyond(258) == found.first_beyond(7) == (2, 1)  # sample 2, the token after 6
    assert found.first_beyond(5) == (1, 1)
    assert found.first_beyond(1) == (0, 0)


def test_stores_of_older_releases_are_read(tmp_path: Path) -> None:
    corpus(tmp_path)
    for path in tmp_path.glob("cache/*/ledger.json"):
        content = json.loads(path.read_text())
        del content["digest"], content["largest_id"]
        path.write_text(json.dumps({**content, "digest": _json_digest(content)}))
    found = corpus(tmp_path)
    assert [store.largest_id for store in found._stores] == [None, None]
    assert found.first_beyond(259) is None
    assert found.first_beyond(258) == (2, 1)


def recipe(**model: object) -> Config:
    return layout_config(model=model)


def test_data_within_the_embedding_are_accepted(tmp_path: Path) -> None:
    check_ids(recipe(vocab_size=259), corpus(tmp_path), ByteTokenizer())
    check_ids(recipe(vocab_size=None), corpus(tmp_path), ByteTokenizer())


def test_data_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        check_ids(recipe(vocab_size=258), corpus(tmp_path), ByteTokenizer())
    assert str(refusal.value) == (
        f"{tmp_path}/b.jsonl:1: token 2 is <|pad|> (id 258), but the embedding has only 258 rows (model.vocab_size).  "
        "Set model.vocab_size to at least 259."
    )


def test_tokens_are_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model has 259 rows, and 260 after the program of docs/start/data.md."""
    page = (Path(__file__).resolve().parents[2] / "docs/start/data.md").read_text()
    program = page.split("### Add tokens")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    make(Path("model"))
    Path("a.yaml").write_text(
        "run: {dir: runs/a, device: cpu}\nmodel: {hf: model}\noptim: {lr: 1e-5}\n"
        "data: {train: a.jsonl, seq_length: 64, num_workers: 1}\ntrain: {num_steps: 1, global_batch_size: 1}\n"
    )
    Path("a.jsonl").write_text('{"input_ids": [5, 6, 259, 7], "loss_mask": [0, 1, 1, 1]}\n')
    assert main(["check", "a.yaml"]) == 2
    exec(compile(program, "data.md", "exec"), {})
    capsys.readouterr()
    assert main(["check", "a.yaml", "model.hf=enlarged"]) == 0
    assert "with a vocabulary of 260\n" in capsys.readouterr().out
