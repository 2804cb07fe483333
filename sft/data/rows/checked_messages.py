"""Checks the messages of a chat one by one, and converts all notations to one form.

Decides which roles, contents, reasoning and weights of messages are valid, in OpenAI's notation (role, content) and in
ShareGPT's (from, value), and which keys of other trainers are refused.  Other keys are passed to the chat template
unchanged.  Errors name the message.  `messages.py` checks tool calls; `formats.py` reads the other keys of a row.
"""

from collections.abc import Sequence
from datetime import date, time, timedelta
from typing import Any, NamedTuple

from sft.data.rows.messages import (
    ROLES,
    THINKING,
    Message,
    read_calls,
    read_json,
    read_weight,
    shortened,
    text_of,
    to_json,
    type_name,
)
from sft.errors import DataError

_ALIASES = {"developer": "system"} | {role: role for role in ROLES}
_SENDERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bard", "bing"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "function_call": "assistant",
}
# Keys for the weight of a message.  weight and loss_scale (ms-swift) are numbers; loss_mask and step_loss_mask (slime)
# are numbers, or true or false.  Switches must be true or false, because a number under the key `loss` may be a
# measured loss.
_NUMBERS = ("weight", "loss_scale")
_MASKS = ("loss_mask", "step_loss_mask")
_SWITCHES = ("train", "training", "trainable", "loss")
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_MASK = "true may mean that the message is supervised, or that it is not.  Use train: true or train: false instead"
_PARTS = "sft has one weight for a message, not for parts of its text.  Use weight, or split the message"
_REFUSED = {"mask": _MASK, "masked": _MASK, "training_detail": _PARTS, "train_detail": _PARTS}


class CheckedMessage(NamedTuple):
    """A message that has been checked."""

    message: Message
    weight: float | None  # None if the message has no weight
    where: str  # the name of the message in errors, such as `message 3`


def read_messages(messages: object, name: str) -> list[CheckedMessage]:
    """Checks the messages of a list, of an object of lists (`_from_lists`), or of the JSON text of either.

    Raises DataError if a message is invalid.  name: the key of the messages, for errors

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
    """Raises DataError if two calls of one message share an id, or if a result names a call that no earlier message
    makes.

    Ids may repeat in later messages, because many agents begin with call_0 in each round.  Ids may be empty.
    """
    made: set[str] = set()
    for message, _, where in turns:
        ids = [call["id"] for call in message.get("tool_calls", []) if call.get("id")]
        if len(set(ids)) < len(ids):
            repeated = next(id_ for i, id_ in enumerate(ids) if id_ in ids[:i])
            raise DataError(f"{where} has a second tool call with id {shortened(to_json(repeated))}.")
        made.update(ids)
        answered = message.get("tool_call_id")
        if answered not in (None, "") and (not isinstance(answered, str) or answered not in made):
            raise DataError(
                f"{where} answers tool call {shortened(to_json(answered))}, but no earlier message has this call."
            )


def is_empty(value: object) -> bool:
    """Whether a value is null, "", or a list or object of empty values only: [], {}, [null]"""
    if isinstance(value, dict | list):
        return all(is_empty(item) for item in (value.values() if isinstance(value, dict) else value))
    return value is None or value == ""


def _read_message(raw: object, where: str) -> CheckedMessage:
    if not isinstance(raw, dict):
        raise DataError(f"{where} must be an object with role and content; got {type_name(raw)}.")
    message = {key: value for key, value in raw.items() if value is not None}
    _check_keys(message, where)
    weight = _take_weight(message, where)
    if "from" in message and "role" not in message:
        message = _from_sharegpt(message, where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ALIASES:
        got = f"role {shortened(to_json(role))}" if "role" in message else "no role"
        raise DataError(f"{where} has {got}; expected one of {', '.join(ROLES)}.")
    message["role"] = role = _ALIASES[role]
    calls = read_calls(message.pop("tool_calls", None), role, where)
    content = _read_content(message, role, bool(calls), where)
    if content is not None:
        message["content"] = content
    if calls:
        message["tool_calls"] = calls
    if role == "assistant" and not text_of(message).strip() and not calls:
        raise DataError(f"{where} (assistant) is empty: the model would learn to end a turn without any text.")
    _read_reasoning(message, role, where)
    return CheckedMessage(message, weight, where)


def _check_keys(message: Message, where: str) -> None:
    """Raises DataError for keys that change what other trainers train on, and that have no equivalent here."""
    if "function_call" in message:
        raise DataError(f"{where} has function_call, an older form of tool_calls.  Use tool_calls.")
    for key, why in _REFUSED.items():
        if not is_empty(message.get(key)):
            raise DataError(f"{where} has {key}, which is not supported: {why}.")
    for key in MEDIA:
        if not is_empty(message.get(key)):
            raise DataError(f"{where} has {key}, but only text is trained.  Remove the row, or the key and its texts.")


# Weights


def _take_weight(message: Message, where: str) -> float | None:
    """Removes the weight from a message, because templates must not see it, and returns it; None if there is none.

    Raises DataError for an invalid weight, or for two keys with weights.
    """
    weights = {name: message.pop(name) for name in (*_NUMBERS, *_MASKS, *_SWITCHES) if name in message}
    if len(weights) > 1:
        raise DataError(f"{where} has {' and '.join(weights)}, which have the same meaning.  Keep one of them.")
    for name, value in weights.items():
        if name in _SWITCHES and not isinstance(value, bool):
            raise DataError(f"{where} has {name} {type_name(value)}; expected true or false (weight takes a number).")
        if name in _NUMBERS and isinstance(value, bool):
            raise DataError(f"{where} has {name} {type_name(value)}; expected a number (train takes true or false).")
        return read_weight(value, f"the {name} of {where}")
    return None


# ShareGPT


def _from_sharegpt(message: Message, where: str) -> Message:
    sender, value = message["from"], message.get("value")
    if not isinstance(sender, str) or sender not in _SENDERS:
        raise DataError(f"{where} is from {shortened(to_json(sender))}; expected one of {', '.join(_SENDERS)}.")
    if not isinstance(value, str):
        raise DataError(f"{where} (from {sender}) must have a string as value; got {_not_text(value)}.")
    rest = {key: item for key, item in message.items() if key not in ("from", "value")}
    key = "tool_calls" if sender == "function_call" else "content"
    if key in rest:
        raise DataError(f"{where} has a value and {key}, which have the same meaning.  Keep one of them.")
    if sender != "function_call":
        return {**rest, "role": _SENDERS[sender], "content": value}
    calls = read_json(value, f"{where} (from function_call)")
    return {**rest, "role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}


# Contents


def _read_content(message: Message, role: str, calls: bool, where: str) -> str | list[dict[str, str]] | None:
    """The content: a string, or the parts of an answer with thinking parts."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [_read_part(part, role, where) for part in content]
        is_thinking = any(part["type"] == "thinking" for part in parts)
        return parts if is_thinking else "".join(part["text"] for part in parts)
    if not isinstance(content, str) and not (content is None and calls):
        raise DataError(f"{where} ({role}) must have a string as content; got {_not_text(content)}.")
    return content


def _read_part(part: object, role: str, where: str) -> dict[str, str]:
    """Checks a part of a content.  Thinking may itself be a list of texts, which are joined.

    {"type": "thinking", "thinking": [{"type": "text", "text": "so"}]} -> {"type": "thinking", "thinking": "so"}
    """
    if not isinstance(part, dict):
        raise DataError(
            f"{where} ({role}) must have a string, or parts of type text, as content; got {type_name(part)}."
        )
    kind = part.get("type")
    if kind == "thinking" and role == "assistant":
        thinking = part.get("thinking")
        if isinstance(thinking, list):
            thinking = "".join(_read_part(inner, "thinking", where)["text"] for inner in thinking)
        if not isinstance(thinking, str):
            raise DataError(f"{where} has a part of type thinking without a text under the key thinking.")
        return {"type": "thinking", "thinking": thinking}
    if kind != "text":
        allowed = "text and thinking" if role == "assistant" else "text"
        raise DataError(
            f"{where} ({role}) has a part of type {shortened(to_json(kind))}; only parts of type {allowed} are "
            "supported."
        )
    if not isinstance(part.get("text"), str):
        raise DataError(f"{where} ({role}) has a part of type text without the key text.")
    return {"type": "text", "text": part["text"]}


def _not_text(value: object) -> str:
    """The type of a value, for an error message.  For a time, also why it is a time, and how to keep the text."""
    if not isinstance(value, date | time | timedelta):
        return type_name(value)
    return (
        f"{type_name(value)}.  The library datasets reads a column of texts like 2024-01-31 as times: name the files "
        "of the dataset under files, or store the column as text"
    )


# Reasoning


def _read_reasoning(message: Message, role: str, where: str) -> None:
    """Checks the keys with reasoning.  Converts reasoning_details (OpenRouter) to reasoning_content, unless another key
    has the same text.  Raises DataError if keys contradict each other."""
    details = message.pop("reasoning_details", None)
    thoughts = {name: message[name] for name in THINKING if name in message}
    for name, thought in (thoughts | ({"reasoning_details": ""} if details else {})).items():
        if role != "assistant" or not isinstance(thought, str):
            got = f"of the {role}" if role != "assistant" else type_name(thought)
            raise DataError(f"{where} has {name}, which is {got}; expected a string in an assistant message.")
    if len(set(thoughts.values())) > 1:
        raise DataError(f"{where} has {' and '.join(thoughts)}, whose values differ.  Keep one of them.")
    if (thoughts or details) and isinstance(message.get("content"), list):
        name = next(iter(thoughts), "reasoning_details")
        raise DataError(f"{where} has {name} and also parts of type thinking.  Keep one of them.")
    if not details:
        return
    joined = _join_details(details, where)
    for name, thought in thoughts.items():
        if joined and "".join(joined.split()) != "".join(thought.split()):  # writers join entries with various spaces
            raise DataError(f"{where} has {name} and reasoning_details, whose values differ.  Keep one of them.")
    if not joined and not thoughts:
        raise DataError(
            f"{where} has reasoning_details without a text or summary: encrypted reasoning cannot be trained.  Remove "
            "the key, or give the text under reasoning_content."
        )
    if not thoughts:
        message["reasoning_content"] = joined


def _join_details(details: object, where: str) -> str:
    """The text of reasoning_details; entries with neither text nor summary, such as encrypted ones, are left out.

    [{"type": "reasoning.text", "text": "six "}, {"summary": "times"}, {"data": "gAAA"}] -> six times
    """
    texts = []
    for entry in details if isinstance(details, list) else [details]:
        if not isinstance(entry, dict):
            raise DataError(f"{where} has reasoning_details, but their value is not a list of objects.")
        text = next((entry[key] for key in ("text", "summary") if entry.get(key) is not None), "")
        if not isinstance(text, str):
            raise DataError(f"{where} has reasoning_details with {type_name(text)} as text; expected a string.")
        texts.append(text)
    return "".join(texts)
