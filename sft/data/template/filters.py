"""Filters and functions of chat templates whose results keep their sources."""

import re
from datetime import datetime
from typing import Any, cast

from jinja2 import Environment
from jinja2.filters import make_attrgetter

from sft.data.template.json_text import json_text
from sft.data.template.operations import Operations, Safe
from sft.data.template.sources import CONSTANT
from sft.data.template.trace import Text, joined

_NAMES = "Sunday Monday Tuesday Wednesday Thursday Friday Saturday".split()
_MONTHS = "January February March April May June July August September October November December".split()


class Filters(Operations):
    """The filters and functions of one template.  date: the date that strftime_now returns"""

    date: datetime

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """transformers' filter `tojson`.  The text of a value of the chat keeps the value's source."""
        self.check_value(value)
        options = {"ensure_ascii": ensure_ascii, "separators": separators, "sort_keys": sort_keys}
        text = json_text(value, self.containers, indent, **options)
        self.tick(len(text))
        return text

    def safe(self, value: Any) -> "Safe":
        """The filter `safe`."""
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

    def strftime_now(self, format: str) -> Text:
        """The date of the run, with English names in every locale."""
        date = self.date
        day, month = _NAMES[date.isoweekday() % 7], _MONTHS[date.month - 1]
        names = {"%a": day[:3], "%A": day, "%b": month[:3], "%h": month[:3], "%B": month}
        self.check_format(format, ())
        text = re.sub(r"%[aAbBh]", lambda match: names[match[0]], str.__str__(format))
        return Text.of(date.strftime(text), CONSTANT)
