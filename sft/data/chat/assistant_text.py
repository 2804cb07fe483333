"""What an assistant wrote: content, thinking, tool calls; and whether a text is that and nothing else.

Does not decide where in a rendered chat it stands (`turns.py`).
"""

import re

from sft.data.chat.message_types import THINKING, THOUGHT, Message
from sft.data.chat.tokenizer import FolderTokenizer


def is_assistant_text(message: Message, text: str, tokenizer: FolderTokenizer, *, inserted: str = "") -> bool:
    """Whether `text` is what the assistant wrote: its content, or with its thinking and tool calls.

    inserted  what the template may have put before it
    """
    content, answer, thinking = content_of(message), answer_of(message), thinking_of(message)
    text = text.strip().removeprefix(inserted).strip()
    if not message.get("tool_calls"):
        if text in (content, answer):
            return True
        before = text.removesuffix(answer)
        has_thinking = bool(thinking) and text.endswith(answer) and thinking in before
        return has_thinking and not _has_header(text, message, tokenizer)
    names = [str((call.get("function") or call).get("name", "")) for call in message["tool_calls"]]
    prose = next((part for part in (content, answer) if part in text), None)
    if prose is None or _has_header(text, message, tokenizer):
        return False
    calls = text.replace(prose, "", 1) if prose else text  # a call named in the content is not yet a call
    return all(calls.count(name) >= names.count(name) for name in names)


def _has_header(text: str, message: Message, tokenizer: FolderTokenizer) -> bool:
    """Whether text begins with what asks for an answer, or with the last plain words of that: "assistant"."""
    header = tokenizer.delimiters.header.strip()
    if tokenizer.control.search(header) and header in text:
        return True
    words = tokenizer.control.split(header)[-1].strip()
    texts = (content_of(message), answer_of(message), thinking_of(message))
    is_own = any(own and text.startswith(own) for own in texts)
    return bool(words) and not is_own and re.match(re.escape(words) + r"\s", text) is not None


def is_plain(message: Message) -> bool:
    """Nothing but content."""
    return not any(message.get(key) for key in ("tool_calls", *THINKING))


def content_of(message: Message) -> str:
    return str(message.get("content") or "").strip()


def thinking_of(message: Message) -> str:
    """What the assistant thought, given by itself or at the head of the content: <think>...</think>."""
    separate = next((str(message[key]) for key in THINKING if message.get(key)), None)
    if separate is not None:
        return separate.strip()
    inside = THOUGHT.match(str(message.get("content") or ""))
    return inside[2] if inside else ""


def answer_of(message: Message) -> str:
    """The content without thinking at its head: templates leave that out of earlier turns."""
    content = content_of(message)
    inside = THOUGHT.match(content)
    return inside[4].strip() if inside else content
