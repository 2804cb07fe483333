"""Where a character of a rendering comes from: a field of a chat, the template, or an unknown place."""

from dataclasses import dataclass
from typing import NamedTuple, Union


@dataclass(slots=True, eq=False)  # frozen ones take twice as long to make
class Field:
    """A value of a chat: `messages[message]`, then `path`; for tools, documents and variables, message is None.

    Field(1, ("tool_calls", 0, "function", "name"), "assistant", "rain")
    """

    message: int | None
    path: tuple[str | int, ...]
    role: str  # of the message; tools, documents or variables
    text: str = ""  # the value, if it is a text or a number
    is_container: bool = False  # an object or a list


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """The template, the names of the tokenizer's tokens, and the recipe."""

    is_marked: bool = False  # inside {% generation %}


@dataclass(frozen=True, slots=True)
class Unknown:
    """An operation that does not keep sources."""

    operation: str = "an operation"


Source = Union[Field, Constant, Unknown]
CONSTANT, MARKED, UNKNOWN = Constant(), Constant(is_marked=True), Unknown()


class Piece(NamedTuple):
    """Consecutive characters of one source.

    A field's characters start to stop became `length` characters: the same characters if length = stop - start,
    otherwise escaped ones.
    """

    source: Source
    start: int
    stop: int
    length: int
    writer: int | None = None  # the message that the template was writing; None before the text is written


Pieces = tuple[Piece, ...]
