"""What a row of a data file says: a chat that has been checked, in whatever shape it was written.

Decides which shapes are understood and which rows are wrong by themselves.  Errors raised here name the message;
the caller adds file and line.  Does not know tokenizers or templates (`chat.py`).
"""

import json
from typing import Any, NamedTuple

from sft.data.tokenizer import Message, Tools
from sft.errors import DataError

ROLES = ("system", "user", "assistant", "tool")


class Chat(NamedTuple):
    """A row that has been checked.

    weights  what a supervised token of each message weighs, 0 for a message not to be trained on; None: 1 for all
    """

    messages: list[Message]
    tools: Tools
    weights: tuple[float, ...] | None = None


def check_row(row: object) -> Chat:
    """The chat of one row, {"messages": [...], "tools": [...]}; other keys of the row are ignored.

    Raises DataError: `message 3 has role "assitant"; expected one of system, user, assistant, tool.`
    """
    if not isinstance(row, dict):
        raise DataError(f"a row is an object with messages; got {_kind(row)}.")
    if "messages" not in row:
        keys = ", ".join(map(str, row)) or "none"
        raise DataError(f"no messages: a row is an object with messages; the keys here are: {keys}.")
    messages, tools = row["messages"], row.get("tools")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"messages must be a list of at least one message; got {_kind(messages)}.")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"tools must be a list of objects; got {_kind(tools)}.")
    for number, message in enumerate(messages, start=1):
        _check_message(number, message)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("no assistant turn, so there is nothing to learn from.")
    return Chat(messages, tools or None)


def _check_message(number: int, message: object) -> None:
    if not isinstance(message, dict):
        raise DataError(f"message {number} must be an object with role and content; got {_kind(message)}.")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        got = f"role {json.dumps(role)}" if "role" in message else "no role"
        raise DataError(f"message {number} has {got}; expected one of {', '.join(ROLES)}.")
    calls = message.get("tool_calls")
    if calls is not None:
        if role != "assistant":
            raise DataError(f"message {number} is of the {role} and has tool_calls; only an assistant calls tools.")
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise DataError(f"message {number} has tool_calls that are not a list of objects.")
    if not isinstance(content, str) and not (content is None and calls):
        raise DataError(f"message {number} ({role}) must have a string as content; got {_kind(content)}.")
    if role == "assistant" and not (content or "").strip() and not calls:
        raise DataError(f"message {number} (assistant) is empty: it would teach to end a turn without a word.")
    try:
        text_of(message).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"message {number} ({role}) holds half a surrogate pair, which is not text.") from None


def text_of(part: object) -> str:
    """A part of a chat as one text, for searching in it."""
    return json.dumps(part, ensure_ascii=False, default=str)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    return "a string" if isinstance(value, str) else text_of(value)
