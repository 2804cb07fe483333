"""Implements the operations that a compiled template calls to write, name, join and add values.

Decides which source the text of a value has, and which message is its writer: the message that the template was writing
when it made the text.  `compiler.py` inserts the calls into templates; `filters.py` has filters and functions.
"""

from collections.abc import Iterable, Iterator, Set
from functools import reduce
from typing import Any

from jinja2.utils import Namespace
from markupsafe import Markup

from sft.data.template.limits import Counts
from sft.data.template.sources import CONSTANT, UNKNOWN, Field, Piece, Unknown
from sft.data.template.trace import Float, Int, Text, concatenated, sourced, whole

_TEXTS = {Text}
LIST_METHODS = frozenset(("append", "extend", "insert", "pop"))  # methods that change a list that the template made


class Operations(Counts):
    """The operations of one template.  `begin` resets the counts for a rendering.

    constants   the constants of the template
    message     the index of the message that the template is writing; None outside of loops over messages
    containers  the source of each object and list of the chat, by its id
    input_lists the ids of further lists that the template must not change
    """

    constants: list[Text | Int]

    def begin(
        self, containers: dict[int, Field], messages: dict[int, int], input_lists: Set[int] = frozenset()
    ) -> None:
        """Starts a rendering.

        containers   the source of each object and list of the chat, by its id
        messages     {id of a message: its index}
        input_lists  ids of further lists that the template must not change
        """
        self.steps = self.made = 0
        self.input_lists = input_lists
        self.message: int | None = None
        self.containers, self.messages = containers, messages

    def constant(self, value: str | int) -> int:
        """Adds a constant of the template to `constants`, and returns its index there."""
        self.constants.append(Text.of(value, CONSTANT) if isinstance(value, str) else Int.of(value, CONSTANT))
        return len(self.constants) - 1

    def enter(self, item: Any) -> None:
        """Begins an iteration of a loop.  If `item` is a message, the template now writes this message."""
        self.tick()
        index = self.messages.get(id(item))
        if index is not None:
            self.message = index

    def write(self, value: Any) -> Text:
        """The text that the template writes for a value, with its sources.  Counts its characters."""
        text = value if type(value) is Text else self.text_of(value)
        self.tick(len(text))
        return text

    def write_escaped(self, eval_context: Any, value: Any) -> str:
        """The result of `write`, escaped if the template has enabled escaping.  An escaped text has no sources."""
        if not eval_context.autoescape:
            return self.write(value)
        text = Markup.escape(value if isinstance(value, str) else self.text_of(value))
        self.tick(len(text))
        return str(text)

    def collect(self, parts: Iterable[str]) -> Text:
        """The text of a macro, a set block or a call block.  The current message is its writer."""
        return self.written(concatenated(parts))

    def written(self, value: Any) -> Any:
        """The value itself.  If it is a text, its last pieces that have no writer get the current message as writer."""
        if type(value) is not Text:
            return value
        pieces, writer = value.pieces, self.message
        first = len(pieces)
        while first and pieces[first - 1].writer is None:
            first -= 1
        if writer is None or first == len(pieces):
            return value
        written = [tuple.__new__(Piece, (source, a, b, length, writer)) for source, a, b, length, _ in pieces[first:]]
        return sourced(value, (*pieces[:first], *written))

    def named(self, value: Any) -> Any:
        """The value that a name gets.  A text gets its writer.  Raises TooMuch for a list or object that is too
        large."""
        if type(value) is Text:
            return self.written(value)
        if isinstance(value, (list, tuple, dict, Namespace)):
            self.check_value(value)
        return value

    def sliced(self, value: Any, part: slice) -> Any:
        """The result of value[start:stop:step]."""
        result = value[part]
        self.count_result(result)
        return result

    def concatenate(self, parts: tuple[Any, ...]) -> Text:
        """The result of the operator ~."""
        texts = [part if type(part) is Text else self.text_of(part) for part in parts]
        self.tick(sum(map(len, texts)))
        return concatenated(texts)

    def concatenate_escaped(self, eval_context: Any, parts: tuple[Any, ...]) -> str:
        """The result of the operator ~ if the template may have enabled escaping."""
        if not eval_context.autoescape:
            return self.concatenate(parts)
        text = Markup("").join([part if isinstance(part, str) else self.text_of(part) for part in parts])
        self.tick(len(text))
        return text

    def add(self, *parts: Any) -> Any:
        """The sum of two or more values, from left to right."""
        if {*map(type, parts)} == _TEXTS:
            self.tick(sum(map(len, parts)))
            return concatenated(parts)
        return reduce(self._sum, parts)

    def _sum(self, left: Any, right: Any) -> Any:
        value = left + right
        if isinstance(value, str):
            self.tick(len(value))
            return value if type(value) is Text else self._safe_sum(left, right, value)
        if isinstance(value, (list, tuple)):
            self.check_value(value)
        elif isinstance(left, Int) and isinstance(right, Int) and left.field is right.field is CONSTANT:
            return Int.of(value, CONSTANT)  # the template counts something
        self.count_result(value)
        return value

    def _safe_sum(self, left: Any, right: Any, value: str) -> str:
        """The sum `value` of two parts of which one is marked safe, with sources if escaping changed nothing."""
        if not isinstance(value, Markup):
            return value
        parts = [self.text_of(part) for part in (left, right)]
        text = concatenated(parts)
        return Safe(value, text.pieces if str.__eq__(text, value) else None)

    def text_of(self, value: Any) -> Text:
        """The text str(value), with its sources."""
        if isinstance(value, Text):
            return value
        if isinstance(value, Safe):
            return Text(str.__str__(value), value.pieces)
        if isinstance(value, str):
            return Text(value, whole(UNKNOWN, len(value)))
        if isinstance(value, (Int, Float)):
            return Text.of(str(value), value.field)
        if value is None or isinstance(value, bool):  # "None", "True" and "False" contain no text of the row
            return Text.of(str(value), CONSTANT)
        self.check_value(value)
        text = str(value)
        source = self.containers.get(id(value)) or Unknown(f"the text of {_kind(value)}")
        return Text.of(str.__str__(text), source)

    def _sourced(self, value: Any, operation: str) -> Any:
        """The result of a filter or function.  A text without sources gets the source Unknown(operation)."""
        if type(value) in (Text, bool):
            return value
        if isinstance(value, Iterator):
            return self.counted(value)
        self.count_result(value)
        return Text.of(value, Unknown(operation)) if type(value) is str else value


class Safe(Markup):
    """A text that the template marks safe.  As in Markup, texts that are added to it are escaped."""

    pieces: tuple[Piece, ...]

    def __new__(cls, value: object = "", pieces: tuple[Piece, ...] | None = None) -> "Safe":
        self = super().__new__(cls, value)
        self.pieces = whole(Unknown("an operation on text marked safe"), len(self)) if pieces is None else pieces
        return self


def _kind(value: Any) -> str:
    return "a computed number" if isinstance(value, int | float) else f"a {type(value).__name__}"
