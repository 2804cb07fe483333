"""Runs a chat template as transformers would, but with limits on its time and on the length of its text.

Decides how much time and text a template may use.  Templates run as in transformers: with the same sandbox (no access
to Python internals, no changes of the input, ranges of at most 100,000), filters, functions and options.

The limits need no thread, signal or process, because checks are compiled into the template: at the start of every loop,
macro and call block, in every call and filter, in the operators * ** %, and around every value written or named.

    time         Each check reads the clock, so nested loops end in time even if they write nothing.
    text         Each value that the template writes is counted, even if it goes into a variable.  A value is measured
                 when it gets a name, so a template that doubles a value repeatedly is stopped.  Results of * and %, and
                 of methods and filters that lengthen text (replace, join, center, indent, ...), are checked in advance.

Not covered: one built-in operation on data within the limits (such as sorting a list of 100,000) runs to its end.
"""

import re
import time
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from sft.errors import DataError

MAX_SECONDS = 20.0
MAX_CHARACTERS = 100_000_000  # about 25 million tokens; longer than any sample, and fits into memory
_OF_DICTS = frozenset(dir(dict))
_MAX_BITS = 100_000  # largest size of an integer
_ITEM = 8  # an item of a list or mapping counts as this many characters
# Methods of text and filters whose result can be much longer than their arguments.
_LONGER = {"center", "ljust", "rjust", "zfill", "expandtabs", "replace", "indent", "wordwrap"}
_WIDE = re.compile(r"\d{6}|\*|\{[^{}]*\{")  # a width of six digits, or a width from an argument


class TooMuch(DataError):
    """The template would take too long or write too much."""


class Sandbox(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates with a budget of time and text, which `begin` resets."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self.write
        )
        self.max_seconds, self.max_characters = MAX_SECONDS, MAX_CHARACTERS
        self.marks: list[tuple[int, str]] = []
        self._safe: dict[tuple[type, str], bool] = {}
        _add_names(self)
        self.begin()

    def begin(self) -> None:
        """Starts a rendering: resets clock, counters and marks."""
        self.deadline = time.monotonic() + self.max_seconds
        self.characters = 0  # number of characters that expressions wrote, including text of variables
        self.position = 0  # position of the next character in the rendering
        self.marks.clear()

    def bounded(self, source: str) -> Template:
        """`source` compiled with checks."""
        self.begin()  # Jinja computes constant expressions while it compiles
        tree = self.parse(source)
        for node in _all(tree, nodes.For, nodes.Macro, nodes.CallBlock):
            constant = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(_direct("sft_step", nodes.Const(constant), node.lineno)))
        for assignment in _all(tree, nodes.Assign):
            assignment.node = _direct("sft_kept", assignment.node, assignment.lineno)
        for scope in _all(tree, nodes.With):
            scope.values = [_direct("sft_kept", value, scope.lineno) for value in scope.values]
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    @pass_context  # otherwise Jinja would call the filter for a constant only at compile time
    def step(self, context: Context, characters: int) -> None:
        """`tick` with the signature that templates need to call it."""
        self.tick(characters)

    def tick(self, characters: int = 0) -> None:
        """Counts one step of the template, in which it writes this many characters."""
        self.characters += characters
        if self.characters > self.max_characters:
            self.check(self.characters)
        if time.monotonic() > self.deadline:
            raise TooMuch(f"takes longer than {self.max_seconds:g} s")

    def check(self, characters: int) -> None:
        """Raises TooMuch if a text of this many characters exceeds the limit."""
        if characters > self.max_characters:
            raise TooMuch(f"writes more than {self.max_characters:,} characters")

    def write(self, value: object) -> str:
        """The text that the template writes for the value of an expression."""
        if not isinstance(value, str):
            self.kept(value)
        text = str(value)
        self.characters += len(text)
        if self.characters > self.max_characters:
            self.check(self.characters)
        return text

    def kept(self, value: Any) -> Any:
        """Checks a value that gets a name, because the template could double the value repeatedly."""
        if isinstance(value, str):
            self.check(len(value))
        elif isinstance(value, list | tuple | dict | Namespace):
            self.check(_extent(value, self.max_characters))
        return value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """obj.attribute as in Jinja, but without the AttributeError that Jinja raises and catches for keys."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's result, cached because it is slow.  It depends only on the type of `obj` and on `attr`."""
        key = type(obj), attr
        if key not in self._safe:
            self._safe[key] = super().is_safe_attribute(obj, attr, value)
        return self._safe[key]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Checks the operators whose result can be much larger than their operands."""
        if operator == "%" and isinstance(left, str):
            self._check_format(left, right if isinstance(right, tuple) else (right,))
        elif isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if size > _MAX_BITS:
                raise TooMuch("computes a number of too many digits")
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    self.check(len(sequence) * times)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Checks a call of a method or function by the template."""
        self.tick()
        for value in (*args, *kwargs.values()):
            self.kept(value)
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            args = self._check_text(name, owner, args, kwargs)
        elif name in ("format", "format_map"):  # the sandbox wraps these methods
            self._check_format(getattr(getattr(obj, "__wrapped__", None), "__self__", ""), (*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a filter: each call checks the clock, and refuses arguments that would make too much text."""
        first = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

        @wraps(function)
        def guard(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            subject, others = args[first] if len(args) > first else None, args[first + 1 :]
            if name == "join" and others:
                parts = list(subject or ())
                self._check_join(others[0], parts)
                args = (*args[:first], parts, *others)
            elif name == "format":
                self._check_format(str(subject), (*others, *kwargs.values()))
            elif isinstance(subject, str):
                self._check_text(name, subject, others, kwargs)
            elif name == "tojson" and any(isinstance(a, int) and a > 100 for a in (*others, *kwargs.values())):
                raise TooMuch("indents JSON by more than 100 columns")
            return function(*args, **kwargs)

        return guard

    def _check_text(self, name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if name == "join" and args:
            parts = list(args[0])
            self._check_join(text, parts)
            return (parts, *args[1:])
        if name in _LONGER:
            numbers = [len(a) if isinstance(a, str) else a for a in (*args, *kwargs.values())]
            largest = max((n for n in numbers if isinstance(n, int)), default=1)
            if name in ("center", "ljust", "rjust", "zfill"):
                self.check(largest)
            elif name == "replace":
                old = str((*args, *kwargs.values())[0]) if args or kwargs else ""
                self.check(len(text) + text.count(old) * largest)
            else:
                self.check(len(text) + (text.count("\n") + text.count("\t") + 1) * largest)
        return args

    def _check_join(self, separator: object, parts: Iterable[Any]) -> None:
        self.check(sum(len(part) + len(str(separator)) for part in parts if isinstance(part, str)))

    def _check_format(self, template: str, args: tuple[Any, ...]) -> None:
        if _WIDE.search(template):
            raise TooMuch("formats text to a width that is not written in up to five digits")
        longest = max((len(str(arg)) for arg in args), default=0)
        widest = max(map(int, re.findall(r"\d+", template)), default=0)
        self.check(len(template) + (template.count("%") + template.count("{")) * max(longest, widest))


def _extent(value: Any, most: int) -> int:
    """Characters of all texts within a value at any depth, plus 8 for each item of another type.  Counting stops above
    `most`, since a list may contain another list many times."""
    total, left = 0, [value]
    while left and total <= most:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
            continue
        total += _ITEM
        if isinstance(item, list | tuple):
            left += item
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, Namespace):
            left += item._Namespace__attrs.values()  # Namespace has no public access
    return total


class _Generation(Extension):
    """{% generation %}: records the block's position in the rendering and its text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.environment.marks.append((self.environment.position, text))  # type: ignore[attr-defined]
        return text


def _add_names(sandbox: Sandbox) -> None:
    """Adds the filters, functions and tests of transformers' environment, which templates use."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template("").environment
    sandbox.globals.update(environment.globals)
    del sandbox.globals["lipsum"]  # writes random text of any length
    sandbox.filters.update({name: sandbox.guarded(name, function) for name, function in environment.filters.items()})
    sandbox.filters.update(sft_step=sandbox.step, sft_kept=sandbox.kept)
    sandbox.tests.update(environment.tests)


def _all(tree: nodes.Template, *kinds: type[nodes.Node]) -> list[Any]:
    """The nodes of these kinds as a list, so the caller can change the tree while it goes through them."""
    return [node for kind in kinds for node in tree.find_all(kind)]


def _direct(function: str, argument: nodes.Expr, line: int) -> nodes.Expr:
    """A call of one of our own functions, written as a filter, because Jinja calls filters without `call`."""
    call = nodes.Filter(argument, function, [], [], None, None)
    call.set_lineno(line)
    return call
