"""Defines the source of a character of a rendering: a field of the chat, the template, or unknown."""

from dataclasses import dataclass
from typing import NamedTuple, Union


@dataclass(slots=True, eq=False)  # making a frozen object takes twice as long
class Field:
    """A value of a chat.

    message  index of the message; None for tools, documents and variables
    path     keys and indices from the message to the value; "x=" as the last one stands for the name of the key x

    Field(1, ("tool_calls", 0, "function", "name"), "assistant", "rain")
    """

    message: int | None
    path: tuple[str | int, ...]
    role: str  # the message's role; or "tools", "documents", "variables"
    text: str = ""  # the value, if it is a text or a number
    is_container: bool = False  # whether the value is an object or a list


@dataclass(frozen=True, slots=True, eq=False)
class TemplateConstant:
    """The source of texts from the template, from the names of the tokenizer's tokens, and from the recipe."""

    is_marked: bool = False  # whether the text is inside {% generation %}


@dataclass(frozen=True, slots=True)
class Unknown:
    """The source of a text that an operation made without keeping sources."""

    operation: str = "an operation"


Source = Union[Field, TemplateConstant, Unknown]
CONSTANT, MARKED, UNKNOWN = TemplateConstant(), TemplateConstant(is_marked=True), Unknown()


class Piece(NamedTuple):
    """Consecutive characters of one source.

    start, stop  start and end of the characters in the source, if it is a field
    length       number of the characters in the text.  If length = stop - start, character i comes from character
                 start + i of the field; otherwise characters were escaped
    """

    source: Source
    start: int
    stop: int
    length: int
    writer: int | None = None  # the message that the template was writing; None before the text is written


Pieces = tuple[Piece, ...]
