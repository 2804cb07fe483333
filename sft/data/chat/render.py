"""Renders a chat once with the tokenizer's template, in the form that the template takes.

Decides the form of arguments, of thinking and of empty contents from the renderings of small chats (`habits.py`), never
by a second try after an error.  Also renders prompts, which show where inference begins.  If messages cannot change the
header of a prompt, the prompts of small chats are used for all chats.  If only the shapes of messages can change it,
one prompt is rendered for all beginnings of chats with equal shapes.  Otherwise each chat has its own prompts.  So no
mask depends on the order of chats.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from sft.data.chat.habits import Habits
from sft.data.chat.reading import Reading
from sft.data.chat.tokenizer import FolderTokenizer
from sft.data.rows.formats import Chat
from sft.data.rows.messages import THINKING, Message, with_arguments, with_reasoning_keys
from sft.data.template.chat_template import Refused
from sft.data.template.rendering import TemplateInputs, trace_inputs
from sft.data.template.replay import KeptResults
from sft.data.template.sources import Field


class RenderedChat(NamedTuple):
    """A chat with its rendering.

    chat      the messages in the form that the template takes
    inputs    the chat as the template's inputs, with traced texts
    prompts   the cache of this chat's prompts; other chats do not use it, so no mask depends on other chats
    shapes    numbers for the shapes of the chat's beginnings (`Prompts.shapes_of`)
    kept      results of the template's statements for this chat
    thinking  {index of a message: the fields of its thinking}
    """

    chat: Chat
    inputs: TemplateInputs
    reading: Reading
    tokenizer: FolderTokenizer
    prompts: dict[tuple[Any, ...], str | None]
    shapes: list[int]
    kept: KeptResults
    thinking: dict[int, list[Field]]

    def prompt_after(self, num_messages: int, start: int, end: int) -> str | None:
        """The text that the template writes after the first `num_messages` messages when it asks for an answer.

        start, end  the span of the text after these messages in the rendering of the whole chat.  A prompt from the
                    chat's own cache is used only if this text begins with the prompt, or equals the text for which the
                    prompt was made
        None if the template refuses these messages.
        """
        last, known, chat = self.chat.messages[num_messages - 1], self.prompts, self.chat
        written = self.reading.text[start:end]
        usual = self.tokenizer.prompts.usual(last["role"], chat.variables, has_tools=chat.tools is not None)
        if usual is not None:
            return usual
        if self.shapes:
            make = partial(self._prompt_of, num_messages)
            return self.tokenizer.prompts.cached((self.shapes[num_messages], written), make)
        state = (last["role"], bool(last.get("tool_calls")))
        shown = known.get(state)
        if shown is not None and self.reading.text.startswith(shown, start):
            return shown
        key = (*state, written)
        if key in known:
            return known[key]
        shown = self._prompt_of(num_messages)
        known.setdefault(state, shown)
        known[key] = shown
        return shown

    def _prompt_of(self, num_messages: int) -> str | None:
        first = self.inputs._replace(messages=self.inputs.messages[:num_messages])
        try:
            return Reading(self.tokenizer.template.rendered(first, prompt=True, kept=self.kept)).after_all
        except Refused:
            return None


def render_chat(chat: Chat, tokenizer: FolderTokenizer) -> RenderedChat:
    """The rendering of a chat.  Raises DataError if the template refuses the chat."""
    chat = chat._replace(messages=prepared(chat.messages, tokenizer.habits))
    inputs = trace_inputs(chat.messages, chat.tools, chat.documents, chat.variables)
    kept = KeptResults()
    reading = Reading(tokenizer.template.rendered(inputs, kept=kept), inputs.fields)
    shapes = tokenizer.prompts.shapes_of(chat)
    return RenderedChat(chat, inputs, reading, tokenizer, {}, shapes, kept, _thinking(inputs))


def render_turns(chat: Chat, tokenizer: FolderTokenizer, turns: Sequence[int]) -> Iterator[RenderedChat]:
    """Yields for each index in `turns` the rendering of the chat up to this message.  Raises DataError as
    `render_chat`.

    Statements of the template whose result is the same in several renderings are executed once (`template/replay.py`).
    """
    chat = chat._replace(messages=prepared(chat.messages, tokenizer.habits))
    inputs = trace_inputs(chat.messages, chat.tools, chat.documents, chat.variables)
    shapes = tokenizer.prompts.shapes_of(chat)
    kept, thinking = KeptResults(), _thinking(inputs)
    for turn in turns:
        first = inputs._replace(
            messages=inputs.messages[: turn + 1],
            fields=tuple(field for field in inputs.fields if field.message is None or field.message <= turn),
        )
        part = chat._replace(messages=chat.messages[: turn + 1])
        reading = Reading(tokenizer.template.rendered(first, kept=kept), first.fields)
        yield RenderedChat(part, first, reading, tokenizer, {}, shapes[: turn + 2], kept, thinking)


def _thinking(inputs: TemplateInputs) -> dict[int, list[Field]]:
    fields: dict[int, list[Field]] = {}
    for field in inputs.fields:
        if field.message is not None and field.path[0] in THINKING:
            fields.setdefault(field.message, []).append(field)
    return fields


def prepared(messages: list[Message], habits: Habits) -> list[Message]:
    """The messages in the form that the template takes."""
    messages = with_arguments(messages, as_text=habits.calls_as_text)
    if not habits.takes_parts:
        messages = with_reasoning_keys(messages)
    if not habits.empty_content:
        return messages
    return [
        {**message, **habits.empty_content} if message.get("tool_calls") and "content" not in message else message
        for message in messages
    ]
