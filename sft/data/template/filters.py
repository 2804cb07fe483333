"""Implements filters, functions and JSON for chat templates.  Their results keep the sources of their texts."""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from types import NoneType
from typing import Any, cast

from jinja2 import Environment
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter

from sft.data.template.operations import Operations, Safe
from sft.data.template.sources import CONSTANT, Field, Piece, Source, Unknown
from sft.data.template.trace import Float, Int, Text, concatenated, joined, whole

Containers = Mapping[int, Field]  # the source of each object and list of the chat, by its id

_SIMPLE = (str, int, float, NoneType)  # values that a template may add to a list of its own
_NAMES = "Sunday Monday Tuesday Wednesday Thursday Friday Saturday".split()
_MONTHS = "January February March April May June July August September October November December".split()


class Filters(Operations):
    """The filters and functions of one template.  date: the date that strftime_now formats"""

    date: datetime

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """The filter `tojson` of transformers.  Texts of values of the chat keep the sources of the values."""
        self.check_value(value)
        options = {"ensure_ascii": ensure_ascii, "separators": separators, "sort_keys": sort_keys}
        text = json_text(value, self.containers, indent, **options)
        self.tick(len(text))
        return text

    def safe(self, value: Any) -> "Safe":
        """The filter `safe`: marks a text as safe, so that escaping does not change it."""
        text = self.text_of(value)
        return Safe(str.__str__(text), text.pieces)

    def join(self, value: Any, d: Any = "", attribute: Any = None) -> Text:
        """The filter `join`, which checks the size of the result before it joins the parts."""
        if attribute is not None:
            value = map(make_attrgetter(cast(Environment, self), attribute), value)
        parts = [self.text_of(part) for part in value]
        separator = self.text_of(d)
        self.tick(sum(map(len, parts)) + len(separator) * max(0, len(parts) - 1))
        return joined(separator, parts)

    def indent(self, s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> Text:
        """The filter `indent`: puts `width` spaces, or the text `width`, before each line except the first."""
        text = self.text_of(s)
        margin = self.text_of(width) if isinstance(width, str) else Text.of(" " * width, CONSTANT)
        lines = (text + Text.of("\n", CONSTANT)).splitlines()
        self.check(len(text) + len(lines) * len(margin))
        rest = [line if not line and not blank else margin + line for line in lines[1:]]
        return joined(Text.of("\n", CONSTANT), [margin + lines[0] if first else lines[0], *rest])

    def check_change(self, changed: list[Any], method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Checks a call of `method` that changes the list `changed`, and returns the arguments to use.

        Raises SecurityError unless the template has made the list, and adds only texts, numbers, and objects and lists
        of the chat.  With lists of its own as items, a list could exceed the limits without a check.
        """
        if id(changed) in self.containers or id(changed) in self.input_lists:
            raise SecurityError(f"a template must not {method} to a list that it is given")
        self.step(len(changed) // 64)  # the list may move its items
        new = list(self.counted(iter(args[0]))) if method == "extend" and args else list(args)
        if any(not isinstance(v, _SIMPLE) and id(v) not in self.containers and id(v) not in self.messages for v in new):
            raise SecurityError(f"{method} must get texts, numbers or messages")
        self.check(8 * (len(changed) + len(new)))
        return (new,) if method == "extend" and args else args

    def strftime_now(self, format: str) -> Text:
        """The date of the run in a format of strftime, with English names in every locale."""
        date = self.date
        day, month = _NAMES[date.isoweekday() % 7], _MONTHS[date.month - 1]
        names = {"%a": day[:3], "%A": day, "%b": month[:3], "%h": month[:3], "%B": month}
        self.check_format(format, ())
        text = re.sub(r"%[aAbBh]", lambda match: names[match[0]], str.__str__(format))
        return Text.of(date.strftime(text), CONSTANT)


def json_text(value: Any, containers: Containers, indent: int | str | None, **options: Any) -> Text:
    """The text of json.dumps(value), with sources.

    An object of the chat, {"day": "Mon"}, is the source of all its characters.  For an object that the template made,
    the template is the source of brackets, commas and colons, and each value keeps its source.
    containers: the source of each object and list of the chat, by its id
    """
    plain = json.dumps(value, indent=indent, **options)
    source = _source_of(value, containers)
    if source is not None:
        return _escaped(value, plain) if isinstance(value, Text) else Text.of(plain, source)
    parts: list[str] = []
    _write(value, containers, parts, indent, options, 0)
    text = concatenated(parts)
    return text if str.__eq__(text, plain) else Text.of(plain, Unknown("tojson"))


def _source_of(value: Any, containers: Containers) -> Source | None:
    if isinstance(value, Text):
        return value.pieces[0].source if value.pieces else CONSTANT
    if isinstance(value, (Int, Float)):
        return value.field
    if value is None or isinstance(value, bool):
        return CONSTANT
    return containers.get(id(value))


def _write(
    value: Any, containers: Containers, parts: list[str], indent: Any, options: dict[str, Any], depth: int
) -> None:
    source = _source_of(value, containers)
    if source is not None and (indent is None or depth == 0 or not isinstance(value, (dict, list))):
        plain = json.dumps(value, **options)
        parts.append(_escaped(value, plain) if isinstance(value, Text) else Text.of(plain, source))
    elif isinstance(value, (dict, list, tuple)):
        of_template = containers.get(id(value)) or CONSTANT
        pair, colon = options["separators"] or ((", ", ": ") if indent is None else (",", ": "))
        width = " " * indent if isinstance(indent, int) else indent
        inner = "" if indent is None else "\n" + width * (depth + 1)
        outer = "" if indent is None else "\n" + width * depth
        brackets, items = ("{}", [*value.items()]) if isinstance(value, dict) else ("[]", [(None, v) for v in value])
        if options["sort_keys"] and isinstance(value, dict):
            items.sort()
        parts.append(Text.of(brackets[0], of_template))
        for number, (key, item) in enumerate(items):
            parts.append(Text.of((pair if number else "") + inner, of_template))
            if isinstance(value, dict):
                _write(key if isinstance(key, str) else str(key), containers, parts, None, options, depth + 1)
                parts.append(Text.of(colon, of_template))
            _write(item, containers, parts, indent, options, depth + 1)
        parts.append(Text.of((outer if value else "") + brackets[1], of_template))
    else:
        parts.append(Text.of(json.dumps(value, **options), Unknown("tojson")))


def _escaped(text: Text, plain: str) -> Text:
    """The JSON of a text.  If no character was escaped, each character keeps its source."""
    if len(plain) == len(text) + 2 and str.__eq__(text, plain[1:-1]):
        quote = (Piece(text.pieces[0].source, 0, 0, 1),) if text.pieces else whole(CONSTANT, 1)
        return Text(plain, (*quote, *text.pieces, *quote))
    sources = {piece.source for piece in text.pieces}
    if len(sources) > 1:  # it is not known which source an escaped character belongs to
        return Text.of(plain, Unknown("tojson of a composed text"))
    first, last = min(piece.start for piece in text.pieces), max(piece.stop for piece in text.pieces)
    return Text(plain, (Piece(text.pieces[0].source, first, last, len(plain)),))
