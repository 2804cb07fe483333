"""Defines what all readers of chats share: roles, keys, tool calls, weights and texts of messages, and quotes in
errors.

Decides which tool calls and which weights are valid.  The arguments of a call stay as the row has them, text or object,
because templates need different forms (`with_arguments`).  `checked_messages.py` checks messages.
"""

import json
from datetime import date, time, timedelta
from typing import Any

from sft.data.read.strict_json import parse_json
from sft.errors import DataError

Message = dict[str, Any]  # role, content, and all other keys of the message in the row
Tools = list[dict[str, Any]] | None

THINKING = ("reasoning_content", "reasoning", "thinking")  # keys of a message; most templates read reasoning_content
ROLES = ("system", "user", "assistant", "tool")

_SMALLEST_WEIGHT, _LARGEST_WEIGHT = 1e-6, 1e6  # products of weights neither overflow nor underflow in float32


# Tool calls


def read_calls(calls: object, role: str, where: str) -> list[dict[str, Any]]:
    """The calls of a message in OpenAI's form, from a list or its JSON text.  Raises DataError for an invalid call."""
    if isinstance(calls, str):
        calls = read_json(calls, f"{where}: tool_calls")
    if calls is None or calls == []:
        return []
    if role != "assistant":
        raise DataError(f"{where} ({role}) has tool_calls; only an assistant message may have tool_calls.")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{where} has tool_calls, but their value is not a list of objects.")
    return [_read_call(call, where) for call in calls]


def _read_call(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """A call in OpenAI's form, with the arguments of the row.

    {"name": "f", "arguments": '{"x": 1}'}  ->  {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    """
    call = {key: value for key, value in raw.items() if value is not None}
    if "function" not in call:
        inner = {key: call.pop(key) for key in ("name", "arguments") if key in call}
        call = {"type": "function", **call, "function": inner}
    function = call["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{where} has a tool call without the name of a function.")
    if "parameters" in {**function, **call}:
        raise DataError(f"{where} has a tool call with the key parameters; the key must be arguments.")
    if not isinstance(call.get("id", ""), str):
        raise DataError(f"{where} has a tool call with id {type_name(call['id'])}; an id must be a string.")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        read_json(arguments, f"{where}: arguments of {shortened(function['name'])}")
    elif not isinstance(arguments, dict | str | None):
        raise DataError(f"{where} has a tool call with {type_name(arguments)} as arguments; expected an object.")
    return call


def with_arguments(messages: list[Message], as_text: bool) -> list[Message]:
    """The messages with all arguments of calls as objects, or all as JSON texts.  Texts that hold no JSON object stay.

        row                 as_text=False       as_text=True
        {"x": "é"}          {"x": "é"}          '{"x": "é"}'
        '{"x": 1}'          {"x": 1}            '{"x": 1}'
        "print(1)"          "print(1)"          "print(1)"
        "", null, missing   {}                  "{}"

    Messages without calls are not copied.
    """
    return [
        (
            {**message, "tool_calls": [_with_arguments(call, as_text) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
        )
        for message in messages
    ]


def _with_arguments(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_arguments(call["function"], as_text)}
    arguments = call.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str) and not as_text and arguments.lstrip().startswith("{"):
        arguments = read_json(arguments, "arguments")
    elif isinstance(arguments, dict) and as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "arguments": arguments}


# Texts


def text_of(message: Message) -> str:
    """The text of a message's content, without thinking; "" if the message has no content."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def with_reasoning_keys(messages: list[Message]) -> list[Message]:
    """The messages with the thinking parts of their contents under the key reasoning_content.

    {"content": [{"type": "thinking", "thinking": "sum"}, {"type": "text", "text": "4"}]}
    -> {"content": "4", "reasoning_content": "sum"}

    Messages without thinking parts are not copied.
    """
    return [
        (
            {**message, "content": text_of(message), "reasoning_content": _thinking_of(message["content"])}
            if isinstance(message.get("content"), list)
            else message
        )
        for message in messages
    ]


def _thinking_of(parts: list[dict[str, Any]]) -> str:
    return "".join(part.get("thinking", "") for part in parts)


# Values, and how errors quote them


def read_weight(value: Any, name: str) -> float:
    """The weight that a row gives: a number, or true for 1 and false for 0.  Raises DataError for any other value."""
    if not isinstance(value, (int, float)):
        raise DataError(f"{name} is {type_name(value)}; expected a number of at least 0.")
    if value != 0 and not _SMALLEST_WEIGHT <= value <= _LARGEST_WEIGHT:  # refuses NaN too
        raise DataError(
            f"{name} is {shortened(str(value))}; expected 0, or {_SMALLEST_WEIGHT} to {_LARGEST_WEIGHT:.0e}."
        )
    return float(value)


def read_json(text: str, name: str) -> Any:
    """The value of a JSON text inside a row.  Raises DataError, which begins with `name`, if it is not strict JSON."""
    try:
        return parse_json(text)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def to_json(part: object) -> str:
    """A value as JSON text; values that JSON lacks become strings."""
    return json.dumps(part, ensure_ascii=False, default=str)


def type_name(value: Any) -> str:
    """A description of a value for errors, such as `a list`, `null` or `7`."""
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, date | time | timedelta):
        return f"the time {value}"
    return "a string" if isinstance(value, str) else shortened(to_json(value))


def shortened(text: str, limit: int = 60) -> str:
    """The beginning of a text, for errors."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(text: str, limit: int = 80) -> str:
    """The beginning of a text in quotes, for errors."""
    return to_json(shortened(text, limit))


def as_unicode(text: str) -> str:
    """The text with each half surrogate pair as an escape, because UTF-8 cannot encode it."""
    return text.encode("utf-8", "backslashreplace").decode()
