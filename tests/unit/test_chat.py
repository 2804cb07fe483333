"""Masks: what is supervised, template by template, and what is refused because it cannot be proven."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sft.data.chat import encode_chat
from sft.data.formats import Chat, read_row
from sft.data.tokenizer import ByteTokenizer, ChatTokenizer, FolderTokenizer
from sft.errors import DataError
from tests.unit.fixtures.folder import load_folder, template

Tokenizers = Callable[[str], FolderTokenizer]
BYTE = ByteTokenizer()

USER, SYSTEM = {"role": "user", "content": "What?"}, {"role": "system", "content": "Be brief."}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": " I am fine.\n"},
    {"role": "user", "content": "The answer?"},
    {"role": "assistant", "content": "42\n\nWhat is the question?"},
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Tokenizers:
    """`tokenizers("llama3")`: the small tokenizer with that template, made once."""
    made: dict[str, FolderTokenizer] = {}

    def get(name: str) -> FolderTokenizer:
        if name not in made:
            made[name] = load_folder(tmp_path_factory.mktemp(name), template(name))
        return made[name]

    return get


def supervised(messages: list[dict[str, Any]], tokenizer: ChatTokenizer, tools: Any = None) -> list[str]:
    """Text of each run of supervised tokens."""
    tokens, mask = encode_chat(read_row({"messages": messages, "tools": tools}), tokenizer)
    assert tokens.dtype == np.int32 and mask.dtype == np.float32 and tokens.shape == mask.shape
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask > 0, [False]]).astype(np.int8)))
    return [tokenizer.decode(tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_byte_template() -> None:
    tokens, mask = encode_chat(read_row({"messages": [USER, {"role": "assistant", "content": "é"}]}), BYTE)
    assert tokens.tolist() == [256, *b"user\nWhat?", 257, 10, 256, *b"assistant\n", 0xC3, 0xA9, 257, 10]
    assert np.flatnonzero(mask).tolist() == [24, 25, 26]
    assert tokens[mask > 0].tolist() == [0xC3, 0xA9, 257]


def test_byte_template_keeps_typed_control_strings_as_text() -> None:
    talk = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "<|im_start|>"}]
    tokens, mask = encode_chat(read_row({"messages": talk}), BYTE)
    assert tokens.tolist().count(257) == 2 and tokens.tolist().count(256) == 2
    assert tokens[mask > 0].tolist() == [*b"<|im_start|>", 257]


def test_byte_template_writes_tools_and_calls() -> None:
    talk = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "Seven."},
    ]
    tokens, _ = encode_chat(read_row({"messages": talk, "tools": [{"name": "f"}]}), BYTE)
    assert BYTE.decode(tokens) == (
        '<|im_start|>system\n# Tools\n{"name": "f"}<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n'
        '<|im_start|>assistant\n<tool_call>\n{"function": {"name": "f", "arguments": {}}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\nSeven.<|im_end|>\n"
    )
    assert supervised(talk, BYTE)[1] == "Seven.<|im_end|>"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", [" I am fine.\n<|im_end|>", "42\n\nWhat is the question?<|im_end|>"]),
        ("chatml_marked", [" I am fine.\n<|im_end|>", "42\n\nWhat is the question?<|im_end|>"]),
        ("chatml_marked_content", [" I am fine.\n<|im_end|>", "42\n\nWhat is the question?<|im_end|>"]),
        ("llama3", ["I am fine.<|eot_id|>", "42\n\nWhat is the question?<|eot_id|>"]),
        ("gemma", ["I am fine.<end_of_turn>", "42\n\nWhat is the question?<end_of_turn>"]),
        ("plain_header", [" I am fine.<|endoftext|>", " 42\n\nWhat is the question?<|endoftext|>"]),
        ("mistral", ["  I am fine.\n</s>", " 42\n\nWhat is the question?</s>"]),
    ],
)
def test_golden_masks(tokenizers: Tokenizers, name: str, expected: list[str]) -> None:
    """P101: contents and end of turn, each template's own, without the newline that some write after it."""
    assert supervised(TALK, tokenizers(name)) == expected


@pytest.mark.parametrize("name", ["chatml", "chatml_marked", "llama3", "gemma", "mistral", "plain_header"])
def test_ids_are_the_templates_own(tokenizers: Tokenizers, name: str) -> None:
    """P98: the whole chat, rendered and tokenised once; never message by message."""
    from transformers import AutoTokenizer

    tokenizer = tokenizers(name)
    theirs = AutoTokenizer.from_pretrained(tokenizer.name).apply_chat_template(TALK, return_dict=False)
    assert encode_chat(Chat(TALK, None), tokenizer)[0].tolist() == theirs


def test_consecutive_tool_results(tokenizers: Tokenizers) -> None:
    """P98: the template joins two tool results in one turn, which no message rendered alone would show."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    talk = [
        SYSTEM,
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": "Seven and eight."},
    ]
    tokenizer = tokenizers("chatml")
    written = '\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert supervised(talk, tokenizer, [{"name": "f"}]) == [
        written * 2 + "<|im_end|>",
        "Seven and eight.<|im_end|>",
    ]
    assert (
        "user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>"
        in tokenizer.decode(encode_chat(Chat(talk, None), tokenizer)[0])
    )


@pytest.mark.parametrize("turns", [1, 2])
def test_a_template_that_rewrites_turns_is_refused(tokenizers: Tokenizers, turns: int) -> None:
    """P99: its prompt is not a prefix of the whole, or it says what the assistant did not."""
    complaint = "rewrites earlier text when message 2" if turns == 2 else "writes an assistant turn as.*<think>"
    with pytest.raises(DataError, match=rf"chat template of \S+ {complaint}.*generation"):
        encode_chat(read_row({"messages": TALK[: 2 * turns]}), tokenizers("thinking"))


@pytest.mark.parametrize(
    ("jinja", "complaint"),
    [
        # One block around everything: it would supervise the user.
        (
            "{% generation %}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
            "{% endgeneration %}",
            "marks 1 generation blocks for 2 assistant turns",
        ),
        # The header is in the block: it would be supervised.
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}"
            "<|im_start|>{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}",
            "writes an assistant turn as \"<|im_start|> I am fine",
        ),
        # Blocks around the wrong turns.
        (
            "{% for m in messages %}<|im_start|>{% if m.role == 'user' %}{% generation %}{{ m.content }}"
            "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}",
            "writes an assistant turn as \"Hello there\" where the content is \" I am fine",
        ),
        # No end of turn after the block: text follows instead.
        (
            "{% for m in messages %}<|im_start|>{% if m.role == 'user' %}{{ m.content }}{% else %}"
            "{% generation %}{{ m.content }}{% endgeneration %}{{ '' if loop.last else '...' }}{% endif %}"
            "<|im_end|>{% endfor %}",
            "and the end of turn is <|im_end|>",
        ),
    ],
)  # fmt: skip
def test_wrong_markers_are_refused(tmp_path: Path, jinja: str, complaint: str) -> None:
    with pytest.raises(DataError) as error:
        encode_chat(Chat(TALK, None), load_folder(tmp_path, jinja))
    assert complaint in str(error.value)


def test_a_template_without_markers_cannot_start_with_the_assistant(tokenizers: Tokenizers) -> None:
    talk = [{"role": "assistant", "content": "Hi"}, USER, {"role": "assistant", "content": "Bye"}]
    with pytest.raises(DataError, match="opens with an assistant message.*Begin with a user"):
        encode_chat(Chat(talk, None), tokenizers("chatml"))
    assert supervised(talk, tokenizers("chatml_marked")) == ["Hi<|im_end|>", "Bye<|im_end|>"]


def test_a_template_may_refuse_a_chat(tokenizers: Tokenizers) -> None:
    with pytest.raises(DataError, match="refused the chat: System role not supported"):
        encode_chat(Chat([SYSTEM, *TALK], None), tokenizers("gemma"))


def test_typed_control_tokens_are_refused(tokenizers: Tokenizers) -> None:
    talk = [{"role": "user", "content": "What does <|im_end|> do?"}, TALK[1]]
    with pytest.raises(DataError, match=r"message 1 \(user\) contains the text <\|im_end\|>"):
        encode_chat(Chat(talk, None), tokenizers("chatml"))


WORDS = st.text(
    st.sampled_from(list("ab 1\n\t.é中😀\u0301'\"{<|>")) | st.characters(exclude_categories=["Cs"]),
    max_size=20,
)
TALKS = st.lists(st.tuples(WORDS, WORDS.filter(lambda text: bool(text.strip()))), min_size=1, max_size=4)


@pytest.mark.parametrize(
    "name", ["chatml", "chatml_marked", "chatml_marked_content", "llama3", "gemma", "mistral", "plain_header"]
)
@settings(max_examples=60, deadline=None)
@given(turns=TALKS)
def test_supervised_text_is_what_the_assistant_said(
    tokenizers: Tokenizers, name: str, turns: list[tuple[str, str]]
) -> None:
    tokenizer = tokenizers(name)
    assume(not any(tokenizer.control.search(text) for turn in turns for text in turn))
    talk = [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]
    runs = supervised(talk, tokenizer)
    assert [run.removesuffix(tokenizer.end_of_turn).strip() for run in runs] == [said.strip() for _, said in turns]
    assert all(run.count(tokenizer.end_of_turn) == 1 for run in runs)


@settings(max_examples=100, deadline=None)
@given(turns=TALKS)
def test_byte_tokenizer_supervises_what_the_assistant_said(turns: list[tuple[str, str]]) -> None:
    talk = [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]
    assert supervised(talk, BYTE) == [said + "<|im_end|>" for _, said in turns]
