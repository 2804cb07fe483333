"""A tokenizer may have more ids than the embedding has rows: only ids that occur in the data must have a row."""

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
    """Two files: the first with samples 1 2 3 and 4 5, the second with 6 258."""
    (folder / "a.jsonl").write_text(_row(1, 2, 3) + _row(4, 5))
    (folder / "b.jsonl").write_text(_row(6, 258))
    files = [str(folder / name) for name in ("a.jsonl", "b.jsonl")]
    data = config(train=files)
    return prepare(data.train_files, data, ByteTokenizer(), folder / "cache", QUIET)


def test_the_first_token_beyond(tmp_path: Path) -> None:
    found = corpus(tmp_path)
    assert [store.largest_id for store in found._stores] == [5, 258]
    assert found.first_beyond(259) is None
    assert found.first_beyond(258) == found.first_beyond(7) == (2, 1)  # sample 2, and the token after 6
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


# A model of 250 rows with a tokenizer of 259 ids: the rows come from the config.json of a folder, or from the recipe.
FOLDER = "{hf: model, init_from: random}"
SIZES = (
    "{num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 250, init_from: random}"
)
RECIPE = """\
run: {{dir: runs/a, device: cpu}}
model: {model}
optim: {{lr: 1e-5}}
data: {{train: a.jsonl, eval: a.jsonl, seq_length: 64, num_workers: 1}}
train: {{num_steps: 1, global_batch_size: 1}}
"""
NO_ROW = "(id 258), but the embedding has only 250 rows (model.vocab_size).  "
ENLARGE = 'Give every token a row: data.add_tokens=["<|im_end|>"]; or remove from the row what gives this token'


@pytest.fixture
def model_of_250_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("model"))
    sizes = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**sizes, "vocab_size": 250}))


@pytest.mark.usefixtures("model_of_250_rows")
@pytest.mark.parametrize(
    "model, message",
    [
        (FOLDER, f"token 3 is <|im_end|> {NO_ROW}{ENLARGE}.\n"),
        (SIZES, f"token 3 is <|pad|> {NO_ROW}Set model.vocab_size to at least 259.\n"),
    ],
)
def test_each_command_refuses_an_id_without_a_row(model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with random weights, and if the data are already prepared."""
    Path("a.yaml").write_text(RECIPE.format(model=model))
    Path("a.jsonl").write_text(_row(5, 249, 258, 7))
    for command in (["data", "prepare"], ["check"], ["data", "plan"], ["eval"]):
        assert main([*command, "a.yaml"]) == 2, command
        assert f"DataError: a.jsonl:1: {message}" in capsys.readouterr().err, command
    Path("a.jsonl").write_text(_row(5, 249))
    assert main(["check", "a.yaml"]) == 0
    said = capsys.readouterr().out
    note = "the tokenizer has 259 ids, and the embedding 250 rows (model.vocab_size): ids 250 to 258 have no row"
    assert "with a vocabulary of 250\n" in said and note in said


@pytest.mark.usefixtures("model_of_250_rows")
def test_no_key_changes_the_rows_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Also with random weights, because the exported folder has this config.json."""
    Path("a.yaml").write_text(RECIPE.format(model=FOLDER))
    Path("a.jsonl").write_text(_row(5, 249))
    assert main(["check", "a.yaml", "model.vocab_size=259"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: model.vocab_size = 259 (command line: model.vocab_size=259), but model/config.json, vocab_size "
        "says 250.  Remove model.vocab_size.  data.add_tokens gives the model rows for more tokens.\n"
    )


@pytest.mark.usefixtures("model_of_250_rows")
def test_the_key_that_the_refusal_names_gives_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """All ids of the tokenizer get rows, also those that the key does not name."""
    Path("a.yaml").write_text(RECIPE.format(model=FOLDER))
    Path("a.jsonl").write_text(_row(5, 249, 258, 7))
    assert main(["check", "a.yaml", 'data.add_tokens=["<|im_end|>"]']) == 0
    assert "with a vocabulary of 259\n" in capsys.readouterr().out
