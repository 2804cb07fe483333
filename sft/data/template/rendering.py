"""Defines the inputs and the result of a chat template.  Each character of the result has a source.

Decides the form of the inputs: messages as transformers passes them, with a source for each text, number, key, object
and list (`trace.py`).  `chat_template.py` decides the variables of the run, and `chat/reading.py` reads the sources.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from sft.data.rows.messages import THINKING, Message, Tools
from sft.data.template.sources import CONSTANT, Field, Source, TemplateConstant
from sft.data.template.trace import Float, Int, Text, pieces_of

TOOLS, DOCUMENTS, VARIABLES = "tools", "documents", "variables"  # roles of fields that belong to no message


class TemplateInputs(NamedTuple):
    """The inputs of a template, with sources."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    variables: dict[str, Any]
    containers: dict[int, Field]  # the source of each object and list, by its id
    fields: tuple[Field, ...]  # the sources of all texts and numbers


class Run(NamedTuple):
    """Consecutive characters text[start:end] of a rendering that have the same source and writer.

    writer       number of the message that the template was writing; None outside of messages
    first, last  start and end of these characters in the field, if the source is a field
    """

    start: int
    end: int
    source: Source
    writer: int | None
    first: int
    last: int


class Rendering(NamedTuple):
    """The text of a chat, and the sources of its characters in order."""

    text: str
    runs: list[Run]


class Output(NamedTuple):
    """The parts of a rendering that have been written so far, and the runs of their characters."""

    parts: list[str]
    runs: list[Run]


def collected(chunks: Iterable[str], writer: Callable[[], int | None], output: Output) -> Rendering:
    """The rendering of the chunks of text that a template yields.

    writer  returns the index of the message that the template is writing
    output  empty; a template may add kept results to it between two chunks (`replay.py`)
    """
    parts, runs = output
    for chunk in chunks:
        parts.append(chunk)
        now = writer()
        at = runs[-1].end if runs else 0
        for source, first, last, length, before in pieces_of(chunk):
            message = now if before is None else before
            runs.append(tuple.__new__(Run, (at, at + length, source, message, first, last)))
            at += length
    return Rendering("".join(parts), runs)


def is_of_template(source: Source) -> bool:
    """Whether the source is the template: a constant, or the role of a message, which is one of four words."""
    return isinstance(source, TemplateConstant) or (isinstance(source, Field) and source.path == ("role",))


def trace_inputs(
    messages: Sequence[Message], tools: Tools, documents: list[dict[str, Any]] | None, variables: dict[str, Any]
) -> TemplateInputs:
    """The inputs of a template, with sources.  variables: variables of the row"""
    containers: dict[int, Field] = {}
    fields: list[Field] = []
    trace = _Tracer(containers, fields)
    traced = [trace.message(index, message) for index, message in enumerate(messages)]
    return TemplateInputs(
        traced,
        None if tools is None else trace.value(tools, None, (), TOOLS),
        None if documents is None else trace.value(documents, None, (), DOCUMENTS),
        {name: trace.value(value, None, (name,), VARIABLES) for name, value in variables.items()},
        containers,
        tuple(fields),
    )


class _Tracer:
    """Copies values, with sources.  Replaces values of types that JSON lacks, because a template could call their
    methods."""

    def __init__(self, containers: dict[int, Field], fields: list[Field]) -> None:
        self.containers, self.fields = containers, fields

    def message(self, index: int, message: Message) -> dict[str, Any]:
        """A message in the form in which transformers passes it, with reasoning also under reasoning_content.

        {"thinking": "so"}  ->  {"thinking": "so", "reasoning_content": "so"}
        """
        role = message["role"]
        thinking = next((message[key] for key in THINKING if message.get(key) is not None), None)
        if thinking is not None:
            message = {"thinking": thinking, **message, "reasoning_content": thinking}
        return {key: self.value(value, index, (key,), role) for key, value in message.items()}

    def value(self, value: Any, message: int | None, path: tuple[str | int, ...], role: str) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            field = self._field(message, path, role, value)
            return Text.of(str.__str__(value), field)
        if isinstance(value, (int, float)):
            field = self._field(message, path, role, str(value))
            return Int.of(value, field) if isinstance(value, int) else Float.of(value, field)
        copy: Any
        if isinstance(value, dict):
            copy = {
                self._key(key, message, path, role): self.value(item, message, (*path, key), role)
                for key, item in value.items()
            }
        elif isinstance(value, (list, tuple)):
            copy = [self.value(item, message, (*path, index), role) for index, item in enumerate(value)]
        else:
            return Text.of(f"<{type(value).__name__}>", CONSTANT)
        self.containers[id(copy)] = Field(message, path, role, is_container=True)
        return copy

    def _key(self, key: Any, message: int | None, path: tuple[str | int, ...], role: str) -> Any:
        return Text.of(key, self._field(message, (*path, f"{key}="), role, key)) if isinstance(key, str) else key

    def _field(self, message: int | None, path: tuple[str | int, ...], role: str, text: str) -> Field:
        field = Field(message, path, role, text)
        self.fields.append(field)
        return field
