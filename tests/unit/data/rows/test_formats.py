"""Formats of rows: each form with the chat that it gives, and each fault with its error message."""

import json
from datetime import date
from typing import Any

import pytest

from sft.data.rows.formats import Chat, read_row
from sft.errors import DataError

Message = dict[str, Any]

FUNCTION = {"name": "f", "arguments": {}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER, ANSWER = {"role": "user", "content": "Six?"}, {"role": "assistant", "content": "6"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": None}}}
CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "c1"}


# Every form, and the chat that it gives


def talk(*messages: object, **others: object) -> dict[str, object]:
    return {"messages": list(messages), **others}


def called(**function: Any) -> Message:
    """The message of an assistant with one call, in the form after reading."""
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def sent(**values: str) -> list[Message]:
    """sent(human="a", gpt="b") -> these two messages in ShareGPT's form."""
    return [{"from": sender, "value": value} for sender, value in values.items()]


def said(*texts: str) -> list[Message]:
    """said("a", "b") -> a message of the user, then one of the assistant, and so on."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


SHAPES: dict[str, tuple[object, Chat]] = {
    "other keys of a ShareGPT message, beside one in OpenAI's words": (
        {"conversations": [USER, {"from": "gpt", "value": "a", "thinking": "so"}]},
        Chat([USER, {"role": "assistant", "content": "a", "thinking": "so"}], None),
    ),
    "nulls are keys that are not there": (
        {"messages": [{**USER, "name": None, "tool_calls": None}, ANSWER], "tools": "", "tokens": None},
        Chat([USER, ANSWER], None),
    ),
    "a developer is a system": (
        {"messages": [{"role": "developer", "content": "Be brief."}, USER, ANSWER]},
        Chat([SYSTEM, USER, ANSWER], None),
    ),
    "parts are joined": (
        {"messages": [{**USER, "content": [{"type": "text", "text": text} for text in ("Si", "x?")]}, ANSWER]},
        Chat([USER, ANSWER], None),
    ),
    "tools and calls": (
        {"messages": [USER, {**CALLS, "content": None}, RESULT, ANSWER], "tools": [TOOL]},
        Chat([USER, CALLS, RESULT, ANSWER], [TOOL]),
    ),
    "messages, tools and calls as JSON text": (
        {
            "messages": json.dumps([USER, {"role": "assistant", "tool_calls": json.dumps([CALL])}, RESULT, ANSWER]),
            "tools": json.dumps([TOOL]),
        },
        Chat([USER, CALLS, RESULT, ANSWER], [TOOL]),
    ),
    "each tool as JSON text": (
        {"messages": [USER, ANSWER], "tools": [json.dumps(TOOL), {"name": "g"}]},
        Chat([USER, ANSWER], [TOOL, {"name": "g"}]),
    ),
    "arguments as JSON text, a call without the word function": (
        {"messages": [USER, {**CALLS, "tool_calls": [{"id": "c1", "name": "f", "arguments": ' {"x": 1}'}]}]},
        Chat([USER, {**CALLS, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ' {"x": 1}'}}]}], None),
    ),
    "weights by their names, on any message": (
        talk({**USER, "train": False}, {**ANSWER, "training": False}, USER, {**ANSWER, "weight": 0.5},
             {**USER, "weight": 2}, {**ANSWER, "loss": True}),
        Chat([USER, ANSWER, USER, ANSWER, USER, ANSWER], None, (0.0, 0.0, 1.0, 0.5, 2.0, 1.0)),
    ),
    "the same system text twice": (
        {"system": "Be brief.", "messages": [SYSTEM, USER, ANSWER]},
        Chat([SYSTEM, USER, ANSWER], None),
    ),
    "ShareGPT by other names": (
        {"conversations": sent(user="a", chatgpt="b") + sent(user="c", model="d") + sent(user="e", bard="f")},
        Chat(said(*"abcdef"), None),
    ),
    "ShareGPT with tools": (
        {
            "system": "Be brief.",
            "conversations": [
                {"from": "human", "value": "Six?"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}', "weight": 0},
                {"from": "observation", "value": "7"},
                {"from": "function_call", "value": '[{"name": "f", "arguments": "{}"}, {"name": "g"}]'},
                {"from": "function_response", "value": "8"},
                {"from": "tool", "value": "9"},
                {"from": "gpt", "value": "6"},
            ],
            "tools": '[{"name": "f"}]',
        },
        Chat(
            [
                SYSTEM, USER,
                called(name="f", arguments={"x": 1}),
                {"role": "tool", "content": "7"},
                {"role": "assistant", "tool_calls": [
                    *called(name="f", arguments="{}")["tool_calls"], *called(name="g")["tool_calls"]
                ]},
                {"role": "tool", "content": "8"},
                {"role": "tool", "content": "9"},
                ANSWER,
            ],
            [{"name": "f"}],
            (1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        ),
    ),
    "prompt and completion as messages: only the completion is learnt": (
        {"prompt": [SYSTEM, USER, ANSWER, USER], "completion": [ANSWER], "tools": [TOOL]},
        Chat([SYSTEM, USER, ANSWER, USER, ANSWER], [TOOL], (0.0, 0.0, 0.0, 0.0, 1.0)),
    ),
    "a system text belongs to the prompt": (
        {"prompt": "Six?", "completion": "6", "system": "Be brief."},
        Chat([SYSTEM, USER, ANSWER], None, (0.0, 0.0, 1.0)),
    ),
    "a weight in a prompt counts": (
        {"prompt": [USER, {**ANSWER, "weight": 2}, USER], "completion": "6"},
        Chat([USER, ANSWER, USER, ANSWER], None, (0.0, 2.0, 0.0, 1.0)),
    ),
    "Alpaca with everything": (
        {"instruction": "+", "input": "1 2", "output": "3", "system": "Be brief.", "history": [["a", "b"], ["c", "d"]]},
        Chat([SYSTEM, *said("a", "b", "c", "d", "+\n1 2", "3")], None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    row, expected = SHAPES[name]
    before = json.dumps(row)
    assert read_row(row) == expected
    assert json.dumps(row) == before, "the row itself is left as it was"


# Every fault, and its message


def calling(**call: object) -> dict[str, object]:
    return talk(USER, {"role": "assistant", "tool_calls": [call]})


KNOWN = (
    "unknown format: a row must have messages, or conversations, or prompt and completion, or instruction and "
    "output, or tokens, or input_ids, or text.  This row has the keys "
)
TWICE = " but a row must have one format.  Keep one of them."

BAD_ROWS: list[tuple[object, str]] = [
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "content": "b"}]},
     "message 2 has a value and content, which have the same meaning.  Keep one of them."),
    ({"system": "A", "messages": [USER, {"role": "system", "content": "B"}, ANSWER]},
     "the row has a system text and also a system message.  Keep one of them."),
    ("hi", "a row must be an object; got a string."),
    # Forms
    ({"message": []}, KNOWN + "message."),
    ({"question": "q", "answer": "a"}, KNOWN + "question, answer.  If question is the prompt and answer its answer, "
     "name them prompt and completion, or give the dataset (a hub name, or a folder with this file) columns: {prompt: "
     "question, completion: answer}."),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, KNOWN + "prompt, chosen, rejected.  Preferences are not trained; "
     "the chosen answer alone can be: name it completion, or give the dataset (a hub name, or a folder with this file) "
     "columns: {prompt: prompt, completion: chosen}."),
    ({"messages": None, "body": "a"}, KNOWN + "messages (null), body."),
    ({"messages": {"role": ["user"], "content": []}}, "messages must be a list of at least one message; got an object"),
    (talk(USER, ANSWER, prompt="a", completion="b"), "the row has messages as well as prompt and completion," + TWICE),
    # Messages
    (talk(), "messages must be a list of at least one message; got an empty list."),
    ({"messages": "hi"}, "messages: not JSON: Expecting value at column 1 of 2 characters."),
    (talk("hi"), "message 1 must be an object with role and content; got a string."),
    (talk(USER, USER, {"role": "assitant", "content": "x"}),
     'message 3 has role "assitant"; expected one of system, user, assistant, tool.'),
    (talk({"content": "x"}), "message 1 has no role; expected one of system, user, assistant, tool."),
    (talk({"role": ["user"], "content": "x"}), 'message 1 has role ["user"]; expected one of system, user,'),
    # Contents
    (talk({"role": "user"}), "message 1 (user) must have a string as content; got null."),
    (talk({"role": "user", "content": ["x"]}),
     "message 1 (user) must have a string, or parts of type text, as content; got a string."),
    (talk({"role": "user", "content": [{"type": "text"}]}), "message 1 (user) has a part of type text without the"),
    (talk(USER, {"role": "assistant", "content": " \n"}), "message 2 (assistant) is empty: the model would learn to "
                                                          "end a"),
    (talk(USER, {"role": "assistant", "content": "", "tool_calls": []}), "message 2 (assistant) is empty: the model "
                                                                         "would"),
    (talk({**USER, "reasoning": "a"}), "message 1 has reasoning, which is of the user; expected a string in"),
    (talk({**ANSWER, "thinking": 7}), "message 1 has thinking, which is 7; expected a string in an assistant message."),
    (talk({**ANSWER, "thinking": "a", "reasoning": "b"}), "message 1 has reasoning and thinking, whose values differ."),
    # Nothing that could be learned
    (talk(USER, SYSTEM), "no assistant turn, only user and system, so the row has no answer to learn."),
    (talk(USER, {**ANSWER, "train": False}), "every assistant turn has weight 0, so no token is supervised."),
    ({"prompt": [ANSWER], "completion": [USER]}, "the completion has no assistant message, so no token is"),
    # Weights
    (talk(USER, {**ANSWER, "weight": float("nan")}), "the weight of message 2 is nan; expected 0, or 1e-06 to 1e+06."),
    # Tools
    (talk(USER, ANSWER, tools=7), "tools must be a list of objects; got 7."),
    (talk(USER, ANSWER, tools=["f"]), "tool 1: not JSON: Expecting value at column 1 of 1 characters."),
    (talk(USER, ANSWER, tools=[7]), "tools must be a list of objects; tool 1 is 7."),
    (talk(USER, ANSWER, tools=[TOOL, {"function": {"parameters": {}}}]), "tool 2 has no name."),
    # Calls and results
    (talk({**USER, "tool_calls": [CALL]}), "message 1 (user) has tool_calls; only an assistant message"),
    (talk({**CALLS, "tool_calls": ["f"]}), "message 1 has tool_calls, but their value is not a list of objects."),
    (talk({**CALLS, "tool_calls": "["}), "message 1: tool_calls: not JSON: Expecting value at column 2"),
    (calling(function="f"), "message 2 has a tool call without the name of a function."),
    (calling(name="f", parameters={}), "message 2 has a tool call with the key parameters; the key must"),
    (calling(function={**FUNCTION, "arguments": [1]}), "message 2 has a tool call with a list as arguments; expected"),
    (calling(function={**FUNCTION, "arguments": '{"x": '}), "message 2: arguments of f: not JSON: Expecting value"),
    (calling(function=FUNCTION, id=7), "message 2 has a tool call with id 7; an id must be a string."),
    (talk(USER, RESULT, CALLS), 'message 2 answers tool call "c1", but no earlier message has this call.'),
    # ShareGPT
    ({"conversations": sent(robot="a")}, 'message 1 is from "robot"; expected one of human, user, gpt, assistant,'),
    ({"conversations": [{"from": "human"}]}, "message 1 (from human) must have a string as value; got null."),
    ({"conversations": [{"from": "function_call", "value": "f"}]}, "message 1 (from function_call): not JSON: "),
    # Prompts and instructions
    ({"prompt": "a", "completion": " "}, "completion is empty: the model would learn to end a turn without any text."),
    ({"instruction": "a", "input": 7, "output": "b"}, "input must be a string; got 7."),
    ({"instruction": "a", "output": "b", "history": [["a"]]}, "history must be a list of pairs [instruction, output]."),
    (talk(USER, ANSWER, system=["Be long."]), "system must be a string; got a list."),
]  # fmt: skip


def test_values_that_only_a_table_can_hold() -> None:
    """A template would write these values in its own way, so their text in the data cannot be restored."""
    calls = [{"name": "f", "arguments": {"at": date(2024, 1, 2)}}]
    for row, what in (
        ({"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": calls}]}, "message 2 holds a date"),
        ({"messages": [USER, {**ANSWER, "logprob": float("nan")}]}, "message 2 holds NaN or infinity"),
        ({"messages": [USER, ANSWER], "tools": [{"name": "f", "default": b"x"}]}, "tools holds a bytes"),
    ):
        with pytest.raises(DataError, match=f"{what}, which JSON does not have.  Store the column as text."):
            read_row(row)
    assert read_row({"messages": [USER, ANSWER], "created_at": date(2024, 1, 2)}) == Chat([USER, ANSWER], None)


@pytest.mark.parametrize(("row", "complaint"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_bad_rows(row: object, complaint: str) -> None:
    with pytest.raises(DataError) as error:
        read_row(row)
    assert complaint in str(error.value) and len(str(error.value)) < 400
