"""Finds the texts of a chat that its template leaves out, and why.

The texts of a chat are contents, reasoning, tool calls, tool results, schemas of tools, documents, and variables of the
row.

Qwen2.5, an answer with reasoning_content "six times seven" and content "42"
...<|im_start|>assistant\\n42<|im_end|>\\n                          left out: assistant reasoning of message 2

A text counts as left out if some of its characters are not the source of any character of the rendering.  Spaces and
the tags <think> and </think> do not count.  So a text that the template moves, trims or writes as JSON is not left out.
The reason for an omission is found by rendering variants of the chat, never from the name of a model.
`data.on_omitted` decides what happens to chats with omitted texts.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sft.data.chat.reading import Reading
from sft.data.chat.render import RenderedChat
from sft.data.chat.supervised import Supervise, weights_of_turns
from sft.data.rows.messages import THINKING
from sft.data.template.chat_template import Refused
from sft.data.template.rendering import DOCUMENTS, TOOLS, VARIABLES
from sft.data.template.sources import Field
from sft.errors import DataError

_KEYS = {"reasoning": THINKING, "tool call": ("tool_calls",), "tool schema": ("tools",), "document": ("documents",)}
# Thinking at the start of a content, in four parts: opening tag, thinking, closing tag, answer.  Without an opening
# tag, the line must end after the closing tag: "Write </think> at its end." is an answer.
_THOUGHT = re.compile(
    r"(\s*<think>\s*)(.*?)(\s*</think>\s*)(.*)|(\s*)(.*?)(\s*</think>[^\S\n]*(?:\n\s*|\Z))(.*)", re.DOTALL
)


class OmittedText(NamedTuple):
    """The texts of one kind that the template leaves out of one message, tool or document."""

    number: int  # number of the message, tool or document, from 1
    role: str
    kind: str
    text: str  # the first omitted text


def find_omitted(chat: RenderedChat, reading: Reading | None = None) -> list[OmittedText]:
    """The texts that the template leaves out of a chat: for each message and kind the first text; texts of tools,
    documents and variables come first.

    reading: another rendering of the chat; None: the rendering of `chat`
    """
    missing = dict((reading or chat.reading).unwritten)
    firsts: dict[tuple[bool, int, str, str], str] = {}
    for field, gaps in missing.items():
        for number, role, kind, text in _named(field, gaps, missing, chat):
            firsts.setdefault((role not in (TOOLS, DOCUMENTS, VARIABLES), number, role, kind), text)
    return [OmittedText(number, role, kind, text) for (_, number, role, kind), text in sorted(firsts.items())]


def lost_texts(chat: RenderedChat, supervise: Supervise) -> list[OmittedText]:
    """The texts that the template leaves out, except reasoning of turns that are not supervised.

    The model does not see such reasoning when it is used, either: it belongs to an earlier turn of a prompt.
    """
    learnt = weights_of_turns(chat.chat, supervise)
    return [text for text in find_omitted(chat) if text.kind != "reasoning" or text.number - 1 in learnt]


def in_no_rendering(omitted: Sequence[list[OmittedText]], turns: Sequence[int]) -> list[OmittedText]:
    """The texts that are left out by every rendering of a chat that contains their message.

    omitted  for each rendering, the texts that it leaves out
    turns    for each rendering, the index of its last message, rising
    """
    counts = Counter(text[:3] for texts in omitted for text in texts)
    firsts = {text[:3]: text for texts in reversed(omitted) for text in texts}
    lost = []
    for (number, role, kind), count in counts.items():
        is_of_message = role not in (TOOLS, DOCUMENTS, VARIABLES)
        if count == sum(not is_of_message or number <= turn + 1 for turn in turns):
            lost.append(firsts[number, role, kind])
    return lost


def why_omitted(chat: RenderedChat, omitted: OmittedText) -> str:
    """A sentence: the reason why the template leaves out a text, and a way to keep the text.

    The first reason that applies:
    a switch     the template reads a variable that has no value, and writes the text if the variable is true or false
    no key       the template does not read the key that holds the text
    the prompt   the template writes the text when it asks for the last answer, but not if the answer follows
    a later one  the template writes the text until a certain later message follows
    another      the sentence gives no reason, and asks for another template

    GLM-4.6, reasoning  ->  data.chat_template_kwargs: {clear_thinking: false} keeps it.
    """
    template, messages = chat.tokenizer.template, chat.chat.messages
    if switch := _switch(chat, omitted):
        name, value = switch
        return f"data.chat_template_kwargs: {{{name}: {str(value).lower()}}} keeps it."
    if omitted.role == VARIABLES:
        return f"Variables that the template reads: {', '.join(template.free_switches) or 'none'}."
    is_of_message = omitted.role not in (TOOLS, DOCUMENTS)
    index = omitted.number - 1 if is_of_message else -1
    names = _KEYS.get(omitted.kind, ())
    in_content = omitted.kind == "reasoning" and not any(messages[index].get(name) for name in names)
    if names and not in_content and not any(name in template.code for name in names):
        return f"The template never reads {names[0]}: give a template that does (data.chat_template)."
    last_answer = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last_answer is not None and index < last_answer and _is_written(chat, omitted, last_answer, prompt=True):
        return (
            "The template writes this text in a prompt without an answer, and leaves it out if the answer follows: "
            "the model is trained without the text, but used with it.  Give a template that keeps the text "
            "(data.chat_template)."
        )
    if 0 <= index < len(messages) - 1 and (later := _dropped_at(chat, omitted, index)) is not None:
        role = messages[later]["role"]
        where = "for turns after the last user message" if role == "user" else f"until a message of the {role} follows"
        why = f"The template writes this text only {where}."
        if messages[index]["role"] != "assistant":
            return f"{why}  Give a template that keeps the text (data.chat_template)."
        only = "after_last_user learns only the turns that have it" if role == "user" else "last learns only the last"
        return f"{why}  data.turns: each learns every turn with its text; data.supervise: {only}."
    return "Give a template that writes this text (data.chat_template)."


def _switch(chat: RenderedChat, omitted: OmittedText) -> tuple[str, bool] | None:
    """A variable and a value (True or False) with which the template writes this text, and every text that it writes
    now.  None: there is no such variable."""
    now = {text[:3] for text in find_omitted(chat)}
    for name in chat.tokenizer.template.free_switches:
        for value in (True, False):
            with_switch = _omitted_with(chat, variables={name: value})
            if with_switch is not None and {text[:3] for text in with_switch} <= now - {omitted[:3]}:
                return name, value
    return None


def _dropped_at(chat: RenderedChat, omitted: OmittedText, index: int) -> int | None:
    """The index of a message without which the template writes a text, and with which it leaves it out.

    None: it also leaves the text out of a chat that ends with the text's own message.
    index: the index of the text's message, which is not the last
    """
    if not _is_written(chat, omitted, index + 1, prompt=False):
        return None
    # A chat of the first `high` messages always loses the text; one of the first `low` never does, or is refused.
    low, high = index + 1, len(chat.chat.messages)
    while high - low > 1:
        middle = (low + high) // 2
        lost = _omitted_with(chat, num_messages=middle)
        if lost is not None and omitted[:3] in {text[:3] for text in lost}:
            high = middle
        else:
            low = middle
    return high - 1


def _is_written(chat: RenderedChat, omitted: OmittedText, num_messages: int, *, prompt: bool) -> bool:
    """Whether the template writes a text if the chat has only its first `num_messages` messages."""
    lost = _omitted_with(chat, num_messages=num_messages, prompt=prompt)
    return lost is not None and omitted[:3] not in {text[:3] for text in lost}


def _omitted_with(
    chat: RenderedChat,
    *,
    num_messages: int | None = None,
    prompt: bool = False,
    variables: dict[str, Any] | None = None,
) -> list[OmittedText] | None:
    """The texts that the template leaves out of a variant of the chat; None if the template refuses the variant.

    num_messages  number of messages of the variant; None: all
    variables     further variables of the variant
    """
    inputs = chat.inputs._replace(
        messages=chat.inputs.messages[:num_messages], variables={**chat.inputs.variables, **(variables or {})}
    )
    try:
        rendering = chat.tokenizer.template.rendered(inputs, prompt=prompt)
    except (Refused, DataError):
        return None
    fields = [f for f in inputs.fields if f.message is None or f.message < len(inputs.messages)]
    return find_omitted(chat, Reading(rendering, fields))


def _named(
    field: Field, gaps: list[tuple[int, int]], missing: dict[Field, list[tuple[int, int]]], chat: RenderedChat
) -> Iterator[tuple[int, str, str, str]]:
    """Yields number, role, kind and text of each omission of a field; nothing if the model need not see the field."""
    path, role = field.path, field.role
    if role == VARIABLES:
        if path[0] not in chat.tokenizer.template.variables:
            yield 1, role, "template variable", str(path[0])
    elif field.message is None:
        is_name = str(path[-1]).endswith("=") and path[-2] == "properties"
        if role == DOCUMENTS or is_name or path[-1] in ("name", "description"):
            number = int(path[0]) + 1
            yield number, role, "document" if role == DOCUMENTS else "tool schema", field.text
    elif path[0] in THINKING:
        if all(other in missing for other in chat.thinking[field.message]):
            yield field.message + 1, role, "reasoning", field.text
    elif path[0] == "tool_calls":
        if path[-1] == "name" or "arguments" in path:
            yield field.message + 1, role, "tool call", field.text
    elif path[0] == "content" and path[-1] != "type" and not str(path[-1]).endswith("="):
        if path[-1] == "thinking":
            yield field.message + 1, role, "reasoning", field.text
        else:
            for kind, text in _of_content(field, gaps):
                yield field.message + 1, role, "tool result" if role == "tool" else kind, text


def _of_content(field: Field, gaps: list[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """Kind and text of the omitted parts of a content: reasoning at its start, and the rest."""
    inside = _THOUGHT.match(field.text) if field.role == "assistant" and "</think>" in field.text else None
    if inside is None:
        yield "content", field.text
        return
    first = 2 if inside[4] is not None else 6
    for kind, group in (("reasoning", first), ("content", first + 2)):
        start, end = inside.span(group)
        if any(field.text[max(a, start) : min(b, end)].strip() for a, b in gaps):
            yield kind, inside[group]
