"""Keys of messages: weights under the names of other trainers, reasoning, calls and their arguments."""

import copy
import json
import time
from datetime import date, datetime
from typing import Any

import pytest

from sft.data.chat.encode_chat import encode_chat
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.read.strict_json import parse_json
from sft.data.rows.formats import Chat, read_row
from sft.data.rows.messages import with_arguments
from sft.errors import DataError

Message = dict[str, Any]

USER, ANSWER = {"role": "user", "content": "Six?"}, {"role": "assistant", "content": "6"}
THINKING = {"type": "thinking", "thinking": "sum"}
FOUR = {"type": "text", "text": "4"}


def read(*messages: object) -> Chat:
    chat = read_row({"messages": list(messages)})
    assert isinstance(chat, Chat)
    return chat


def refusal(*messages: object) -> str:
    with pytest.raises(DataError) as error:
        read(*messages)
    return str(error.value)


def calling(*ids: str | None, arguments: object = None) -> Message:
    function = {"name": "f"} if arguments is None else {"name": "f", "arguments": arguments}
    calls = [{"function": function} if id_ is None else {"id": id_, "function": function} for id_ in ids]
    return {"role": "assistant", "tool_calls": calls}


def result(id_: object) -> Message:
    return {"role": "tool", "content": "7", "tool_call_id": id_}


# Weights


@pytest.mark.parametrize(
    ("key", "value", "weight"),
    [
        ("weight", 0.5, 0.5),
        ("loss_scale", 2, 2.0),
        ("loss_mask", 0, 0.0),
        ("loss_mask", True, 1.0),
        ("step_loss_mask", 0, 0.0),
        ("step_loss_mask", False, 0.0),
        ("train", False, 0.0),
        ("training", True, 1.0),
        ("trainable", False, 0.0),
        ("loss", False, 0.0),
    ],
)
def test_names_of_weights(key: str, value: object, weight: float) -> None:
    """A template does not get these keys."""
    assert read(USER, {**ANSWER, key: value}, ANSWER) == Chat([USER, ANSWER, ANSWER], None, (1.0, weight, 1.0))


MASK = "true may mean that the message is supervised, or that it is not.  Use train: true or train: false instead."
PARTS = "sft has one weight for a message, not for parts of its text.  Use weight, or split the message."


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"weight": True}, "message 2 has weight true; expected a number (train takes true or false)."),
        ({"loss_scale": False}, "message 2 has loss_scale false; expected a number (train takes true or false)."),
        ({"loss_scale": [1, 2]}, "the loss_scale of message 2 is a list; expected a number of at least 0."),
        ({"loss_mask": -1}, "the loss_mask of message 2 is -1; expected 0, or 1e-06 to 1e+06."),
        ({"trainable": 1}, "message 2 has trainable 1; expected true or false (weight takes a number)."),
        ({"loss_mask": 1, "loss": True}, "message 2 has loss_mask and loss, which have the same meaning.  Keep one of"),
        ({"mask": True}, f"message 2 has mask, which is not supported: {MASK}"),
        ({"mask": False}, f"message 2 has mask, which is not supported: {MASK}"),
        ({"masked": True}, f"message 2 has masked, which is not supported: {MASK}"),
        ({"training_detail": [{"begin_offset": 0}]}, f"message 2 has training_detail, which is not supported: {PARTS}"),
        ({"train_detail": [{}, 1]}, f"message 2 has train_detail, which is not supported: {PARTS}"),
        ({"images": ["a.png"]}, "message 2 has images, but only text is trained.  Remove the row, or the key and its"),
        ({"audio": {"id": "a"}}, "message 2 has audio, but only text is trained.  Remove the row, or the key and its"),
    ],
)
def test_keys_of_messages_that_are_refused(keys: Message, complaint: str) -> None:
    assert refusal(USER, {**ANSWER, **keys}).startswith(complaint)


def test_empty_keys_of_messages_are_accepted() -> None:
    empty = {**ANSWER, "images": [], "training_detail": []}
    assert read(USER, {**empty, "mask": None}) == Chat([USER, empty], None)


# Reasoning


@pytest.mark.parametrize(
    ("details", "reasoning"),
    [
        ([{"type": "reasoning.text", "text": "six "}, {"type": "reasoning.summary", "summary": "times"}], "six times"),
        ([{"text": "why"}, {"type": "reasoning.encrypted", "data": "gAAA"}], "why"),
        ([{"text": None, "summary": "short"}], "short"),
    ],
)
def test_reasoning_details_become_reasoning_content(details: object, reasoning: str) -> None:
    expected = Chat([USER, {**ANSWER, "reasoning_content": reasoning}], None)
    assert read(USER, {**ANSWER, "reasoning_details": details}) == expected


def test_reasoning_details_beside_the_same_reasoning() -> None:
    details = [{"text": "six"}, {"text": "times"}, {"data": "gAAA"}]
    for reasoning, entries in (("six\ntimes", details), ("six", [{"data": "gAAA"}]), ("six", [])):
        message = {**ANSWER, "reasoning": reasoning, "reasoning_details": entries}
        assert read(USER, message) == Chat([USER, {**ANSWER, "reasoning": reasoning}], None)
    assert read(USER, {**ANSWER, "reasoning_details": []}) == Chat([USER, ANSWER], None)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({**ANSWER, "reasoning_details": [{"type": "reasoning.encrypted", "data": "gAAA"}]},
         "message 2 has reasoning_details without a text or summary: encrypted reasoning cannot be trained.  Remove "
         "the key, or give the text under reasoning_content."),
        ({**ANSWER, "reasoning_details": [{"text": "a"}], "reasoning": "b"},
         "message 2 has reasoning and reasoning_details, whose values differ.  Keep one of them."),
        ({**ANSWER, "reasoning_details": ["a"]}, "message 2 has reasoning_details, but their value is not a list of"),
        ({**ANSWER, "reasoning_details": [{"text": 7}]}, "message 2 has reasoning_details with 7 as text; expected a"),
        ({**USER, "reasoning_details": [{"text": "a"}]}, "message 2 has reasoning_details, which is of the user;"),
        ({"role": "assistant", "content": [THINKING, FOUR], "reasoning": "sum"},
         "message 2 has reasoning and also parts of type thinking.  Keep one of them."),
        ({"role": "assistant", "content": [THINKING, FOUR], "reasoning_details": [{"text": "sum"}]},
         "message 2 has reasoning_details and also parts of type thinking.  Keep one of them."),
        ({"role": "user", "content": [THINKING]},
         'message 2 (user) has a part of type "thinking"; only parts of type text are supported.'),
        ({"role": "assistant", "content": [{"type": "image"}]},
         'message 2 (assistant) has a part of type "image"; only parts of type text and thinking are supported.'),
        ({"role": "assistant", "content": [{"type": "thinking", "text": "sum"}, FOUR]},
         "message 2 has a part of type thinking without a text under the key thinking."),
        ({"role": "assistant", "content": [{**THINKING, "thinking": [THINKING]}, FOUR]},
         'message 2 (thinking) has a part of type "thinking"; only parts of type text are supported.'),
        ({"role": "assistant", "content": [THINKING, {"type": "text", "text": " "}]},
         "message 2 (assistant) is empty: the model would learn to end a turn without any text."),
    ],
)  # fmt: skip
def test_reasoning_that_is_refused(message: Message, complaint: str) -> None:
    assert refusal(USER, message).startswith(complaint)


def test_thinking_parts_stay_parts() -> None:
    written = {"type": "thinking", "thinking": [{"type": "text", "text": "s"}, {"type": "text", "text": "um"}]}
    for part in (THINKING, {**THINKING, "signature": "EqQB", "closed": True}, written):
        chat = read(USER, {"role": "assistant", "content": [part, {**FOUR, "citations": []}, FOUR]})
        assert chat.messages[1] == {"role": "assistant", "content": [THINKING, FOUR, FOUR]}
    called = {**calling("a"), "content": [THINKING]}
    assert read(USER, called).messages[1]["content"] == [THINKING]


def test_the_byte_tokenizer_writes_thinking_parts_like_reasoning() -> None:
    in_parts = read(USER, {"role": "assistant", "content": [THINKING, FOUR, FOUR]})
    in_a_key = read(USER, {"role": "assistant", "content": "44", "reasoning_content": "sum"})
    byte = ByteTokenizer()
    assert encode_chat(in_parts, byte).tokens.tolist() == encode_chat(in_a_key, byte).tokens.tolist()
    assert b"<think>\nsum\n</think>\n44" in bytes(id_ for id_ in encode_chat(in_parts, byte).tokens if id_ < 256)


# Calls


def test_ids_that_begin_anew_in_each_round_and_empty_ids() -> None:
    for messages in (
        [calling("a"), result("a"), calling("a"), result("a")],
        [calling("a", "b"), result("b"), result("a"), ANSWER, calling("a", "c"), result("c")],
        [calling("", ""), result(""), result("")],
        [calling(None, None), result(""), result(None)],
        [calling("a", ""), result("a"), calling("", "a")],
    ):
        chat = read(USER, *messages)
        assert [message.get("tool_calls") for message in chat.messages[1:]] == [m.get("tool_calls") for m in messages]


def test_ids_that_are_refused() -> None:
    assert refusal(calling("a", "", "b", "b", "")) == 'message 1 has a second tool call with id "b".'
    assert (
        refusal(calling("a"), result("b")) == 'message 2 answers tool call "b", but no earlier message has this call.'
    )
    assert refusal(calling("a"), result(["a"])).startswith('message 2 answers tool call ["a"], but no earlier message')


def test_function_call_is_named_although_the_content_is_null() -> None:
    for content in (None, "", "I look it up."):
        message = {"role": "assistant", "content": content, "function_call": {"name": "f", "arguments": "{}"}}
        assert refusal(USER, message) == "message 2 has function_call, an older form of tool_calls.  Use tool_calls."


ARGUMENTS: list[tuple[Message, object, object]] = [
    ({"arguments": {"x": "é"}}, {"x": "é"}, '{"x": "é"}'),
    ({"arguments": '{"x":  1}'}, {"x": 1}, '{"x":  1}'),
    ({"arguments": ' {"x": 1}'}, {"x": 1}, ' {"x": 1}'),
    ({"arguments": "print(1)"}, "print(1)", "print(1)"),
    ({"arguments": "[1]"}, "[1]", "[1]"),
    ({"arguments": ""}, {}, "{}"),
    ({"arguments": None}, {}, "{}"),
    ({"arguments": {}}, {}, "{}"),
    ({}, {}, "{}"),
]


@pytest.mark.parametrize(("passed", "as_object", "as_text"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments(passed: Message, as_object: object, as_text: object) -> None:
    """Arguments as they are in the row, and in the form that a template needs, with and without the key function."""
    chat = read(USER, {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", **passed}}]})
    assert chat.messages[1]["tool_calls"] == [{"id": "a", "function": {"name": "f", **passed}}]
    bare = [USER, {"role": "assistant", "tool_calls": [{"id": "a", "name": "f", **passed}]}]
    before = copy.deepcopy((chat, bare))
    for wanted, text in ((as_object, False), (as_text, True)):
        user, called = with_arguments(chat.messages, as_text=text)
        assert user is chat.messages[0]
        assert called["tool_calls"] == [{"id": "a", "function": {"name": "f", "arguments": wanted}}]
        assert with_arguments(bare, as_text=text)[1]["tool_calls"] == [{"id": "a", "name": "f", "arguments": wanted}]
    assert (chat, bare) == before


def test_the_byte_tokenizer_writes_arguments_as_objects() -> None:
    rows = [read(USER, calling("a", arguments=arguments)) for arguments in ('{"x": 1}', {"x": 1})]
    texts = [bytes(id_ for id_ in encode_chat(row, ByteTokenizer()).tokens if id_ < 256) for row in rows]
    assert b'"arguments": {"x": 1}' in texts[0] and texts[0] == texts[1]


# Values


def test_dates_as_contents_are_explained() -> None:
    why = (
        ".  The library datasets reads a column of texts like 2024-01-31 as times: name the files of the dataset under "
        "files, or store the column as text."
    )
    for value, name in ((datetime(2024, 1, 1), "2024-01-01 00:00:00"), (date(2024, 1, 1), "2024-01-01")):
        assert refusal({**USER, "content": value}) == (
            f"message 1 (user) must have a string as content; got the time {name}{why}"
        )
    with pytest.raises(DataError) as error:
        read_row({"conversations": [{"from": "human", "value": date(2024, 1, 1)}]})
    assert str(error.value) == f"message 1 (from human) must have a string as value; got the time 2024-01-01{why}"


def test_a_key_given_twice_is_found_in_linear_time() -> None:
    """A search that is quadratic in the number of keys would take 20 s here."""
    pairs = [f'"{i}": 0' for i in range(30_000)]
    started = time.process_time()
    with pytest.raises(DataError, match="key '29999' appears twice in one object."):
        parse_json("{" + ", ".join([*pairs, '"29999": 1']) + "}")
    assert time.process_time() - started < 2
    assert parse_json("{" + ", ".join(pairs) + "}") == json.loads("{" + ", ".join(pairs) + "}")
