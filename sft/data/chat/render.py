"""Gives a chat to the tokenizer's template in the form that the template takes, and renders it once.

Decides the form of arguments, of thinking and of empty contents, by what small chats showed (`habits.py`): never by
trying again after an error.  The prompts that show where inference begins are rendered once for each state that changes
them: of small chats if no message can change the header, once for messages of the same shapes if only shapes can, and
otherwise of each chat.  So no mask depends on the order of chats.
"""

from functools import partial
from typing import Any, NamedTuple

from sft.data.chat.habits import Habits
from sft.data.chat.reading import Reading
from sft.data.chat.tokenizer import FolderTokenizer
from sft.data.rows.formats import Chat
from sft.data.rows.messages import Message, with_arguments, with_reasoning_keys
from sft.data.template.chat_template import Refused
from sft.data.template.rendering import Inputs, trace_inputs


class RenderedChat(NamedTuple):
    """A chat as its template wrote it.  `chat` holds the messages that the template got; `prompts` remembers those that
    were rendered of this chat, so that no mask depends on other chats."""

    chat: Chat
    inputs: Inputs
    reading: Reading
    tokenizer: FolderTokenizer
    prompts: dict[tuple[Any, ...], str | None]
    shapes: list[int]  # [messages + 1], number of the shapes of the chat's first messages; [] if they do not decide

    def prompt_after(self, num_messages: int, start: int, end: int) -> str | None:
        """The text after the last text of the chat's first messages when the template asks for an answer; None if the
        template refuses to.

        start, end  what the template wrote there in this chat.  A remembered text that differs from it is made again.
        """
        last, known, chat = self.chat.messages[num_messages - 1], self.prompts, self.chat
        written = self.reading.text[start:end]
        usual = self.tokenizer.prompts.usual(last["role"], chat.variables, has_tools=chat.tools is not None)
        if usual is not None:
            return usual
        if self.shapes:
            make = partial(self._prompt_of, num_messages)
            return self.tokenizer.prompts.of_shape(self.shapes[num_messages], written, make)
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
            return Reading(self.tokenizer.template.rendered(first, prompt=True)).after_all
        except Refused:
            return None


def render_chat(chat: Chat, tokenizer: FolderTokenizer) -> RenderedChat:
    """Renders a chat.  Raises DataError if the template refuses it."""
    chat = chat._replace(messages=prepared(chat.messages, tokenizer.habits))
    inputs = trace_inputs(chat.messages, chat.tools, chat.documents, chat.variables)
    return RenderedChat(
        chat,
        inputs,
        Reading(tokenizer.template.rendered(inputs), inputs.fields),
        tokenizer,
        {},
        tokenizer.prompts.shapes_of(chat),
    )


def prepared(messages: list[Message], habits: Habits) -> list[Message]:
    """Messages in the form that the template takes."""
    messages = with_arguments(messages, as_text=habits.calls_as_text)
    if not habits.takes_parts:
        messages = with_reasoning_keys(messages)
    if not habits.empty_content:
        return messages
    return [
        {**message, **habits.empty_content} if message.get("tool_calls") and "content" not in message else message
        for message in messages
    ]
