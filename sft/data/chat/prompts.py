"""Caches the headers with which a template asks for an answer, for all chats of a run.

With many templates, headers do not depend on the texts of messages (`template/prompt_inputs.py`).  Then the renderings
of a few chats contain all headers that the template can write.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sft.data.chat.habits import Habits, small_chat
from sft.data.chat.reading import Reading
from sft.data.rows.formats import Chat
from sft.data.template.chat_template import ChatTemplate
from sft.data.template.prompt_inputs import PromptInputs, shape
from sft.errors import DataError

_MOST = 1_000  # cached prompts; rows may have many different variables
_MOST_SHAPES = 100_000  # cached shapes of beginnings of chats


@dataclass
class Prompts:
    """The headers that one template writes when it asks for an answer, cached."""

    template: ChatTemplate
    habits: Habits
    _cached: dict[tuple[Any, ...], str | None] = field(default_factory=dict)
    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def usual(self, role: str, variables: dict[str, Any], *, has_tools: bool) -> str | None:
        """The text after the last text of a small chat when the template asks for an answer.

        None if the template refuses the chat, or if messages can change this text.
        role: role of the small chat's last message
        """
        if self.template.prompt_inputs is not PromptInputs.NOTHING:
            return None

        def make() -> str | None:
            messages, tools = small_chat(role, self.habits, has_tools=has_tools)
            try:
                return Reading(self.template.render(messages, tools, prompt=True, variables=variables)).after_all
            except DataError:
                return None

        return self.cached((role, has_tools, repr(variables)), make)

    def shapes_of(self, chat: Chat) -> list[int]:
        """A list of [messages + 1] numbers: entry n stands for the shapes of the first n messages.  Beginnings of chats
        with equal shapes, equal variables of the row, and tools or none, have equal numbers.

        Empty if prompts depend on more than shapes or on nothing (`PromptInputs`), or if too many shapes are cached.
        """
        if self.template.prompt_inputs is not PromptInputs.SHAPES or len(self._numbers) > _MOST_SHAPES:
            return []
        numbers = [self._number(chat.tools is not None, repr(chat.variables))]
        for message in chat.messages:
            numbers.append(self._number(numbers[-1], shape(message)))
        return numbers

    def _number(self, *of: Any) -> int:
        return self._numbers.setdefault(of, len(self._numbers))

    def cached(self, key: tuple[Any, ...], make: Callable[[], str | None]) -> str | None:
        """The prompt of this key.  Calls `make` once and caches the prompt; if the cache is full, calls it each
        time."""
        if key not in self._cached:
            if len(self._cached) >= _MOST:
                return make()
            self._cached[key] = make()
        return self._cached[key]
