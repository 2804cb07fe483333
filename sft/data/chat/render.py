"""Renders a chat by the tokenizer's chat template.  Control strings that a user typed are not taken for the template's.

    user "What does <|im_end|> do?"
    <|im_start|> user \\n What does < | im _end | > do ? <|im_end|>        two control ids, not three

Rendered text does not show whether the user or the template wrote a control string.  So before rendering, each control
string in the messages is replaced by a stand-in of the same length: one private character, repeated, that the chat does
not contain.  Proofs about the rendered text then hold for the real text, character by character.  If a template changes
stand-ins (because it splits texts, or looks for control strings in them), the chat is refused.

A template gets the messages as in transformers.  `turns.py` finds the assistant's turns in the text, and `tokens.py`
tokenises the text.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from sft.data.chat.formats import Chat
from sft.data.chat.messages import THINKING, Message, Tools, with_arguments, with_reasoning_keys
from sft.data.chat.tokenizer import FolderTokenizer
from sft.errors import DataError

_PRIVATE = (0xF0000, 0x10FFFE)  # Unicode planes 15 and 16: characters for private use


class RenderedChat(NamedTuple):
    """A chat with a stand-in for every typed control string, and its text."""

    text: str  # the template's text for `messages` and `tools`
    real_text: str  # the same text with the typed control strings, at the same positions
    marks: list[tuple[int, int]]  # the characters inside each {% generation %} block of the text
    messages: list[Message]
    tools: Tools
    stand_ins: dict[str, str]  # a private character -> <|im_end|>
    everything: str  # all texts in the chat, for finding characters that the chat does not contain
    tokenizer: FolderTokenizer


def render_chat(chat: Chat, tokenizer: FolderTokenizer) -> RenderedChat:
    """Renders a chat.  Raises DataError if the template refuses the chat or changes stand-ins."""
    real_messages, real_tools = prepared(chat.messages), _plain(chat.tools)
    messages, tools, stand_ins, everything = _escape(real_messages, real_tools, tokenizer)
    template = tokenizer.template
    text, marks = template.marked(messages, tools)
    real_text = restored(text, stand_ins)
    if stand_ins and real_text != template.render(real_messages, real_tools):
        raise DataError(
            f"the chat contains the text {next(iter(stand_ins.values()))}, a control token of the tokenizer of "
            f"{tokenizer.name}, and chat template {template.name} does not treat this text as plain text.  Remove or "
            "change the text."
        )
    return RenderedChat(text, real_text, marks, messages, tools, stand_ins, everything, tokenizer)


def restored(text: str, stand_ins: dict[str, str]) -> str:
    """`text` with control strings in place of stand-ins; positions do not change."""
    for character, token in stand_ins.items():
        text = text.replace(character * len(token), token)
    return text


def prepared(messages: list[Message]) -> list[Message]:
    """Messages as transformers passes them to a template: without nulls, and with reasoning under all of its keys.

    {"content": None, "tool_calls": [...]} -> {"tool_calls": [...]}
    {"thinking": "so"}                     -> {"thinking": "so", "reasoning_content": "so"}
    """
    result = []
    for message in with_arguments(with_reasoning_keys(messages), as_text=False):
        present = {
            key: value if type(value) is str else _plain(value) for key, value in message.items() if value is not None
        }
        if not present.keys().isdisjoint(THINKING):
            thinking = next(present[key] for key in THINKING if key in present)
            present = {"thinking": thinking, **present, "reasoning_content": thinking}
        result.append(present)
    return result


def _plain(value: Any) -> Any:
    """`value` with JSON's types only, because a template could call methods of other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _escape(
    messages: list[Message], tools: Tools, tokenizer: FolderTokenizer
) -> tuple[list[Message], Tools, dict[str, str], str]:
    """The chat with stand-ins for its control strings, also in names and arguments of tools; the control string of each
    stand-in; and all texts of the chat."""
    values = [value for message in messages for value in message.values()]
    others = [value for value in values if type(value) is not str]
    texts = [*(value for value in values if type(value) is str), *_texts([*others, tools])]
    control, everything = tokenizer.control, "\0".join(texts)
    if not any(head in everything for head in tokenizer.control_heads):
        return messages, tools, {}, everything
    tokens = sorted({token for text in texts for token in control.findall(text)})
    characters = dict(zip(tokens, free_characters(everything, len(tokens)), strict=True))

    def replaced(value: Any) -> Any:
        if isinstance(value, str):
            return control.sub(lambda match: characters[match.group()] * len(match.group()), value)
        if isinstance(value, dict):
            return {replaced(key): replaced(item) for key, item in value.items()}
        return [replaced(item) for item in value] if isinstance(value, list) else value

    stand_ins = {character: token for token, character in characters.items()}
    return replaced(messages), replaced(tools), stand_ins, everything + "".join(stand_ins)


def _texts(part: object) -> Iterator[str]:
    """Every text in a part of a chat, names of keys included."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        yield from part
        for value in part.values():
            if type(value) is str:
                yield value
            else:
                yield from _texts(value)
    elif isinstance(part, list):
        for item in part:
            yield from _texts(item)


def free_characters(everything: str, count: int) -> list[str]:
    """The first `count` private characters that a text does not contain.  Raises DataError if too few are left."""
    free = list(islice((c for c in map(chr, range(*_PRIVATE)) if c not in everything), count))
    if len(free) < count:
        raise DataError(
            "the chat contains private-use characters of Unicode's planes 15 and 16.  Remove these characters."
        )
    return free
