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
from typing import NamedTuple

import numpy as np

from sft.data.formats import Chat, text_of
from sft.data.tokenizer import BYTE_CONTROL, ByteTokenizer, ChatTokenizer, FolderTokenizer, Message
from sft.errors import DataError

# Keys of an assistant message that make a template write more than its content.
_BEYOND_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")
_SPACES = re.compile(r"\s*")


class Turn(NamedTuple):
    """Characters of the rendered chat that one assistant turn supervises: text[start:end]."""

    start: int
    end: int


def encode_chat(chat: Chat, tokenizer: ChatTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [n] and their weights float32 [n], above 0 where supervised.  Raises DataError where that cannot
    be proven.

    user "a", assistant "b", byte tokenizer:
    <|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\nb<|im_end|>\\n      supervised: b <|im_end|>
    """
    ids, mask = _encode_bytes(chat) if isinstance(tokenizer, ByteTokenizer) else _encode_rendered(chat, tokenizer)
    return ids, mask.astype(np.float32)


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
        typed = tokenizer.control.search(text_of(part))
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


def _short(text: str, limit: int = 80) -> str:
    return json.dumps(text if len(text) <= limit else text[: limit - 3] + "...", ensure_ascii=False)
