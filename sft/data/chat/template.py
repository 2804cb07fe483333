"""Writes the text of a chat by its chat template, and learns the template's delimiters around an assistant's turn.

Refuses a template that leaves out the assistant's text.  Refuses a template that ends a turn without a control token,
because a model could not learn to stop.  `render.py` prepares messages for a template, `turns.py` finds the assistant's
turns, and `sandbox.py` limits time and text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import Template, meta

from sft.data.chat.messages import Message, Tools
from sft.data.chat.sandbox import Sandbox, TooMuch
from sft.data.chat.template_pattern import TemplatePattern
from sft.errors import DataError

# Variables that every template gets.  Others come from special tokens and data.chat_template_kwargs.
GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Refused(DataError):
    """The template raised an error for a chat."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the names of the tokenizer's special tokens."""

    source: str
    name: str  # name in messages to users: `of org/model`, `chat.jinja`
    special_tokens: dict[str, Any]
    switches: dict[str, Any] = field(default_factory=dict)  # data.chat_template_kwargs

    @cached_property  # cached, because every chat reads it
    def has_markers(self) -> bool:
        """Whether the template marks the assistant's text itself, by {% generation %} blocks."""
        return bool(_GENERATION.search(self.code))

    @property
    def code(self) -> str:
        """The source without comments."""
        return _COMMENT.sub("", self.source)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not define itself: messages, tools, enable_thinking, ..."""
        sandbox = self._compiled[0]
        sandbox.begin()
        return frozenset(meta.find_undeclared_variables(sandbox.parse(self.source))) - sandbox.globals.keys()

    @property
    def free_switches(self) -> list[str]:
        """The names in `variables` that have no value."""
        return sorted(self.variables - {*GIVEN, *self.special_tokens, *self.switches})

    @cached_property
    def pattern(self) -> TemplatePattern:
        """The text that this template writes between the texts of messages, learnt from its renderings."""
        return TemplatePattern()

    def render(
        self, messages: list[Message], tools: Tools, *, prompt: bool = False, switches: dict[str, Any] | None = None
    ) -> str:
        """The chat as the template writes it.  `prompt` adds the header that asks for the next answer; `switches` are
        additional variables.

        Messages are as `render.prepared` returns them.  Raises Refused, and DataError beyond the sandbox's limits.
        """
        variables = {**self.special_tokens, **self.switches, **(switches or {})}
        try:
            sandbox, template = self._compiled
            sandbox.begin()
            chunks = []
            for chunk in template.generate(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **variables
            ):
                chunks.append(chunk)
                sandbox.position += len(chunk)
            return "".join(chunks)
        except TooMuch as error:
            raise DataError(f"chat template {self.name} {error}; a chat template does not need this.") from error
        except Exception as error:  # the template is the user's code and may raise anything
            reason = str(error).strip().splitlines()
            raise Refused(
                f"chat template {self.name} refused the chat: {reason[0] if reason else type(error).__name__}"
            ) from error

    def marked(self, messages: list[Message], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """The chat as text, and the characters inside each {% generation %} block.

        transformers also makes a token mask from such spans.  That mask supervises the rest of the sequence when a
        span ends at token 0 (transformers#47325), so we map characters to tokens ourselves.
        """
        text = self.render(messages, tools)
        marks = self._compiled[0].marks
        if any(not text.startswith(inside, start) for start, inside in marks):
            raise DataError(
                f"chat template {self.name} has {{% generation %}} inside a macro or a {{% set %}} block, where the "
                "position of its text is unknown.  Put the block where the template writes the turn."
            )
        return text, [(start, start + len(inside)) for start, inside in marks]

    @cached_property
    def _compiled(self) -> tuple[Sandbox, Template]:
        sandbox = Sandbox()
        return sandbox, sandbox.bounded(self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that receives the template compiles it again and learns its pattern again.
        return ChatTemplate, (self.source, self.name, self.special_tokens, self.switches)


class TurnDelimiters(NamedTuple):
    """The text that a template writes around an assistant's turn, learned from small chats.

    lead  the text between header and content in a chat's last turn: "" or " " or "<think>\\n\\n</think>\\n\\n"
    """

    ends: tuple[str, ...]  # tokens that end a turn, the usual one first: <|eot_id|>, <|eom_id|>
    header: str  # the text that asks for an answer: <|im_start|>assistant\n
    lead: str

    def end_at(self, text: str, start: int) -> str | None:
        """The token that begins at character `start` and ends a turn; None if there is none."""
        return next((end for end in self.ends if text.startswith(end, start)), None)

    def first_end(self, text: str, start: int) -> tuple[int, int] | None:
        """Start and end, in characters, of the first token from `start` on that ends a turn."""
        spans = [(at, at + len(end)) for end in self.ends if (at := text.find(end, start)) >= 0]
        return min(spans, default=None)


_USER, _ANSWER = {"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}
_CALL = {"name": "FUNCTION", "arguments": {"x": 1}}
_CALLS = [{"id": "abcdefghi", "type": "function", "function": _CALL}]
_CALLING = {"role": "assistant", "content": "", "tool_calls": _CALLS}
_SCHEMA = {"name": "FUNCTION", "description": "", "parameters": {"type": "object", "properties": {}}}
_TOOL = {"type": "function", "function": _SCHEMA}


def _end_after_call(template: ChatTemplate, end: str, special: Iterable[str]) -> list[str]:
    """The token that ends a turn with a tool call; [] if it equals `end`, or if the template has no tools."""
    try:
        calling = template.render([_USER, _CALLING], [_TOOL]).rstrip()
        own = [token for token in special if calling.endswith(token)]
        is_other = own and end not in calling[calling.rindex(str(_CALL["name"])) :]
    except (Refused, ValueError):
        return []
    return [max(own, key=len)] if is_other else []


def learn_delimiters(template: ChatTemplate, added: Iterable[str], special: Iterable[str]) -> TurnDelimiters:
    """Learns the delimiters by rendering small chats.  Raises DataError if no control token ends a turn.

    ChatML "...assistant\\nANSWER<|im_end|>\\n" -> ends <|im_end|>, header "<|im_start|>assistant\\n", lead ""
    """
    text = template.render([_USER, _ANSWER], None)
    answer = str(_ANSWER["content"])
    if answer not in text:
        raise DataError(f"chat template {template.name} leaves out the assistant's text; the template wrote {text!r}.")
    tail = text[text.rindex(answer) + len(answer) :].strip()
    tokens = [token for token in added if tail.startswith(token)]
    if not tokens:
        wrote = f"{tail!r}, which is not a control token of the tokenizer" if tail else "nothing"
        raise DataError(
            f"chat template {template.name} ends an assistant's turn with {wrote}, so the model would not learn to "
            "stop.  Give a template (data.chat_template) that ends turns with a control token of this tokenizer."
        )
    ends = [max(tokens, key=len)]
    ends += _end_after_call(template, ends[0], special)
    try:
        prompt, before = template.render([_USER], None, prompt=True), template.render([_USER], None)
    except Refused:
        return TurnDelimiters(tuple(ends), "", "")
    for token in special:  # some templates write a further token at the end of a chat
        before = before.removesuffix(token) if not prompt.startswith(before) else before
    header = prompt.removeprefix(before) if prompt.startswith(before) else ""
    lead = text[len(prompt) : text.rindex(answer)] if text.startswith(prompt) else ""
    return TurnDelimiters(tuple(ends), header, lead)
