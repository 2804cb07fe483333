"""Renders chats with a chat template and its variables.

Decides which variables a template gets, and which of a tokenizer's templates renders a chat.  `rendering.py` gives the
inputs their sources, `sandbox.py` runs the template, and `chat/turns.py` decides which text is supervised.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateSyntaxError, meta

from sft.data import limited
from sft.data.rows.chat_keys import GIVEN
from sft.data.rows.messages import Message, Tools, shortened
from sft.data.template.limits import TooMuch
from sft.data.template.prompt_inputs import PromptInputs, prompt_inputs
from sft.data.template.rendering import Output, Rendering, TemplateInputs, collected, trace_inputs
from sft.data.template.replay import KeptResults
from sft.data.template.sandbox import Sandbox
from sft.data.template.sources import CONSTANT
from sft.data.template.trace import Text
from sft.data.work import Meter
from sft.errors import DataError

DATE = "2026-01-01"  # the default of data.date
MAX_SOURCE = 1_000_000  # characters; the largest template of a released model has some 30,000
_MOST_REASON = 500  # characters of a template's error that messages show
_MOST_LINE = 120  # characters of a line of a template


class Refused(DataError):
    """The error if a template raises an error for a chat."""


class UnreadableTemplate(Refused):
    """The error if a template cannot be compiled, so that it renders no chat."""


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer, and the variables that it gets in a run.

    source          the Jinja template
    name            its name in messages to users: `of org/model`, `chat.jinja`
    special_tokens  variables from the tokenizer: {"bos_token": "<s>", ...}
    switches        data.chat_template_kwargs
    with_tools      the template for chats with tools, if the tokenizer has a separate one
    date            data.date, YYYY-MM-DD
    """

    source: str
    name: str
    special_tokens: dict[str, Any]
    switches: dict[str, Any] = field(default_factory=dict)
    with_tools: str | None = None
    date: str = DATE

    def __post_init__(self) -> None:
        if (length := max(map(len, self.sources))) > MAX_SOURCE:
            raise DataError(
                f"chat template {self.name} has {length:,} characters; one of at most {MAX_SOURCE:,} can be used, and "
                "released models have 30,000 at most.  Give another with data.chat_template."
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """The template, and the separate template for chats with tools if there is one."""
        return (self.source,) if self.with_tools is None else (self.source, self.with_tools)

    @property
    def code(self) -> str:
        """The sources without comments."""
        return _without_comments("\n".join(self.sources))

    @property
    def asks_for_date(self) -> bool:
        """Whether the text depends on data.date."""
        return "strftime_now" in self.code

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads without defining them: messages, tools, enable_thinking, ..."""
        return limited.call(f"chat template {self.name}", _names_read, self)

    @cached_property
    def prompt_inputs(self) -> PromptInputs:
        """The inputs on which the header of a prompt may depend, besides the variables of the run and of the row."""
        fixed = self.variables - {"messages", "tools", "documents"}
        inputs = {prompt_inputs(self._compiled[0][0].parse(source), fixed) for source in self.sources}
        return max(inputs, key=list(PromptInputs).index)

    @property
    def free_switches(self) -> list[str]:
        """The names in `variables` to which neither the run nor every chat gives a value, sorted."""
        return sorted(self.variables - {*GIVEN, *self.special_tokens, *self.switches})

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        prompt: bool = False,
        documents: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> Rendering:
        """The rendering of a chat.

        prompt     whether the template adds the header that asks for the next answer
        variables  the row's variables, which replace those of the recipe

        Raises Refused if the template raises an error, and DataError beyond the sandbox's limits.
        """
        return self.rendered(trace_inputs(messages, tools, documents, variables or {}), prompt=prompt)

    def rendered(self, inputs: TemplateInputs, *, prompt: bool = False, kept: KeptResults | None = None) -> Rendering:
        """The rendering of inputs that have sources (`trace_inputs`).  Raises the errors of `render`.

        kept: results of other renderings that begin with the same messages and have the same other inputs; this
              rendering uses them and adds its own
        """
        which = -1 if inputs.tools else 0
        sandbox, template = self._compiled[which]
        copied = 0 if kept is None else kept.copied
        with self._refusing("refused the chat", self.sources[which]), self.meter as meter:
            output = Output([], [])
            numbers = {id(message): i for i, message in enumerate(inputs.messages)}
            sandbox.begin(inputs.containers, numbers, self._lists_of_run | {id(inputs.messages)})
            sandbox.begin_output(output, kept)
            context = template.new_context(
                {
                    "messages": inputs.messages,
                    "tools": inputs.tools,
                    "documents": inputs.documents,
                    "add_generation_prompt": prompt,
                    **self._of_run,
                    **inputs.variables,
                }
            )
            rendering = collected(template.root_render_func(context), lambda: sandbox.message, output)
            meter.characters += len(rendering.text) - (0 if kept is None else kept.copied - copied)
            return rendering

    @cached_property
    def meter(self) -> Meter:
        """The work of all renderings of this object."""
        return Meter()

    @contextmanager
    def _refusing(self, outcome: str, source: str, kind: type[Refused] = Refused) -> Iterator[None]:
        """A context that turns an error of the template into `kind`, and TooMuch into DataError.

        outcome: what the template did, for the message, such as "refused the chat"
        source: the template that runs or is compiled, of which the message shows a line
        """
        try:
            yield
        except TooMuch as error:
            raise DataError(f"chat template {self.name} {error}; a chat template does not need this.") from error
        except MemoryError:  # depends on the machine, not on the chat
            raise
        except Exception as error:  # the template is the user's code and may raise anything, also when it is compiled
            raise kind(f"chat template {self.name} {outcome}: {_reason(error)}{_source_line(error, source)}") from error

    @cached_property
    def _of_run(self) -> dict[str, Any]:
        """The variables of the run: special tokens and data.chat_template_kwargs.  Their source is CONSTANT."""
        variables = {**self.special_tokens, **self.switches}
        return {name: Text.of(v, CONSTANT) if isinstance(v, str) else v for name, v in variables.items()}

    @cached_property
    def _lists_of_run(self) -> frozenset[int]:
        """id() of each list in the variables of the run, also of lists inside lists and objects."""
        ids, waiting = set(), [*self._of_run.values()]
        while waiting:
            value = waiting.pop()
            if isinstance(value, list | tuple):
                ids.add(id(value))
                waiting += value
            elif isinstance(value, dict):
                waiting += value.values()
        return frozenset(ids)

    @cached_property
    def _compiled(self) -> list[tuple[Sandbox, Template]]:
        compiled = []
        for source in self.sources:
            sandbox = Sandbox(self.date)
            with self._refusing("cannot be read", source, UnreadableTemplate):
                compiled.append((sandbox, sandbox.compiled(source)))
        return compiled

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles the fields only; the process that receives them compiles the template itself.
        fields = (self.source, self.name, self.special_tokens, self.switches, self.with_tools, self.date)
        return ChatTemplate, fields


def _names_read(template: ChatTemplate) -> frozenset[str]:
    names: set[str] = set()
    for sandbox, _ in template._compiled:
        for source in template.sources:
            names |= meta.find_undeclared_variables(sandbox.parse(source)) - sandbox.globals.keys()
    return frozenset(names)


def _without_comments(source: str) -> str:
    parts, at = [], 0
    while (start := source.find("{#", at)) >= 0 and (end := source.find("#}", start + 2)) >= 0:
        parts.append(source[at:start])
        at = end + 2
    return "".join([*parts, source[at:]])


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return shortened(lines[0], _MOST_REASON) if lines else type(error).__name__


def _source_line(error: Exception, source: str) -> str:
    """Where in the template the error was raised, such as `  (line 3: `{{ x(1) }}`)`; empty if it is unknown."""
    number = error.lineno if isinstance(error, TemplateSyntaxError) else None
    for frame, line_of_code in traceback.walk_tb(error.__traceback__):
        template = frame.f_globals.get("__jinja_template__")  # as in jinja2.debug
        if template is not None:
            number = template.get_corresponding_lineno(line_of_code)
    lines = source.splitlines()
    if number is None or not 1 <= number <= len(lines):
        return ""
    return f"  (line {number}: `{shortened(lines[number - 1].strip(), _MOST_LINE)}`)"
