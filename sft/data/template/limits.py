"""Counts the operations of a chat template, and computes bounds of the sizes of their results before they run.

    steps       Each iteration of a loop, each item that a filter reads or returns, each call and each filter is a step.
    characters  The characters of each text count when an operation makes the text.
    sizes       `_RESULTS` lists the methods and filters whose results can be much larger than their arguments, with a
                bound that is computed before they run.  `check_operator` does the same for operators.

The limits are counts, so they have the same effect on every machine.  A single operation in C, such as a comparison of
nested lists, may take long without exceeding them.  So the process also has limits of processor time and memory
(`sft/data/limited.py`).
"""

import re
from collections.abc import Callable, Iterator
from types import MappingProxyType, NoneType
from typing import Any

from jinja2.utils import Namespace

from sft.data.template.trace import Text, is_constant
from sft.errors import DataError

MAX_STEPS = 10_000_000  # a chat of 1,500 messages takes some 100,000
MAX_CHARACTERS = 100_000_000  # length of one text: about 25 million tokens, more than any sample has
MAX_MADE = 2_000_000_000  # characters of all texts that one rendering makes
_MAX_BITS = 100_000  # bits of the largest integer
_MAX_NUMBER = 1_000_000  # largest number in the arguments of a method or filter of _RESULTS
_ITEM = 8  # an item of a list or mapping counts as this many characters
_WIDE = re.compile(r"\d{6}|\*|\{[^{}]*\{")  # a width of six digits, or a width from an argument

# Upper bounds of a result's characters.  x: the subject, a text; n, t: largest number and length of the arguments.
_RESULTS: MappingProxyType[str, Callable[[Any, int, int], int]] = MappingProxyType(
    {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), lambda x, n, t: n),
        **dict.fromkeys(("batch", "slice"), lambda x, n, t: _ITEM * n),
        **dict.fromkeys(("split", "rsplit", "splitlines"), lambda x, n, t: len(x)),
        **dict.fromkeys(("translate", "wordwrap"), lambda x, n, t: len(x) * (1 + t)),
        "expandtabs": lambda x, n, t: len(x) + x.count(b"\t" if isinstance(x, bytes) else "\t") * max(8, n),
        "indent": lambda x, n, t: len(x) + (len(str.splitlines(x)) + 1) * max(4, n, t),
        "truncate": lambda x, n, t: len(x) + t,
        "urlize": lambda x, n, t: len(x) * 3 + sum(map(x.count, ".:@")) * (t + 50),
        "encode": lambda x, n, t: 4 * len(x),
        "hex": lambda x, n, t: 3 * len(x) if isinstance(x, bytes) else 0,
        "sum": lambda x, n, t: 0,  # `check_filter` bounds a start that is a list
        **dict.fromkeys(("replace", "format", "format_map", "join"), lambda x, n, t: 0),  # `_check_result` bounds them
        **dict.fromkeys(("tojson", "round", "filesizeformat"), lambda x, n, t: 0),  # limits of their numbers bound them
    }
)
# Smaller limits of numbers: columns of indentation (for tojson also the length of an indentation text), and digits.
_LARGEST = {"tojson": 100, "round": 1_000}
# Filters whose time and memory do not depend on their subject.
_INSTANT = frozenset("length count first last default d attr random map select reject selectattr rejectattr".split())
# Filters that read the items of a list, but not what the items contain.
_SHALLOW = _INSTANT | frozenset("list items dictsort batch slice reverse groupby".split())

# Filters that treat a text as the list of its characters.
_BY_ITEM = frozenset("list batch slice reverse sort unique min max groupby".split())


class TooMuch(DataError):
    """The error if a template would take too many steps or make too much text.  Its message is a predicate."""


class Counts:
    """The counts of one rendering, and their limits.  Its methods raise TooMuch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_steps, self.max_characters, self.max_made = MAX_STEPS, MAX_CHARACTERS, MAX_MADE
        self.steps = self.made = 0

    def tick(self, characters: int = 0) -> bool:
        """Counts a step that makes a text of this many characters.  Returns True, so that conditions can call it."""
        self.steps += 1
        self.made += characters
        if self.steps > self.max_steps:
            raise TooMuch(f"takes more than {self.max_steps:,} steps")
        if characters > self.max_characters or self.made > self.max_made:
            most = self.max_characters if characters > self.max_characters else self.max_made
            raise TooMuch(f"writes more than {most:,} characters")
        return True

    def step(self, items: int) -> None:
        """Counts `items` steps."""
        self.steps += items
        if self.steps > self.max_steps:
            raise TooMuch(f"takes more than {self.max_steps:,} steps")

    def check(self, characters: int) -> None:
        """Raises TooMuch for a text of too many characters.  Called before the text is made."""
        if characters > self.max_characters:
            raise TooMuch(f"writes more than {self.max_characters:,} characters")

    def check_value(self, value: Any) -> None:
        """Raises TooMuch for a value that holds too much text."""
        self.check(self._extent(value))

    def counted(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yields the items, and counts a step for each."""
        for item in items:
            self.tick()
            yield item

    def loop_items(self, items: Any) -> Any:
        """Returns the iterable of a loop.  Raises TooMuch if it has more items than steps are left: Jinja may copy all
        items to a list before the first iteration."""
        if isinstance(items, (str, list, tuple, dict)) and len(items) > self.max_steps - self.steps:
            raise TooMuch(f"takes more than {self.max_steps:,} steps")
        return items

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Raises TooMuch if the result of `*`, `**` or `%` would be too large."""
        if operator == "%" and isinstance(left, str):
            self.check_format(left, right if isinstance(right, tuple) else (right,))
        elif isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            _check_bits(size)
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
                    if type(sequence) is Text and not is_constant(sequence):
                        self.step(len(sequence.pieces) * max(0, times))
                    self.check(self._extent(sequence) * times)

    def check_filter(self, name: str, subject: Any, values: tuple[Any, ...]) -> None:
        """Counts a filter.  Raises TooMuch if its result would be too large.

        subject: the value before the `|`; values: the arguments of the filter
        """
        self.tick()
        if name not in _INSTANT:
            if isinstance(subject, (list, tuple, dict, range)) or (name in _BY_ITEM and isinstance(subject, str)):
                self.step(len(subject))
            elif isinstance(subject, str):
                self.made += len(subject)
        self._check_result(name, subject, values)
        if name == "sum" and any(not isinstance(value, (str, int, float)) for value in values):
            items = list(subject)
            self.check(len(items) * self._extent(items))
        if name not in _SHALLOW and not isinstance(subject, (str, int, float, NoneType)):
            self.check_value(subject)

    def check_method(self, name: str, subject: Any, args: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Counts the items that a method reads or makes, and returns the arguments to use.

        Raises TooMuch if the result would be too large.  subject: the object of the method; values: all arguments
        """
        if name == "fromkeys" and args and isinstance(args[0], (range, list, tuple, str)):
            self.step(len(args[0]))
        if name == "join" and args and isinstance(subject, (str, bytes)):
            parts = list(args[0])
            self.check(sum(len(part) + len(subject) for part in parts if isinstance(part, (str, bytes))))
            return (parts, *args[1:])
        if name in ("split", "rsplit") and isinstance(subject, (str, bytes)):
            separator = values[0] if values and isinstance(values[0], (str, bytes)) else None
            self.step(len(subject) // 2 if not separator else subject.count(separator))  # type: ignore[arg-type]
        self._check_result(name, subject, values)
        return args

    def count_result(self, value: Any) -> None:
        """Counts the characters of the result of a filter, function or operator.  Raises TooMuch if it is too large."""
        if isinstance(value, (str, bytes)):
            self.tick(len(value))
        elif isinstance(value, int):
            _check_bits(value.bit_length())
        elif isinstance(value, (list, tuple)):
            self.check(_ITEM * len(value))

    def check_format(self, template: str, values: tuple[Any, ...]) -> None:
        """Raises TooMuch if the result of formatting `values` with `%` or `format` would be too large."""
        if _WIDE.search(template):
            raise TooMuch("formats text to a width that is not written in up to five digits")
        longest = max(map(self._extent, values), default=0)
        widest = max(map(int, re.findall(r"\d+", template)), default=0)
        self.check(len(template) + (template.count("%") + template.count("{")) * max(longest, widest))

    def _check_result(self, name: str, subject: Any, values: tuple[Any, ...]) -> None:
        if name not in _RESULTS:
            return
        number = max((abs(value) for value in values if isinstance(value, int)), default=0)
        text = max((_length(value) for value in values), default=0)
        most = _LARGEST.get(name, _MAX_NUMBER)
        if number > most or (name == "tojson" and text > most):
            raise TooMuch(f"gives {name} a number or text above {most:,}")
        if name in ("format", "format_map") and isinstance(subject, str):
            self.check_format(subject, values)
        elif name == "replace" and isinstance(subject, (str, bytes)):
            old = values[0] if values and isinstance(values[0], (str, bytes)) else ""
            same = isinstance(old, bytes) == isinstance(subject, bytes)
            self.check(len(subject) + (subject.count(old) if same else 0) * text)  # type: ignore[arg-type]
        else:
            self.check(_RESULTS[name](subject if isinstance(subject, (str, bytes)) else "", number, text))

    def _extent(self, value: Any) -> int:
        """The number of characters of all texts in a value at any depth, plus 8 for each item of another type.

        Counting stops above the limit, because a list may contain another list many times.
        """
        total, left = 0, [value]
        while left and total <= self.max_characters:
            item = left.pop()
            if isinstance(item, (str, bytes)):
                total += len(item)
                continue
            total += _ITEM
            if isinstance(item, (list, tuple)):
                left += item
            elif isinstance(item, dict):
                left += item
                left += item.values()
            elif isinstance(item, Namespace):
                left += item._Namespace__attrs.values()  # Namespace has no public attribute for its values
        return total


def _check_bits(size: int) -> None:
    if size > _MAX_BITS:
        raise TooMuch("computes a number of too many digits")


def _length(value: Any) -> int:
    """The length of a text, or of the longest text in a list or mapping, such as the argument of `translate`."""
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return max((len(item) for item in items if isinstance(item, (str, bytes))), default=0)
    return len(value) if isinstance(value, (str, bytes)) else 0
