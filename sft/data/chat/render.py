"""What a tokenizer's chat template writes for a chat.

Decides how a chat goes through its template: messages as transformers hands them over, and a stand-in for every control
string that somebody typed (`escaping.py`), so that each one in the text is the template's own.  Does not look for the
assistant's turns in the text (`turns.py`).
"""

from typing import NamedTuple

from sft.data.chat.escaping import Escaped, escape
from sft.data.chat.formats import Chat
from sft.data.chat.message_types import Message, Tools
from sft.data.chat.template import Refused, plain, prepared
from sft.data.chat.tokenizer import FolderTokenizer
from sft.errors import DataError


class RenderedChat(NamedTuple):
    """A chat and its text.

    text     what the template writes, stand-ins included
    marks    the characters inside each {% generation %} block of the text
    escaped  the chat that was rendered
    """

    text: str
    marks: list[tuple[int, int]]
    escaped: Escaped
    tokenizer: FolderTokenizer

    @property
    def messages(self) -> list[Message]:
        return self.escaped.messages

    @property
    def tools(self) -> Tools:
        return self.escaped.tools

    def render(self, messages: list[Message], *, prompt: bool = False) -> str | None:
        """Other messages with the same tools and template; None where the template refuses them."""
        try:
            return self.tokenizer.template.render(messages, self.tools, prompt=prompt)
        except Refused:
            return None


def render_chat(chat: Chat, tokenizer: FolderTokenizer) -> RenderedChat:
    """Renders a chat.  Raises DataError where the template refuses it, or does not pass stand-ins on as they are."""
    messages, tools = prepared(chat.messages), plain(chat.tools)
    escaped = escape(messages, tools, tokenizer)
    template = tokenizer.template
    text, marks = template.marked(escaped.messages, escaped.tools)
    if escaped.tokens and escaped.restore(text) != template.render(messages, tools):
        raise DataError(
            f"the chat contains the text {next(iter(escaped.tokens.values()))}, a control token of the tokenizer of "
            f"{tokenizer.name}, and chat template {template.name} treats it as more than text.  Remove it or "
            "write it differently."
        )
    return RenderedChat(text, marks, escaped, tokenizer)
