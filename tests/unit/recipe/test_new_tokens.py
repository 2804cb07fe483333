"""Tokens that a recipe adds: ids are those of transformers, rows know their pieces, wrong tokens are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from sft.cli import main
from sft.data.chat.tokenizer import load_tokenizer
from sft.data.tokenizer.new_tokens import write_new_tokens
from sft.recipe.load import parse_recipe
from tests.ranks import mtp_models
from tests.unit.fixtures import hf
from tests.unit.fixtures.folder import make_folder
from tests.unit.fixtures.model_folder import Tokens, write_folder

RECIPE = """
run: {dir: runs/a, device: cpu}
model: {hf: model, init_from: random}
optim: {lr: 1e-5}
data: {train: a.jsonl, seq_length: 64, num_workers: 1}
train: {num_steps: 1, global_batch_size: 1}
"""
ADD = ["data.add_tokens=[<mol>, <b>]", "data.add_special_tokens=[<|call|>]"]


@pytest.fixture(autouse=True)
def size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of ids of the tokenizer of `model`, which has as many rows."""
    monkeypatch.chdir(tmp_path)
    make_folder(Path("model"), "{{ messages }}")
    num_ids = len(AutoTokenizer.from_pretrained("model"))
    hf.config("llama", vocab_size=num_ids).save_pretrained("model")
    Path("a.yaml").write_text(RECIPE)
    Path("a.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}) + "\n")
    return num_ids


def loaded(*overrides: str) -> Any:
    return parse_recipe(RECIPE, "a.yaml", overrides).config


def test_ids_and_pieces_are_those_of_transformers(size: int) -> None:
    config = loaded(*ADD, "lora={rank: 2, train_embeddings: added, train_head: added}")
    theirs = AutoTokenizer.from_pretrained("model")
    pieces = {token: theirs(token, add_special_tokens=False).input_ids for token in ("<mol>", "<b>", "<|call|>")}
    theirs.add_tokens(["<mol>", "<b>"])
    theirs.add_tokens(["<|call|>"], special_tokens=True)
    ours = load_tokenizer(config.data, "model", Path("model"))
    assert ours.files.new_ids == {"<mol>": size, "<b>": size + 1, "<|call|>": size + 2}
    assert {token: theirs.convert_tokens_to_ids(token) for token in pieces} == ours.files.new_ids
    text = "a <mol>x<b> <mol>"
    assert ours.encode(text).ids.tolist() == theirs(text, add_special_tokens=False).input_ids
    assert config.model.vocab_size == size + 3
    rows = config.model.pretrained.new_rows
    assert {row.token: [*row.pieces] for row in rows} == pieces
    assert [row.token_id for row in rows] == config.lora.train_embeddings == [size, size + 1, size + 2]


def test_tokenizer_files_of_exports_have_the_tokens(size: int) -> None:
    write_new_tokens(Path("model"), {"<mol>": size, "<|call|>": size + 1}, ("<|call|>",))
    theirs = AutoTokenizer.from_pretrained("model")
    assert len(theirs) == size + 2
    assert theirs("<mol><|call|>", add_special_tokens=False).input_ids == [size, size + 1]
    assert theirs.decode([size, size + 1], skip_special_tokens=True) == "<mol>"
    before = Path("model/tokenizer.json").read_bytes()
    write_new_tokens(Path("model"), {"<mol>": size}, ())
    assert Path("model/tokenizer.json").read_bytes() == before


LORA = "lora={rank: 2, targets: [q_proj]}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['data.add_tokens=[""]'], "names an empty token; remove it"),
        (["data.add_tokens=[<a>, <a>]"], "names '<a>' more than once in add_tokens and add_special_tokens"),
        ([*ADD, "data.add_special_tokens=[<b>]"], "names '<b>' more than once"),
        (
            ["model.added_rows=random"],
            'model.added_rows = "random" (command line: model.added_rows=random) has no effect',
        ),
        (["data.add_tokens=[<|im_end|>]"], "names '<|im_end|>', which the tokenizer of model has already (id "),
        (["data.add_tokens=[e]"], "names 'e', which the tokenizer of model has already (id "),
        ([*ADD, "data.tokenizer=byte"], "data.add_tokens needs the tokenizer of a folder, and data.tokenizer is byte"),
        ([*ADD, LORA], "lora.train_embeddings = false (default) leaves the rows of data.add_tokens untrained"),
        ([*ADD, LORA, "lora.train_embeddings=added"], "leaves the rows of data.add_tokens untrained"),
        ([LORA, "lora.train_embeddings=added"], "is added, but no tokens are added; name them in data.add_tokens"),
        ([*ADD, LORA, "lora.train_embeddings=[3]", "lora.train_head=added"], "lists ids, but not"),
        ([LORA, "lora.train_embeddings=[99999]"], "names the id 99,999, but the model has"),
        ([LORA, "lora.train_embeddings=[3, 3]"], "names an id more than once"),
        ([LORA, "lora.train_embeddings=[3]", "parallel.shard=weights"], "must be optimizer to train rows alone"),
        ([*ADD, 'train.freeze=["embed_tokens"]'], "train.freeze freezes embedding.word_embeddings.weight, so the rows"),
    ],
)
def test_wrong_tokens_are_refused_in_one_paragraph(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "a.yaml", *overrides]) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told, told


def test_a_block_keeps_rows_that_differ_from_those_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    mtp_models.save(Path("mtp"), "glm4_moe", vocab_size=256)
    write_folder(Path("mtp"), Tokens(special=()), None)
    keys = ["model.hf=mtp", "model.init_from=null", "data.add_tokens=[<mol>]"]
    assert main(["check", "a.yaml", *keys]) == 0
    assert "1 new row ('<mol>'), the mean of the pieces that its token had before\n" in capsys.readouterr().out
    hf.rewrite(Path("mtp"), **{"model/layers/2/embed_tokens/weight": torch.zeros(256, hf.WIDTH)})
    assert main(["check", "a.yaml", *keys]) == 0
    block = "model.layers.2.embed_tokens.weight"
    assert f"; {block}, passed through, keep 256 rows, so a server" in capsys.readouterr().out


def test_a_tokenizer_of_other_files_cannot_get_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    backend = json.loads(Path("model/tokenizer.json").read_text())["model"]
    Path("model/tokenizer.json").unlink()
    Path("model/vocab.json").write_text(json.dumps(backend["vocab"]))
    Path("model/merges.txt").write_text("".join(" ".join(pair) + "\n" for pair in backend["merges"]))
    Path("model/tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert main(["check", "a.yaml", *ADD]) == 2
    assert "data.add_tokens needs tokenizer.json, which model does not have" in capsys.readouterr().err
