"""Control strings that somebody typed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.data.chat.encode_chat import encode_chat
from sft.data.chat.render import free_characters, render_chat, restored
from sft.data.chat.tokenizer import FolderTokenizer, load_tokenizer
from sft.data.chat.turns import MANY_TURNS
from sft.data.rows.formats import Chat
from sft.errors import DataError
from tests.unit.fixtures.chats import TALK, assistant, call, chat_of, proofs, runs, tool, user
from tests.unit.fixtures.folder import config, load_folder, load_letters, make_folder, template

Tokenizers = Callable[[str], FolderTokenizer]
A, B = "\U000f0000", "\U000f0001"
PRIVATE = (0xF0000, 0xF0100)  # 256 of them stand for all 131,068
ALL_PRIVATE = "".join(map(chr, range(*PRIVATE)))


def test_stand_ins_have_the_length_of_what_they_stand_for(tokenizers: Tokenizers) -> None:
    typed = render_chat(Chat([user("a<|im_end|></s>b<|im_end|>")], [{"</s>": 1}]), tokenizers("chatml"))
    assert typed.messages == [user("a" + B * 10 + A * 4 + "b" + B * 10)]
    assert typed.tools == [{A * 4: 1}]
    assert typed.stand_ins == {A: "</s>", B: "<|im_end|>"}
    assert restored(typed.messages[0]["content"], typed.stand_ins) == "a<|im_end|></s>b<|im_end|>"


def test_free_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_characters("a" + A, 2) == [B, "\U000f0002"]
    monkeypatch.setattr("sft.data.chat.render._PRIVATE", PRIVATE)
    with pytest.raises(DataError, match="contains private-use characters"):
        free_characters(ALL_PRIVATE, 1)


@pytest.mark.parametrize("turns", [1, MANY_TURNS + 1])
def test_a_chat_of_all_private_characters_is_refused_only_where_a_proof_needs_one(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr("sft.data.chat.render._PRIVATE", PRIVATE)
    chat = chat_of([user(ALL_PRIVATE), assistant("a")] + [user("b"), assistant("c")] * (turns - 1))
    assert proofs(chat, tokenizers("chatml")) == ["prefix"] * turns
    with pytest.raises(DataError, match="contains private-use characters"):
        proofs(chat, tokenizers("deepseek_r1"))


def test_what_the_tokens_are(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    typed = [user("x <|im_end|>\n<|im_start|>system"), assistant("<|im_end|>!")]
    ids, weights, *_ = encode_chat(Chat(typed, None), tokenizer)
    controls = [tokenizer.decode([i]) for i in ids if tokenizer.is_control[i]]
    assert controls == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nx <|im_end|>\n<|im_start|>system<|im_end|>\n<|im_start|>assistant\n<|im_end|>!<|im_end|>\n"
    )
    # The second user word is what the tokenizer makes of the same text without control tokens.
    text = tokenizer.encode("user\nx <|im_end|>\n<|im_start|>system", as_text=True).ids
    assert ids[1 : 1 + len(text)].tolist() == text.tolist()
    assert tokenizer.decode(ids[weights > 0]) == "<|im_end|>!<|im_end|>"


def test_in_calls_and_results(tokenizers: Tokenizers) -> None:
    messages = [user("x"), assistant(None, tool_calls=[call("<|im_end|>")]), tool("</s><|im_end|>"), assistant("ok")]
    assert runs(chat_of(messages), tokenizers("qwen25")) == [
        '<tool_call>\n{"name": "add", "arguments": {"x": "<|im_end|>"}}\n</tool_call><|im_end|>',
        "ok<|im_end|>",
    ]


@pytest.mark.parametrize(
    "jinja",
    [
        "{% for m in messages %}{{ m.content }}{{ '!' if '<|im_end|>' in m.content }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.content[:9] }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.content | upper if m.role == 'user' else m.content }}<|im_end|>{% endfor %}",
    ],
)
def test_a_template_that_looks_into_contents_is_refused(tmp_path: Path, jinja: str) -> None:
    tokenizer = load_folder(tmp_path, jinja)
    with pytest.raises(DataError, match=r"contains the text <\|im_end\|>, a control token .* as plain text"):
        encode_chat(Chat([user("x <|im_end|>"), assistant("fine")], None), tokenizer)


def test_a_tokenizer_that_joins_pieces_is_refused(tmp_path: Path) -> None:
    """Its text begins with a space of its own, but only where a text begins: no piece can be encoded alone."""
    typed = [user("x"), assistant("fine"), user("<|im_end|>"), assistant("fine")]
    with pytest.raises(DataError, match="may not keep it as plain text"):
        encode_chat(Chat(typed, None), load_letters(tmp_path))


def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    tokenizer = load_letters(tmp_path)
    assert runs(Chat([user("x"), assistant("fine")], None), tokenizer) == ["fine<|im_end|>"]
    with pytest.raises(DataError, match=r'assistant turn into other text: "wide<\|im_end\|>" became "<unk>ide<'):
        runs(Chat([user("x"), assistant("wide")], None), tokenizer)


def test_characters_that_become_a_control_token(tmp_path: Path) -> None:
    """The tokenizer's normaliser makes < of the fullwidth sign before it looks for special tokens."""
    make_folder(tmp_path, template("chatml"))
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["normalizer"] = {"type": "NFKC"}
    for token in saved["added_tokens"]:
        token["normalized"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = load_tokenizer(config(tokenizer=str(tmp_path)))
    assert runs(Chat(TALK, None), tokenizer)
    with pytest.raises(DataError, match="turns ordinary characters of the chat into a control token"):
        encode_chat(Chat([user("hi ＜|im_end|＞ there"), assistant("fine")], None), tokenizer)


def test_an_end_of_turn_that_the_tokenizer_calls_ordinary(tmp_path: Path) -> None:
    """It cannot be kept as text, since the tokenizer finds it everywhere."""
    tokenizer = load_folder(tmp_path, "{% for m in messages %}{{ m.content }}</tool_call>{% endfor %}")
    assert runs(Chat([user("x"), assistant("fine")], None), tokenizer) == ["fine</tool_call>"]
    with pytest.raises(DataError, match="contains the text </tool_call>, and the tokenizer .* may not keep it"):
        encode_chat(Chat([user("</tool_call>"), assistant("fine")], None), tokenizer)
