"""Tokenizers: the built-in one, those of folders, and the errors for folders and templates that cannot be used."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sft.data.chat.encode_chat import encode_chat, encode_row
from sft.data.chat.tokenizer import FolderTokenizer, load_tokenizer
from sft.data.rows.formats import Chat, PlainText
from sft.data.rows.token_rows import Tokenized
from sft.errors import DataError
from tests.unit.fixtures.chats import assistant, user
from tests.unit.fixtures.folder import ORDINARY, SPECIAL, config, load_folder, make_folder, open_folder, template


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
    tokenizer = open_folder(folder)
    assert tokenizer.end_of_turn == "<|im_end|>"
    assert tokenizer.pad_id == SPECIAL.index("<|endoftext|>") == 0
    habits = tokenizer.habits
    assert (habits.ends, habits.header, habits.lead) == (("<|im_end|>", "<|endoftext|>"), "<|im_start|>assistant\n", "")
    encoded = tokenizer.encode("<|im_start|>x \n y")
    assert encoded.ids[0] == 1
    # Each character belongs to exactly one token; the post-processor in the file would drop spaces.
    assert encoded.starts.tolist() == [0, *encoded.ends[:-1].tolist()]
    assert encoded.ends[-1] == 17
    assert encoded.token_spans([0], [13]) == [(0, 2, True)]
    stand_ins = "\U000f0000" * 10
    as_text = tokenizer.encode_as_text("<|im_end|>", stand_ins, tokenizer.encode(stand_ins).ids)
    assert as_text is not None and len(as_text.ids) > 1 and not tokenizer.is_control[as_text.ids].any()
    assert as_text.ends[-1] == 10 and tokenizer.decode(as_text.ids) == "<|im_end|>"
    # The length limit of 16 tokens in the file has no effect.
    assert tokenizer.encode("<|im_end|>" * 100).ids.tolist() == [2] * 100


def test_without_a_padding_token_the_end_of_sequence_pads(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|im_end|>", "pad_token": None}))
    assert load_tokenizer(config(tokenizer=str(other))).pad_id == SPECIAL.index("<|im_end|>") == 2


ASSISTANT = "<|im_start|>assistant\n"
SENTENCE = "<｜end▁of▁sentence｜>"
CALLS = "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>"
# The tokens that end a last answer and a last call, the tokens that end a turn after which no message may follow,
# control tokens inside turns, the header that asks for an answer, and the text that is inserted before an answer
HABITS = [
    ("chatml", "<|im_end|>", "<|im_end|>", "<|im_end|> <|endoftext|>", "", ASSISTANT, ""),
    ("qwen3", "<|im_end|>", "<|im_end|>", "<|im_end|> <|endoftext|>", "", ASSISTANT, "<think>\n\n</think>\n\n"),
    ("llama31", "<|eot_id|>", "<|eom_id|>", "<|eot_id|> <|endoftext|> <|eom_id|>", "<|python_tag|>",
     "<|start_header_id|>assistant<|end_header_id|>\n\n", ""),
    ("mistral_tools", "</s>", "</s>", "</s> <|endoftext|>", "[TOOL_CALLS]", "", " "),
    ("phi3", "<|end|>", "<|end|>", "<|end|> <|endoftext|>", "", "<|assistant|>\n", ""),
    ("deepseek_r1", SENTENCE, SENTENCE, f"{SENTENCE} <|endoftext|>", "", "<｜Assistant｜><think>\n", ""),
    ("deepseek_v3_text", SENTENCE, SENTENCE, f"{SENTENCE} <|endoftext|>", CALLS, "<｜Assistant｜>", ""),
    # <|end|> ends an answer in the history; it also ends thinking, after which the message continues.
    ("harmony", "<|return|>", "<|call|>", "<|return|> <|call|> <|endoftext|>", "", "<|start|>assistant",
     "<|channel|>final<|message|>"),
    # No token ends the last turn.
    ("glm4_moe", None, None, "<|user|> <|endoftext|> <|observation|>", "", "<|assistant|>", "\n<think></think>\n"),
    ("gemma4", "<turn|>", "<|tool_response>", "<turn|> <|tool_response> <|endoftext|>", "<|tool_call> <tool_call|>",
     "<|turn>model\n", ""),
    ("minimax", "[e~[", "[e~[", "[e~[ <|endoftext|>", "<minimax:tool_call> </minimax:tool_call>",
     "]~b]ai\n<think>\n", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer_end", "call_end", "stops", "inside", "header", "lead"), HABITS)
def test_habits(
    tokenizers: Callable[[str], FolderTokenizer],
    name: str,
    answer_end: str | None,
    call_end: str | None,
    stops: str,
    inside: str,
    header: str,
    lead: str,
) -> None:
    """The text that a template writes around a turn: the tokens that end a turn, the header that asks for one, and
    inserted text."""
    habits = tokenizers(name).habits
    assert dict(habits.last_ends) == {False: answer_end, True: call_end}
    assert set(habits.stops) == set(stops.split()) <= set(habits.ends)
    assert habits.inside == {*inside.split(), *ORDINARY}
    assert (habits.header, habits.lead) == (header, lead)


def test_the_form_that_a_template_takes(tokenizers: Callable[[str], FolderTokenizer]) -> None:
    """Arguments of calls as text or as an object; thinking as a part of the content or under a key."""
    habits = {name: tokenizers(name).habits for name in ("qwen25", "deepseek_v3_text", "ministral", "harmony")}
    assert [name for name in habits if habits[name].calls_as_text] == ["deepseek_v3_text"]
    assert [name for name in habits if habits[name].takes_parts] == ["ministral"]


def test_the_form_of_a_content_beside_calls(tmp_path: Path) -> None:
    """transformers gives a template the content of the row; a template may require no content, null, or an empty
    one."""
    body = (
        "{% if m.tool_calls %}{% if CASE %}{{ raise_exception('no') }}{% endif %}<{{ m.tool_calls[0].function.name }}>"
    )
    body += "{{ m.tool_calls[0].function.arguments }}{% else %}{{ m.content }}{% endif %}<|im_end|>"
    cases = {
        "m.content is defined": {},
        "m.content is not none": {"content": None},
        "m.content is not string": {"content": ""},
    }
    for number, (case, expected) in enumerate(cases.items()):
        jinja = "{% for m in messages %}" + body.replace("CASE", case) + "{% endfor %}"
        assert load_folder(tmp_path / str(number), jinja).habits.empty_content == expected


def test_a_template_that_wants_tools_or_a_system_message_is_learned(tmp_path: Path) -> None:
    """Command R's template for tools loops over `tools`, which a chat may lack."""
    habits = load_folder(tmp_path / "a", template("command_r_tools")).habits
    assert habits.last_ends[False] == "<|END_OF_TURN_TOKEN|>"
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + template("chatml")
    assert load_folder(tmp_path / "b", strict).habits.header == ASSISTANT


def test_an_end_of_generation_that_is_no_control_token_ends_no_turn(tmp_path: Path) -> None:
    """generation_config.json may name any id."""
    tokenizer = load_folder(tmp_path, template("chatml"), ends=["<|im_end|>", "a"])
    assert tokenizer.habits.ends == ("<|im_end|>", "<|endoftext|>")


def test_vocab_size_counts_added_tokens(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(folder)
    size = len(hf)
    hf.add_tokens(["<one>", "<two>"])
    hf.save_pretrained(tmp_path)
    assert load_tokenizer(config(tokenizer=str(tmp_path))).vocab_size == size + 2


def test_it_can_be_sent_to_another_process(folder: Path) -> None:
    tokenizer = open_folder(folder)
    copy = pickle.loads(pickle.dumps(tokenizer))
    text = "<|im_start|>user\n two  words " * 9
    assert (tokenizer.encode(text).ids == copy.encode(text).ids).all()
    assert (tokenizer.encode(text).ends == copy.encode(text).ends).all()
    assert copy.template.render([{"role": "user", "content": "x"}], None).text == "<|im_start|>user\nx<|im_end|>\n"


def test_digest_follows_tokenizer_and_template(folder: Path, tmp_path: Path) -> None:
    """P100: the key of a cache.  A single merge changes it; the weights and sizes of a model do not."""
    copy, file = tmp_path / "copy", tmp_path / "chat.jinja"
    shutil.copytree(folder, copy)

    def digest(**settings: str) -> str:
        return load_tokenizer(config(tokenizer=str(copy), **settings)).digest

    used = open_folder(folder)
    assert used.encode_as_text("<|im_end|>", "x", used.encode("x").ids)  # the call does not change the digest
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
        ({"tokenizer": "org/model"}, "folder org/model does not exist.  data.tokenizer must be `byte`"),
        ({"tokenizer": str(other)}, r"has no tokenizer \(it holds config.json\).  data.tokenizer must be `byte`"),
        ({"tokenizer": str(damaged)}, r"tokenizer.json of \S+ is not a usable tokenizer: EOF"),
        ({"tokenizer": str(folder), "chat_template": "nowhere.jinja"}, "nowhere.jinja cannot be read: .*No such file"),
        ({"chat_template": "chat.jinja"}, "chat.jinja has no effect with data.tokenizer = byte"),
    ):
        with pytest.raises(DataError, match=complaint):
            load_tokenizer(config(**settings))


@pytest.mark.parametrize(
    ("jinja", "complaint"),
    [
        ("{% for m in messages %}", "cannot be read: Unexpected end of template"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "message 2 cannot be located: the template writes nothing"),
        ("{% for m in messages %}{{ m.content }} ### End\n{% endfor %}",
         "message 2 cannot be located: no token ends it.  Tokens that end a turn of this template: <.endoftext.>."),
        ("{{ raise_exception('no') }}", "refused the chat: no"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_is_refused_with_the_first_chat(
    folder: Path, tmp_path: Path, jinja: str, complaint: str
) -> None:
    """Rows of tokens and texts need no template, so a bad template is not refused when it is loaded."""
    file = tmp_path / "chat.jinja"
    file.write_text(jinja)
    tokenizer = load_tokenizer(config(tokenizer=str(folder), chat_template=str(file)))
    with pytest.raises(DataError, match=rf"chat template \S*chat.jinja.*{complaint}"):
        encode_chat(Chat([user("a"), assistant("b"), user("c"), assistant("d")], None), tokenizer)
    text = encode_row(PlainText("one"), tokenizer, config())
    tokens = encode_row(Tokenized(np.array([1, 2]), np.ones(2)), tokenizer, config())
    assert len(text.tokens) > 1 and len(tokens.tokens) == 2
