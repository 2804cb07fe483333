"""Defines text with a source for each character: a field of a chat, a constant of the template, or unknown.

Decides the sources of the results of operations on text.  `Text` is a str, so a template treats it as one.  Operations
that this file defines keep sources.  Every other operation returns a str without sources, which count as unknown.  So
an operation that is missing here may cause a chat to be refused, but it can never make a mask wrong.

    Text("Hi", field) + Text("<|im_end|>", CONSTANT)      2 characters of the field, 10 of the template
    Text("a b", field).split()                            two texts, from characters 0 and 2 of the field
    Text("Hi", field).zfill(5)                            a str: unknown

`sandbox.py` makes templates compute with such texts.  `turns.py` and `omitted.py` read the sources of a rendering.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, SupportsIndex

from sft.data.template.sources import UNKNOWN, Field, Piece, Pieces, Source, TemplateConstant

_FORMAT = re.compile(r"%(?:%|s|d)")
_BRACES = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*|\d*)\}")


class _Sourced(str):
    """A str with the sources of its characters."""

    __slots__ = ("pieces",)
    pieces: Pieces

    def __new__(cls, value: object = "", pieces: Pieces | None = None) -> Self:
        self = str.__new__(cls, value)
        self.pieces = whole(UNKNOWN, len(self)) if pieces is None else pieces
        return self

    @classmethod
    def of(cls, value: str, source: Source) -> Self:
        """The text `value`, all of it from one source."""
        self = str.__new__(cls, value)
        self.pieces = whole(source, len(value))
        return self

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str.__str__(self),)

    def _sub(self, start: int, stop: int) -> "Text":
        return sourced(str.__getitem__(self, slice(start, stop)), cut(self.pieces, start, stop))

    def _same_length(self, value: str) -> str:
        return Text(value, self.pieces) if len(value) == len(self) else value


class _Cut(_Sourced):
    """The operations that return parts of a text."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> str:
        value = str.__getitem__(self, key)
        if not isinstance(key, slice):
            at = key.__index__() % len(self)
            return Text(value, cut(self.pieces, at, at + 1))
        start, stop, step = key.indices(len(self))
        return Text(value, cut(self.pieces, start, max(start, stop))) if step == 1 else value

    def __iter__(self) -> Iterator[str]:
        return (self._sub(at, at + 1) for at in range(len(self)))

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:
        length = len(str.lstrip(self, chars))
        return self if length == len(self) else self._sub(len(self) - length, len(self))

    def rstrip(self, chars: str | None = None) -> str:
        length = len(str.rstrip(self, chars))
        return self if length == len(self) else self._sub(0, length)

    def removeprefix(self, prefix: str) -> str:
        return self._sub(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> str:
        return self._sub(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._placed(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._placed(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines, at = [], 0
        for line, kept in zip(str.splitlines(self), str.splitlines(self, True), strict=True):
            lines.append(self._sub(at, at + len(kept if keepends else line)))
            at += len(kept)
        return list(lines)

    def partition(self, sep: str) -> tuple[str, str, str]:
        head, middle, _ = str.partition(self, sep)
        end = len(head) + len(middle)
        return self._sub(0, len(head)), self._sub(len(head), end), self._sub(end, len(self))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        head, middle, _ = str.rpartition(self, sep)
        end = len(head) + len(middle)
        return self._sub(0, len(head)), self._sub(len(head), end), self._sub(end, len(self))

    def _placed(self, parts: list[str], sep: str | None) -> list[str]:
        """The parts of a split, with their sources.  sep: the text between the parts; None: white space"""
        placed: list[str] = []
        at = 0
        for part in parts:
            if sep is None:
                at = str.find(self, part, at)
            placed.append(self._sub(at, at + len(part)))
            at += len(part) + len(sep or "")
        return placed


class Text(_Cut):
    """A str with the sources of its characters.  Without `pieces`, its source is unknown."""

    __slots__ = ()

    def __add__(self, other: str) -> "Text":
        if type(other) is Text:
            return sourced(str.__add__(self, other), self.pieces + other.pieces)
        is_plain = isinstance(other, str) and not hasattr(other, "__html__")  # safe text escapes the other text
        return concatenated((self, other)) if is_plain else NotImplemented

    def __radd__(self, other: str) -> "Text":
        return concatenated((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> "Text":
        value = str.__mul__(self, times)
        if is_constant(self):  # the result is one piece
            source, _, _, _, writer = self.pieces[0]
            return Text(value, (Piece(source, 0, len(value), len(value), writer),) if value else ())
        return Text(value, self.pieces * times.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        """The result of `%`.  With `%s`, `%d` and `%%`, sources are kept; with any other format, they are unknown."""
        plain = str.__mod__(self, values)
        if not isinstance(values, tuple):
            values = (values,)
        return self._filled(_FORMAT, plain, lambda match, number: None if match[0] == "%%" else values[number])

    def filled(self, args: Sequence[Any], kwargs: dict[str, Any], plain: str) -> str:
        """The result of `format`, with sources if the format has only `{}`, `{0}` and `{name}`; else `plain`.

        plain: the result without sources
        """

        def value(match: "re.Match[str]", number: int) -> Any:
            name = match[1]
            if name is None:
                return None
            return kwargs[name] if name in kwargs else args[int(name) if name else number]

        try:
            return self._filled(_BRACES, plain, value)
        except (IndexError, ValueError, KeyError):
            return plain

    def _filled(self, pattern: "re.Pattern[str]", plain: str, value_of: Any) -> str:
        parts: list[str] = []
        at = number = 0
        for match in pattern.finditer(self):
            parts.append(self._sub(at, match.start()))
            value = value_of(match, number)
            if value is None:  # %% or {{
                parts.append(self._sub(match.start(), match.start() + 1))
            else:
                number += 1
                parts.append(value if isinstance(value, str) else str(value))
            at = match.end()
        result = concatenated([*parts, self._sub(at, len(self))])
        return result if str.__eq__(result, plain) else plain

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return str.replace(self, old, new, count)
        if old not in self:
            return self
        limit = count.__index__()
        parts = self._placed(str.split(self, old, limit), old)
        return joined(new, parts)

    def join(self, parts: Iterable[str]) -> str:
        return joined(self, parts)

    def lower(self) -> str:
        return self._same_length(str.lower(self))

    def upper(self) -> str:
        return self._same_length(str.upper(self))

    def capitalize(self) -> str:
        return self._same_length(str.capitalize(self))

    def title(self) -> str:
        return self._same_length(str.title(self))


class Int(int):
    """An integer with its source.  Results of arithmetic are numbers without a source."""

    field: Field | TemplateConstant

    @classmethod
    def of(cls, value: int, field: Field | TemplateConstant) -> Self:
        self = cls(value)
        self.field = field
        return self


class Float(float):
    """A float of a chat, with its source.  Results of arithmetic are numbers without a source."""

    field: Field

    @classmethod
    def of(cls, value: float, field: Field) -> Self:
        self = cls(value)
        self.field = field
        return self


def sourced(value: str, pieces: Pieces) -> Text:
    """Text(value, pieces), without the cost of the constructor, which takes twice as long."""
    text = str.__new__(Text, value)
    text.pieces = pieces
    return text


def whole(source: Source, length: int) -> Pieces:
    """The pieces of a text of this length that has one source."""
    return (tuple.__new__(Piece, (source, 0, length, length, None)),) if length else ()


def is_constant(text: Text) -> bool:
    """Whether the text is one constant of the template."""
    return len(text.pieces) == 1 and isinstance(text.pieces[0].source, TemplateConstant)


def pieces_of(text: str) -> Pieces:
    """The pieces of a text.  A str that is no Text is one piece of unknown source."""
    return text.pieces if type(text) is Text else whole(UNKNOWN, len(text))


def cut(pieces: Pieces, start: int, stop: int) -> Pieces:
    """The pieces of text[start:stop], from the pieces of the text."""
    if len(pieces) == 1:
        return (_part(pieces[0], start, stop),) if start < stop else ()
    result, at = [], 0
    for piece in pieces:
        end = at + piece.length
        if end > start and at < stop:
            inside = at >= start and end <= stop
            result.append(piece if inside else _part(piece, max(start - at, 0), min(stop, end) - at))
        at = end
        if at >= stop:
            break
    return tuple(result)


def _part(piece: Piece, start: int, stop: int) -> Piece:
    source, first, last, length, writer = piece
    if last - first != length:  # escaped: each character may come from any character of the field
        return Piece(source, first, last, stop - start, writer)
    return Piece(source, first + start, first + stop, stop - start, writer)


def concatenated(parts: Iterable[str]) -> Text:
    """The concatenation of the texts."""
    parts = list(parts)
    pieces: list[Piece] = []
    for part in parts:
        pieces += part.pieces if type(part) is Text else whole(UNKNOWN, len(part))
    return sourced("".join(parts), tuple(pieces))


def joined(separator: str, parts: Iterable[str]) -> Text:
    """The parts with `separator` between them."""
    result: list[str] = []
    for part in parts:
        if result:
            result.append(separator)
        result.append(part)
    return concatenated(result)
