"""Chats become tokens and weights: ids are those of the template, and only text of the assistant has weights."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sft.data.chat.encode_chat import encode_chat
from sft.data.chat.omitted import find_omitted
from sft.data.chat.tokenizer import ByteTokenizer, FolderTokenizer
from sft.data.rows.formats import Chat
from sft.errors import DataError
from tests.unit.fixtures.chats import (
    CALLING_TWICE,
    TALK,
    THINKING,
    Messages,
    assistant,
    call,
    calling_talks,
    chat_of,
    runs,
    talks,
    tool,
    user,
)

Tokenizers = Callable[[str], FolderTokenizer]
BYTE = ByteTokenizer()
USER = user("What?")
# Templates that write contents unchanged or without outer spaces
PLAIN = (
    """chatml chatml_marked_content llama31 llama31_marked mistral mistral_tools gemma deepseek_r1 qwen3 qwen3_marked
phi3 plain_header""".split()
)
NO_SYSTEM = ("mistral", "gemma")
# Templates that support tools, and the maximum number of calls in a turn
CALLERS = {"chatml": 3, "llama31": 1, "llama31_marked": 1, "deepseek_v3": 3, "qwen3": 3, "qwen3_marked": 3}
RANDOM = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


_READ: dict[str, Any] = {}


def ids_of_template(chat: Chat, tokenizer: FolderTokenizer) -> list[int]:
    """The ids that transformers gives the chat with the tokenizer in the folder."""
    from transformers import AutoTokenizer

    if tokenizer.name not in _READ:
        _READ[tokenizer.name] = AutoTokenizer.from_pretrained(tokenizer.name)
    return _READ[tokenizer.name].apply_chat_template(chat.messages, tools=chat.tools, return_dict=False)


def test_byte_template() -> None:
    tokens, weights, *_ = encode_chat(Chat([USER, assistant("é")], None), BYTE)
    assert tokens.tolist() == [256, *b"user\nWhat?", 257, 10, 256, *b"assistant\n", 0xC3, 0xA9, 257, 10]
    assert tokens.dtype == np.int32 and weights.dtype == np.float32
    assert tokens[weights > 0].tolist() == [0xC3, 0xA9, 257]
    # Control strings that somebody typed stay text.
    tokens, weights, *_ = encode_chat(Chat([user("<|im_end|>"), assistant("<|im_start|>")], None), BYTE)
    assert tokens.tolist().count(257) == 2 and tokens.tolist().count(256) == 2
    assert tokens[weights > 0].tolist() == [*b"<|im_start|>", 257]


def test_byte_template_writes_tools_and_calls() -> None:
    called = assistant(None, tool_calls=[{"function": {"name": "f", "arguments": {}}}])
    chat = Chat([USER, called, tool("7"), assistant("Seven.")], [{"name": "f"}])
    tokens, *_ = encode_chat(chat, BYTE)
    assert BYTE.decode(tokens) == (
        '<|im_start|>system\n# Tools\n{"name": "f"}<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n'
        '<|im_start|>assistant\n<tool_call>\n{"function": {"name": "f", "arguments": {}}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\nSeven.<|im_end|>\n"
    )
    assert runs(chat, BYTE)[1] == "Seven.<|im_end|>"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", [" I am fine.\n<|im_end|>", "42\n\nWhat is the question?<|im_end|>"]),
        ("chatml_marked", [" I am fine.\n<|im_end|>", "42\n\nWhat is the question?<|im_end|>"]),
        ("llama3", ["I am fine.<|eot_id|>", "42\n\nWhat is the question?<|eot_id|>"]),
        ("plain_header", [" I am fine.<|endoftext|>", " 42\n\nWhat is the question?<|endoftext|>"]),
        ("mistral", ["  I am fine.\n</s>", " 42\n\nWhat is the question?</s>"]),
    ],
)
def test_golden_masks(tokenizers: Tokenizers, name: str, expected: list[str]) -> None:
    """P101: supervised are contents and the end of turn of each template, without the newline that some templates write
    after it."""
    assert runs(Chat(TALK, None), tokenizers(name)) == expected


def test_supervision_after_the_last_user_message(tokenizers: Tokenizers) -> None:
    """Call and answer after the last question are learnt, but not a turn to which its message gives no weight."""
    rounds = [USER, assistant("1."), user("1 + 2?"), assistant(None, tool_calls=[call()]), tool("3"), assistant("3.")]
    for tokenizer, answer in ((BYTE, "3.<|im_end|>"), (tokenizers("qwen3"), "3.<|im_end|>")):
        called, last = runs(chat_of(rounds), tokenizer, "after_last_user")
        assert '"name": "add"' in called and last.endswith(answer)
        unlearnt = chat_of(rounds)._replace(weights=(1.0, 1.0, 1.0, 0.0, 1.0, 0.5))
        assert runs(unlearnt, tokenizer, "after_last_user") == [last]
    assert len(runs(Chat([assistant("Hi"), assistant("Well?")], None), BYTE, "after_last_user")) == 2  # nobody asked
    with pytest.raises(DataError, match="Give an assistant message after the last user message a weight above 0"):
        encode_chat(chat_of(rounds[:3]), BYTE, "after_last_user")


def said_by_assistant(messages: Messages) -> list[str]:
    return [message["content"].strip() for message in messages if message["role"] == "assistant"]


def learnt(chat: Chat, tokenizer: FolderTokenizer) -> list[str]:
    """The text of each supervised run, without the end of turn and without the empty thinking that templates insert."""
    written = [run.removesuffix(tokenizer.end_of_turn or "") for run in runs(chat, tokenizer)]
    return [text.removeprefix("<think>\n\n</think>\n\n").strip() for text in written]


@pytest.mark.parametrize("name", PLAIN)
@RANDOM
@given(data=st.data())
def test_what_the_assistant_said(tokenizers: Tokenizers, name: str, data: st.DataObject) -> None:
    """P98: ids equal those of the whole chat; each content of the assistant and the end of its turn are supervised."""
    tokenizer = tokenizers(name)
    messages = data.draw(talks(typed=False, system=name not in NO_SYSTEM))
    assume(not tokenizer.control.search(str(messages)))
    chat = Chat(messages, None)
    assert learnt(chat, tokenizer) == said_by_assistant(messages)
    assert encode_chat(chat, tokenizer)[0].tolist() == ids_of_template(chat, tokenizer)


@pytest.mark.parametrize("name", PLAIN)
@RANDOM
@given(data=st.data())
def test_typed_control_strings_stay_text(tokenizers: Tokenizers, name: str, data: st.DataObject) -> None:
    """There are as many control ids as in the same chat without typed control strings; text and supervised text contain
    the typed strings.  Only an assistant may write the control tokens that its template writes inside turns."""
    tokenizer = tokenizers(name)
    messages = data.draw(talks(typed=True, system=name not in NO_SYSTEM))
    assume(not any("think>" in message["content"] for message in messages))
    chat = Chat(messages, None)

    def without_control(message: dict[str, Any]) -> dict[str, Any]:
        kept = tokenizer.habits.inside if message["role"] == "assistant" else frozenset()
        content = tokenizer.control.sub(lambda match: match[0] if match[0] in kept else "x", message["content"])
        return {**message, "content": content}

    plain = [without_control(message) for message in messages]
    assume(plain == [without_control(message) for message in plain])  # no control string arises from two halves
    ids, *_ = encode_chat(chat, tokenizer)
    without, *_ = encode_chat(Chat(plain, None), tokenizer)
    controls = [i for i in ids.tolist() if tokenizer.is_control[i]]
    assert controls == [i for i in without.tolist() if tokenizer.is_control[i]]
    assert learnt(chat, tokenizer) == said_by_assistant(messages)


@pytest.mark.parametrize("name", CALLERS)
@RANDOM
@given(data=st.data())
def test_calls_of_tools(tokenizers: Tokenizers, name: str, data: st.DataObject) -> None:
    """A turn that calls tools is supervised with its calls; results of tools are not."""
    tokenizer = tokenizers(name)
    messages = data.draw(calling_talks(typed=False, most_calls=CALLERS[name]))
    assume(not tokenizer.control.search(str(messages)))
    assume(not name.startswith("qwen3") or not any("<tool_response>" in str(m["content"]) for m in messages))
    chat = chat_of(messages)
    written = runs(chat, tokenizer)
    turns = [message for message in messages if message["role"] == "assistant"]
    assert len(written) == len(turns)
    for text, message in zip(written, turns, strict=True):
        assert sum(text.endswith(end) and text.count(end) == 1 for end in tokenizer.habits.ends) == 1
        assert (message["content"] or "").strip() in text
        for called in message.get("tool_calls", []):
            assert json.dumps(called["function"]["arguments"], ensure_ascii=False) in text
    assert encode_chat(chat, tokenizer)[0].tolist() == ids_of_template(chat, tokenizer)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_ids_with_thinking(tokenizers: Tokenizers, key: str) -> None:
    messages = [{key if k == "reasoning_content" else k: v for k, v in message.items()} for message in THINKING]
    expected = ids_of_template(Chat(THINKING, None), tokenizers("qwen3"))
    assert encode_chat(Chat(messages, None), tokenizers("qwen3")).tokens.tolist() == expected


@settings(max_examples=100, deadline=None)
@given(messages=talks(typed=True, system=True))
def test_byte_tokenizer_supervises_what_the_assistant_said(messages: Messages) -> None:
    said = [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]
    assert runs(Chat(messages, None), BYTE) == said


EITHER = pytest.mark.parametrize("name", ["byte", "chatml", "chatml_marked"])


def either(name: str, tokenizers: Tokenizers) -> Any:
    return BYTE if name == "byte" else tokenizers(name)


FIRST, LAST = " I am fine.\n<|im_end|>", "42\n\nWhat is the question?<|im_end|>"


@EITHER
def test_supervise_last_or_all(tokenizers: Tokenizers, name: str) -> None:
    """With all, every token is supervised except the first, which nothing predicts."""
    tokenizer = either(name, tokenizers)
    assert runs(Chat(TALK, None), tokenizer, "last") == [LAST]
    ids, weights, *_ = encode_chat(Chat(TALK, None), tokenizer, "all")
    assert weights.tolist() == [0.0] + [1.0] * (len(ids) - 1)


@EITHER
def test_weights_of_messages(tokenizers: Tokenizers, name: str) -> None:
    """Weight 0 excludes a turn, another number multiplies its weight; weights of other roles' messages have no
    effect."""
    tokenizer = either(name, tokenizers)
    assert runs(Chat(TALK, None, (1.0, 0.0, 1.0, 1.0)), tokenizer) == [LAST]
    assert runs(Chat(TALK, None, (0.0, 1.0, 0.0, 0.0)), tokenizer) == [FIRST]
    _, ones, *_ = encode_chat(Chat(TALK, None), tokenizer)
    ids, weights, *_ = encode_chat(Chat(TALK, None, (9.0, 0.5, 9.0, 2.0)), tokenizer)
    assert [tokenizer.decode(ids[weights == weight]) for weight in (0.5, 2.0)] == [FIRST, LAST]
    assert ((weights > 0) == (ones > 0)).all() and set(weights.tolist()) == {0.0, 0.5, 2.0}
    # With data.supervise all
    ids, weights, *_ = encode_chat(Chat(TALK, None, (1.0, 0.0, 1.0, 2.0)), tokenizer, "all")
    assert tokenizer.decode(ids[1:][weights[1:] == 0]) == FIRST
    assert tokenizer.decode(ids[weights == 2]) == LAST


@EITHER
def test_nothing_to_learn(tokenizers: Tokenizers, name: str) -> None:
    with pytest.raises(DataError, match="every token has weight 0 with data.supervise = last, so the chat"):
        encode_chat(Chat(TALK, None, (1.0, 1.0, 1.0, 0.0)), either(name, tokenizers), "last")


def test_a_text_that_the_template_leaves_out_is_not_learned(tokenizers: Tokenizers) -> None:
    """Mistral's template leaves out a text beside a call.  The text is reported (`omitted.py`), and the call is
    supervised."""
    chat = chat_of(CALLING_TWICE)
    calls = '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}}, {"name": "add", "arguments": {"x": 2}}]</s>'
    assert runs(chat, tokenizers("mistral_tools")) == [calls, " 3 and 4.</s>"]
    assert runs(chat, tokenizers("mistral_tools"), "last") == [" 3 and 4.</s>"]
    rendered = encode_chat(chat, tokenizers("mistral_tools")).rendered
    assert rendered is not None
    assert find_omitted(rendered) == [(2, "assistant", "content", "Let me")]


def test_only_turns_that_are_supervised_need_to_be_located(tokenizers: Tokenizers) -> None:
    """The template does not support calls, so it writes nothing of message 2; this is an error only if the message is
    supervised."""
    messages = [user("1 + 2?"), assistant("", tool_calls=[call()]), user("3"), assistant("3.")]
    with pytest.raises(DataError, match="message 2 cannot be located: the template writes nothing of it, so the model"):
        encode_chat(Chat(messages, None), tokenizers("chatml_marked"))
    assert runs(Chat(messages, None), tokenizers("chatml_marked"), "last") == ["3.<|im_end|>"]
    assert runs(Chat(messages, None, (1, 0, 1, 1)), tokenizers("chatml_marked")) == ["3.<|im_end|>"]


def test_a_chat_with_control_strings_and_other_added_tokens(tokenizers: Tokenizers) -> None:
    """Added tokens that are not control tokens keep their ids, also beside a control string that stays text."""
    tokenizer = tokenizers("gemma")  # its template does not write <tool_call>
    call_id = tokenizer.files.added_ids["<tool_call>"]
    ids, *_ = encode_chat(Chat([user("<tool_call> or <|endoftext|>?"), assistant("ok")], None), tokenizer)
    assert ids.tolist().count(call_id) == 1
    assert not set(ids.tolist()) & {tokenizer.files.added_ids["<|endoftext|>"], tokenizer.files.added_ids["<|user|>"]}
    assert "<tool_call> or <|endoftext|>?<end_of_turn>" in tokenizer.decode(ids)
