"""Tokenizers: the built-in one, a folder, and what is said of folders and templates that cannot be used."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from sft.data.chat.template import TurnDelimiters
from sft.data.chat.tokenizer import FolderTokenizer, load_tokenizer
from sft.errors import DataError
from tests.unit.fixtures.folder import SPECIAL, config, load_folder, make_folder, template


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tokenizer"), template("chatml"))


def test_byte_tokenizer() -> None:
    tokenizer = load_tokenizer(config())
    assert tokenizer.vocab_size == 259
    assert tokenizer.pad_id == 258
    assert tokenizer.end_of_turn == "<|im_end|>"
    assert tokenizer.decode([104, 195, 169, 257]) == "hé<|im_end|>"
    assert tokenizer.decode(np.array([0xC3, 10], dtype=np.int32)) == "\ufffd\n"


def test_folder(folder: Path) -> None:
    tokenizer = load_tokenizer(config(tokenizer=str(folder)))
    assert isinstance(tokenizer, FolderTokenizer)
    assert tokenizer.end_of_turn == "<|im_end|>"
    assert tokenizer.pad_id == SPECIAL.index("<|endoftext|>") == 0
    assert not tokenizer.template.has_markers
    assert tokenizer.delimiters == TurnDelimiters(ends=("<|im_end|>",), header="<|im_start|>assistant\n", lead="")
    encoded = tokenizer.encode("<|im_start|>x \n y")
    assert encoded.ids[0] == 1
    # Each character belongs to exactly one token: the saved post-processor would drop the spaces.
    assert encoded.starts.tolist() == [0, *encoded.ends[:-1].tolist()]
    assert encoded.ends[-1] == 17
    assert encoded.token_span(0, 13) == (0, 2)
    as_text = tokenizer.encode("<|im_end|>", as_text=True)
    assert len(as_text.ids) > 1 and not tokenizer.is_control[as_text.ids].any()
    assert as_text.ends[-1] == 10 and tokenizer.decode(as_text.ids) == "<|im_end|>"
    # The saved length limit of 16 tokens does not cut.
    assert tokenizer.encode("<|im_end|>" * 100).ids.tolist() == [2] * 100


def test_without_a_padding_token_the_end_of_sequence_pads(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|im_end|>", "pad_token": None}))
    assert load_tokenizer(config(tokenizer=str(other))).pad_id == SPECIAL.index("<|im_end|>") == 2


@pytest.mark.parametrize(
    ("name", "ends", "header", "lead"),
    [
        ("llama31", ("<|eot_id|>", "<|eom_id|>"), "<|start_header_id|>assistant<|end_header_id|>\n\n", ""),
        ("mistral_tools", ("</s>",), "", " "),
        ("phi3", ("<|end|>",), "<|assistant|>\n", ""),  # its <|endoftext|> ends the chat, not the turn
        ("qwen3", ("<|im_end|>",), "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"),
        ("deepseek_r1", ("<｜end▁of▁sentence｜>",), "<｜Assistant｜><think>\n", ""),
    ],
)
def test_frames(tmp_path: Path, name: str, ends: tuple[str, ...], header: str, lead: str) -> None:
    """What a template writes around a turn: the tokens that end one, what asks for one, what it puts before one."""
    assert load_folder(tmp_path, template(name)).delimiters == TurnDelimiters(ends, header, lead)


def test_a_turn_without_an_end_of_its_own_is_refused(tmp_path: Path) -> None:
    """GLM-4: a turn ends where the next begins, and the last one does not end."""
    with pytest.raises(DataError, match="ends an assistant's turn with nothing, so the model would not learn to stop"):
        load_folder(tmp_path, template("glm4"))


def test_vocab_size_counts_added_tokens(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(folder)
    size = len(hf)
    hf.add_tokens(["<one>", "<two>"])
    hf.save_pretrained(tmp_path)
    assert load_tokenizer(config(tokenizer=str(tmp_path))).vocab_size == size + 2


def test_it_can_be_sent_to_another_process(folder: Path) -> None:
    tokenizer = load_tokenizer(config(tokenizer=str(folder)))
    assert isinstance(tokenizer, FolderTokenizer)
    copy = pickle.loads(pickle.dumps(tokenizer))
    text = "<|im_start|>user\n two  words " * 9
    assert (tokenizer.encode(text).ids == copy.encode(text).ids).all()
    assert (tokenizer.encode(text).ends == copy.encode(text).ends).all()
    assert copy.template.render([{"role": "user", "content": "x"}], None) == "<|im_start|>user\nx<|im_end|>\n"


def test_digest_follows_tokenizer_and_template(folder: Path, tmp_path: Path) -> None:
    """P100: what a cache is keyed by.  One merge is enough; the weights and the sizes of a model do not count."""
    copy, file = tmp_path / "copy", tmp_path / "chat.jinja"
    shutil.copytree(folder, copy)

    def digest(**settings: str) -> str:
        return load_tokenizer(config(tokenizer=str(copy), **settings)).digest

    used = load_tokenizer(config(tokenizer=str(folder)))
    assert isinstance(used, FolderTokenizer)
    used.encode("<|im_end|>", as_text=True)  # leaves no trace in the digest
    original = used.digest
    for name in ("model.safetensors", "generation_config.json", "model.safetensors.index.json"):
        (copy / name).write_bytes(b"{}")
    assert digest() == original
    (copy / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 2}')
    assert digest() == original  # transformers would choose another class, which normalises texts
    (copy / "config.json").unlink()
    file.write_text(template("chatml"))
    assert digest(chat_template=str(file)) == original
    file.write_text(template("chatml").replace("# Tools", "# TOOLS"))
    other_template = digest(chat_template=str(file))
    content = json.loads((copy / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (copy / "tokenizer.json").write_text(json.dumps(content))
    assert len({original, other_template, digest()}) == 3


def test_folders_that_are_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    other, damaged = tmp_path / "other", tmp_path / "damaged"
    other.mkdir()
    shutil.copytree(folder, damaged)
    for path in (other / "config.json", damaged / "tokenizer.json"):
        path.write_text("{")
    for settings, complaint in (
        ({"tokenizer": "org/model"}, "folder org/model does not exist.  data.tokenizer is byte"),
        ({"tokenizer": str(other)}, r"has no tokenizer \(it holds config.json\).  data.tokenizer is byte"),
        ({"tokenizer": str(damaged)}, r"tokenizer.json of \S+ is not a usable tokenizer: EOF"),
        ({"tokenizer": str(folder), "chat_template": "nowhere.jinja"}, "nowhere.jinja cannot be read: .*No such file"),
        ({"chat_template": "chat.jinja"}, "chat.jinja has no effect with data.tokenizer = byte"),
    ):
        with pytest.raises(DataError, match=complaint):
            load_tokenizer(config(**settings))


@pytest.mark.parametrize(
    ("jinja", "complaint"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out the assistant's text"),
        ("{% for m in messages %}{{ m.content }} ### End\n{% endfor %}", "with '### End', which is not"),
        ("{{ raise_exception('no') }}", "refused the chat: no"),
    ],
)  # fmt: skip
def test_templates_that_cannot_be_used(folder: Path, tmp_path: Path, jinja: str, complaint: str) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(jinja)
    with pytest.raises(DataError, match=rf"chat template \S*chat.jinja .*{complaint}"):
        load_tokenizer(config(tokenizer=str(folder), chat_template=str(file)))
