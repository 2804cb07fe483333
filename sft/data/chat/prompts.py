"""Headers that ask for an answer, remembered for the chats of a run: all that a template can write there is known after
a few chats, if not the texts of messages but less decides it (`template/prompt_inputs.py`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sft.data.chat.habits import Habits, small_chat
from sft.data.chat.reading import Reading
from sft.data.rows.formats import Chat
from sft.data.template.chat_template import ChatTemplate
from sft.data.template.prompt_inputs import PromptInputs, shape
from sft.errors import DataError

_MOST = 1_000  # prompts of one template; rows may give as many variables
_MOST_SHAPES = 100_000  # of the first messages of chats


@dataclass
class Prompts:
    """What one template writes when it is asked for an answer."""

    template: ChatTemplate
    habits: Habits
    _usual: dict[tuple[str, bool, str], str | None] = field(default_factory=dict)
    _of_shapes: dict[tuple[int, str], str | None] = field(default_factory=dict)
    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def usual(self, role: str, variables: dict[str, Any], *, has_tools: bool) -> str | None:
        """The text after the last text of a small chat, whose last message has this role, when the template asks for an
        answer; None if the template refuses to, or if messages can change it."""
        if self.template.prompt_inputs is not PromptInputs.NOTHING:
            return None
        key = role, has_tools, repr(variables)
        if key not in self._usual:
            messages, tools = small_chat(role, self.habits, has_tools=has_tools)
            try:
                rendering = self.template.render(messages, tools, prompt=True, variables=variables)
            except DataError:
                prompt = None
            else:
                prompt = Reading(rendering).after_all
            if len(self._usual) >= _MOST:
                return prompt
            self._usual[key] = prompt
        return self._usual[key]

    def shapes_of(self, chat: Chat) -> list[int]:
        """[messages + 1] for each number of the chat's first messages a number that chats of the same shapes share;
        [] if more than shapes decides a prompt, or if there are too many different ones."""
        if self.template.prompt_inputs is not PromptInputs.SHAPES or len(self._numbers) > _MOST_SHAPES:
            return []
        numbers = [self._number(chat.tools is not None, repr(chat.variables))]
        for message in chat.messages:
            numbers.append(self._number(numbers[-1], shape(message)))
        return numbers

    def _number(self, *of: Any) -> int:
        return self._numbers.setdefault(of, len(self._numbers))

    def of_shape(self, number: int, written: str, make: Callable[[], str | None]) -> str | None:
        """The prompt after messages of these shapes, of which the template wrote `written` in a chat; made once."""
        key = number, written
        if key not in self._of_shapes:
            if len(self._of_shapes) >= _MOST:
                return make()
            self._of_shapes[key] = make()
        return self._of_shapes[key]
