"""Checks the messages of a chat one by one, and converts all notations to one form.

Decides which roles, contents, tool calls and weights of messages are valid, in OpenAI's notation (role, content) and in
ShareGPT's (from, value).  Other keys are passed to the chat template unchanged.  Errors name the message.
`formats.py` reads the other keys of a row.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from sft.data.read.strict_json import parse_json
from sft.errors import DataError

Message = dict[str, Any]  # role, content, and all other keys of the message in the row
Tools = list[dict[str, Any]] | None

THINKING = ("reasoning_content", "thinking", "reasoning")  # keys of a message; most templates read reasoning_content
# Thinking at the start of a content, in four parts: opening tag, thinking, closing tag, answer.
THOUGHT = re.compile(r"(\s*(?:<think>)?\s*)(.*?)(\s*</think>\s*)(.*)", re.DOTALL)
ROLES = ("system", "user", "assistant", "tool")

_ALIASES = {"developer": "system"} | {role: role for role in ROLES}
_SENDERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
# These switches must be true or false, because a number under the key `loss` may be a measured loss.
_SWITCHES = ("train", "training", "loss")
_SMALLEST_WEIGHT, _LARGEST_WEIGHT = 1e-6, 1e6  # products do not overflow or underflow in float32


class CheckedMessage(NamedTuple):
    """A message that has been checked."""

    message: Message
    weight: float | None  # None if the message has no weight
    where: str  # name of the message in errors


def read_messages(messages: object, name: str) -> list[CheckedMessage]:
    """Checked messages of a list, or of a list's JSON text.  Raises DataError.

    [{"from": "human", "value": "Six?"}]  ->  [CheckedMessage({"role": "user", "content": "Six?"}, None, "message 1")]
    """
    if isinstance(messages, str):
        messages = read_json(messages, name)
    if isinstance(messages, dict):
        messages = _from_lists(messages)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{name} must be a list of at least one message; got {type_name(messages)}.")
    prefix = f"{name} " if name in ("prompt", "completion") else ""
    return [_read_message(message, f"{prefix}message {number}") for number, message in enumerate(messages, start=1)]


def _from_lists(lists: dict[str, Any]) -> object:
    """The messages of an object of lists, as older versions of `datasets` store a list of objects.

    {"role": ["user", "assistant"], "content": ["a", "b"]}  ->  two messages; any other object stays as it is
    """
    if not lists or not all(isinstance(column, list) for column in lists.values()):
        return lists
    if len({len(column) for column in lists.values()}) > 1:
        return lists
    return [dict(zip(lists, values)) for values in zip(*lists.values())]


def check_calls(turns: Sequence[CheckedMessage]) -> None:
    """Raises DataError if two tool calls share an id, or if a result names a call that no earlier message makes."""
    made: set[str] = set()
    for message, _, where in turns:
        for call in message.get("tool_calls", []):
            if "id" in call:
                if call["id"] in made:
                    raise DataError(f"{where} has a second tool call with id {shortened(to_json(call['id']))}.")
                made.add(call["id"])
        answered = message.get("tool_call_id")
        if answered is not None and (not isinstance(answered, str) or answered not in made):
            raise DataError(
                f"{where} answers tool call {shortened(to_json(answered))}, but no earlier message has this call."
            )


def read_weight(value: Any, name: str) -> float:
    """The weight that a row gives: a number, or true for 1 and false for 0.  Raises DataError."""
    if not isinstance(value, (int, float)):
        raise DataError(f"{name} is {type_name(value)}; expected a number of at least 0.")
    if value != 0 and not _SMALLEST_WEIGHT <= value <= _LARGEST_WEIGHT:  # refuses NaN too
        raise DataError(
            f"{name} is {shortened(str(value))}; expected 0, or {_SMALLEST_WEIGHT} to {_LARGEST_WEIGHT:.0e}."
        )
    return float(value)


def read_json(text: str, name: str) -> Any:
    """The value of a JSON text inside a row.  Raises DataError."""
    try:
        return parse_json(text)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def to_json(part: object) -> str:
    """A part of a chat as JSON text, which can be searched."""
    return json.dumps(part, ensure_ascii=False, default=str)


def type_name(value: Any) -> str:
    """Description of a value for errors: `a list`, `null`, `7`."""
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    return "a string" if isinstance(value, str) else shortened(to_json(value))


def shortened(text: str, limit: int = 60) -> str:
    """The beginning of a text, for errors."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(text: str, limit: int = 80) -> str:
    """The beginning of a text in quotes, for errors."""
    return to_json(shortened(text, limit))


def _read_message(raw: object, where: str) -> CheckedMessage:
    if not isinstance(raw, dict):
        raise DataError(f"{where} must be an object with role and content; got {type_name(raw)}.")
    message = {key: value for key, value in raw.items() if value is not None}
    weight = _take_weight(message, where)
    if "from" in message and "role" not in message:
        message = _from_sharegpt(message, where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ALIASES:
        got = f"role {shortened(to_json(role))}" if "role" in message else "no role"
        raise DataError(f"{where} has {got}; expected one of {', '.join(ROLES)}.")
    message["role"] = role = _ALIASES[role]
    calls = _read_calls(message.pop("tool_calls", None), role, where)
    content = _read_content(message, role, bool(calls), where)
    if content is not None:
        message["content"] = content
    if calls:
        message["tool_calls"] = calls
    if role == "assistant" and not (content or "").strip() and not calls:
        raise DataError(f"{where} (assistant) is empty: the model would learn to end a turn without any text.")
    _check_rest(message, role, where)
    return CheckedMessage(message, weight, where)


def _take_weight(message: Message, where: str) -> float | None:
    """Removes the weight from a message, because a template has no use for it, and returns it."""
    weights = {name: message.pop(name) for name in ("weight", *_SWITCHES) if name in message}
    if len(weights) > 1:
        raise DataError(f"{where} has {' and '.join(weights)}, which have the same meaning.  Keep one of them.")
    for name, value in weights.items():
        if name in _SWITCHES and not isinstance(value, bool):
            raise DataError(f"{where} has {name} {type_name(value)}; expected true or false (weight takes a number).")
        return read_weight(value, f"the weight of {where}")
    return None


def _from_sharegpt(message: Message, where: str) -> Message:
    sender, value = message["from"], message.get("value")
    if not isinstance(sender, str) or sender not in _SENDERS:
        raise DataError(f"{where} is from {shortened(to_json(sender))}; expected one of {', '.join(_SENDERS)}.")
    if not isinstance(value, str):
        raise DataError(f"{where} (from {sender}) must have a string as value; got {type_name(value)}.")
    rest = {key: item for key, item in message.items() if key not in ("from", "value")}
    key = "tool_calls" if sender == "function_call" else "content"
    if key in rest:
        raise DataError(f"{where} has a value and {key}, which have the same meaning.  Keep one of them.")
    if sender != "function_call":
        return {**rest, "role": _SENDERS[sender], "content": value}
    calls = read_json(value, f"{where} (from function_call)")
    return {**rest, "role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _read_content(message: Message, role: str, calls: bool, where: str) -> str | None:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(_text_part(part, role, where) for part in content)
    if not isinstance(content, str) and not (content is None and calls):
        raise DataError(f"{where} ({role}) must have a string as content; got {type_name(content)}.")
    return content


def _text_part(part: object, role: str, where: str) -> str:
    if not isinstance(part, dict):
        raise DataError(
            f"{where} ({role}) must have a string, or parts of type text, as content; got {type_name(part)}."
        )
    if part.get("type") != "text":
        raise DataError(
            f"{where} ({role}) has a part of type {shortened(to_json(part.get('type')))}; only parts of type text are "
            "supported."
        )
    if not isinstance(part.get("text"), str):
        raise DataError(f"{where} ({role}) has a part of type text without the key text.")
    return str(part["text"])


def _read_calls(calls: object, role: str, where: str) -> list[dict[str, Any]]:
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
    """A call in OpenAI's form, with an object as arguments: templates would quote a string twice (transformers#45419).

    {"name": "f", "arguments": '{"x": 1}'}  ->  {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
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
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        arguments = read_json(arguments, f"{where}: arguments of {shortened(function['name'])}")
    elif not isinstance(arguments, (dict, str)):
        raise DataError(f"{where} has a tool call with {type_name(arguments)} as arguments; expected an object.")
    return {**call, "function": {**function, "arguments": arguments}}


def _check_rest(message: Message, role: str, where: str) -> None:
    if "function_call" in message:
        raise DataError(f"{where} has function_call, an older form of tool_calls.  Use tool_calls.")
    thoughts = {name: message[name] for name in _REASONING if name in message}
    for name, thought in thoughts.items():
        if role != "assistant" or not isinstance(thought, str):
            got = f"of the {role}" if role != "assistant" else type_name(thought)
            raise DataError(f"{where} has {name}, which is {got}; expected a string in an assistant message.")
    if len(set(thoughts.values())) > 1:
        raise DataError(f"{where} has {' and '.join(thoughts)}, whose values differ.  Keep one of them.")
