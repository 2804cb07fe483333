"""From messages to tokens and the mask of what the assistant wrote.

Supervised are an assistant's content and the token that ends its turn, once per turn: not the role header and
not the newline after the turn.  A mask that cannot be proven is an error, never a guess:

1. a template with {% generation %} blocks says itself what was written; we map its characters to tokens;
2. otherwise each turn is what the template adds to the chat before it (text prefix difference), provided that
   it only ever adds: templates that rewrite earlier turns are refused;
3. either way the supervised tokens must decode to the assistant's content and its end of turn.

The whole chat is rendered and tokenised once, so ids are the template's own.  Errors raised here name the
message; the caller adds file and line.  Does not decide what happens to a sample that is too long
(`encode.py`).
"""

import json
import re
from typing import Any, NamedTuple

import numpy as np

from sft.data.tokenizer import BYTE_CONTROL, ByteTokenizer, ChatTokenizer, FolderTokenizer, Message, Tools
from sft.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
# Keys of an assistant message that make a template write more than its content.
_BEYOND_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")
_SPACES = re.compile(r"\s*")


class Chat(NamedTuple):
    """A row that has been checked."""

    messages: list[Message]
    tools: Tools


class Turn(NamedTuple):
    """Characters of the rendered chat that one assistant turn supervises: text[start:end]."""

    start: int
    end: int


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
        _text_of(message).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"message {number} ({role}) holds half a surrogate pair, which is not text.") from None


def encode_chat(chat: Chat, tokenizer: ChatTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [n] and loss mask bool [n] of a chat.  Raises DataError where the mask cannot be proven.

    user "a", assistant "b", byte tokenizer:
    <|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\nb<|im_end|>\\n      supervised: b <|im_end|>
    """
    if isinstance(tokenizer, ByteTokenizer):
        return _encode_bytes(chat)
    return _encode_rendered(chat, tokenizer)


def _encode_bytes(chat: Chat) -> tuple[np.ndarray, np.ndarray]:
    """The byte tokenizer's template: ChatML; tools are JSON in a first system block."""
    start, end = BYTE_CONTROL["<|im_start|>"], BYTE_CONTROL["<|im_end|>"]
    pieces: list[tuple[int | bytes, bool]] = []
    if chat.tools:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in chat.tools)
        pieces += [
            (start, False),
            (f"system\n# Tools\n{schemas}".encode(), False),
            (end, False),
            (b"\n", False),
        ]
    for message in chat.messages:
        written = message["role"] == "assistant"
        body = [message.get("content") or ""]
        for call in message.get("tool_calls") or []:
            body.append(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>")
        text = "\n".join(part for part in body if part).encode()
        pieces += [(start, False), (f"{message['role']}\n".encode(), False)]
        pieces += [(text, written), (end, written), (b"\n", False)]
    ids = [np.frombuffer(p, dtype=np.uint8) if isinstance(p, bytes) else np.array([p]) for p, _ in pieces]
    sizes = [len(piece) for piece in ids]
    mask = np.repeat(np.array([written for _, written in pieces]), sizes)
    return np.concatenate(ids).astype(np.int32), mask


def _encode_rendered(chat: Chat, tokenizer: FolderTokenizer) -> tuple[np.ndarray, np.ndarray]:
    _refuse_control(chat, tokenizer)
    text = tokenizer.render(chat.messages, chat.tools)
    turns = (_marked_turns if tokenizer.has_markers else _prefix_turns)(text, chat, tokenizer)
    ids, starts, ends = tokenizer.encode(text)
    mask = np.zeros(len(ids), dtype=bool)
    for turn in turns:
        first = int(np.searchsorted(ends, turn.start, side="right"))
        last = int(np.searchsorted(starts, turn.end, side="left"))
        _verify_turn(text[turn.start : turn.end], ids[first:last], tokenizer)
        mask[first:last] = True
    if not mask[1:].any():
        raise DataError("no token would be supervised, so there is nothing to learn from.")
    return ids, mask


def _refuse_control(chat: Chat, tokenizer: FolderTokenizer) -> None:
    """A control token typed inside a message would end a turn where the user only mentioned it."""
    parts = {f"message {i} ({message['role']})": message for i, message in enumerate(chat.messages, start=1)}
    for name, part in {**parts, "tools": chat.tools}.items():
        typed = tokenizer.control.search(_text_of(part))
        if typed:
            raise DataError(
                f"{name} contains the text {typed.group()}, which the tokenizer of {tokenizer.name} turns "
                "into a control token.  Remove it or write it differently."
            )


def _marked_turns(text: str, chat: Chat, tokenizer: FolderTokenizer) -> list[Turn]:
    """Rung 1: one {% generation %} block per assistant turn; its end of turn stands in it or right after."""
    rendered, spans = tokenizer.marked_spans(chat.messages, chat.tools)
    if rendered != text:
        raise DataError(f"chat template {tokenizer.template_name} writes the same chat differently each time.")
    written = [message for message in chat.messages if message["role"] == "assistant"]
    if len(spans) != len(written):
        raise DataError(
            f"chat template {tokenizer.template_name} marks {len(spans)} generation blocks for "
            f"{len(written)} assistant turns.  Put {{% generation %}} around what the assistant writes, once "
            "per turn."
        )
    turns = []
    for message, (start, stop) in zip(written, spans, strict=True):
        content = (message.get("content") or "").strip()
        found = text.find(content, start, stop)
        after = _SPACES.match(text, stop).end()  # type: ignore[union-attr]  # matches the empty string too
        limit = after + len(tokenizer.end_of_turn) if text.startswith(tokenizer.end_of_turn, after) else stop
        end = -1 if found < 0 else text.find(tokenizer.end_of_turn, found + len(content), limit)
        # The block may hold thinking before the content, but not the header of the turn.
        if end < 0 or tokenizer.control.search(text, start, found):
            raise _unproven(tokenizer, message, text[start:stop])
        turns.append(Turn(start, end + len(tokenizer.end_of_turn)))
    return turns


def _prefix_turns(text: str, chat: Chat, tokenizer: FolderTokenizer) -> list[Turn]:
    """Rung 2: what the template adds for a turn, where it never changes what it wrote before."""
    turns = []
    for i, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        if i == 0:
            raise DataError(
                f"the chat opens with an assistant message, and chat template {tokenizer.template_name} has "
                "no {% generation %} block to tell what the assistant wrote.  Begin with a user or system "
                "message."
            )
        last = i + 1 == len(chat.messages)
        before = tokenizer.render(chat.messages[:i], chat.tools, add_generation_prompt=True)
        upto = text if last else tokenizer.render(chat.messages[: i + 1], chat.tools)
        if not (upto.startswith(before) and text.startswith(upto)):
            raise DataError(
                f"chat template {tokenizer.template_name} rewrites earlier text when message {i + 1} "
                "(assistant) or a later one is added, so its turn cannot be told apart.  Give a template "
                "(data.chat_template) with {% generation %} around what the assistant writes, or one that "
                "only adds text."
            )
        turns.append(_added_turn(upto, len(before), message, tokenizer))
    return turns


def _added_turn(upto: str, start: int, message: Message, tokenizer: FolderTokenizer) -> Turn:
    """The turn that ends `upto`: content and end of turn, and nothing else that the assistant did not say."""
    content = (message.get("content") or "").strip()
    found = upto.find(content, start)
    end = -1 if found < 0 else upto.find(tokenizer.end_of_turn, found + len(content))
    stop = end + len(tokenizer.end_of_turn)
    around = upto[start:found] + upto[found + len(content) : end]
    plain = not any(message.get(key) for key in _BEYOND_CONTENT)
    if end < 0 or upto[stop:].strip() or (plain and around.strip()):
        raise _unproven(tokenizer, message, upto[start:])
    return Turn(start, stop)


def _verify_turn(text: str, ids: np.ndarray, tokenizer: FolderTokenizer) -> None:
    """The last proof: the supervised tokens, and they alone, decode to the turn."""
    decoded = tokenizer.decode(ids).strip()
    if decoded not in (text.strip(), tokenizer.normalize(text).strip()):
        raise DataError(
            f"the tokenizer of {tokenizer.name} turns an assistant turn into other text: {_short(text)} "
            f"became {_short(decoded)}.  It cannot express this turn, or joins it with the text around it."
        )


def _unproven(tokenizer: FolderTokenizer, message: Message, wrote: str) -> DataError:
    return DataError(
        f"chat template {tokenizer.template_name} writes an assistant turn as {_short(wrote)} where the "
        f"content is {_short(message.get('content') or '')} and the end of turn is {tokenizer.end_of_turn}: "
        "what the assistant wrote cannot be told apart.  Give a template (data.chat_template) with "
        "{% generation %} around the content and the end of turn."
    )


def _text_of(part: object) -> str:
    return json.dumps(part, ensure_ascii=False, default=str)


def _short(text: str, limit: int = 80) -> str:
    return json.dumps(text if len(text) <= limit else text[: limit - 3] + "...", ensure_ascii=False)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    return "a string" if isinstance(value, str) else _text_of(value)
