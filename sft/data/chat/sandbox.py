"""Jinja as transformers runs it for chat templates, computing with texts that keep their sources, within limits.

Decides which source the result of each operation of a template has.  What a template may do is counted where it does it
(`limits.py`).  `Sandbox` is transformers' environment: the same sandbox (no access to Python internals, no changes of
the input, ranges of at most 100,000), filters, functions and options.  Its compiler (`compiler.py`) writes calls of the
methods here into the Python code that Jinja makes of a template.  They are no names of the template, so no template can
call them.

    sources     Constants of the template, also inside expressions, get the source CONSTANT.  What a macro, a set block
                or a call block collects keeps its sources, and so do `~`, tojson, join, safe and format.  The result of
                any other filter or function without sources is Unknown, with the name of the operation.
    the writer  A loop over messages says which message is being written.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup

from sft.data.chat.compiler import Compiler
from sft.data.chat.limits import Counts
from sft.data.chat.sources import CONSTANT, MARKED, UNKNOWN, Field, Piece, Unknown
from sft.data.chat.trace import Float, Int, Text, concatenated, joined, sourced, whole

_OF_DICTS = frozenset(dir(dict))
_OWN = frozenset(("pieces", "field", "of", "filled"))  # attributes of our texts and numbers alone
_NAMES = "Sunday Monday Tuesday Wednesday Thursday Friday Saturday".split()
_MONTHS = "January February March April May June July August September October November December".split()


class Sandbox(Counts, ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates.  `begin` resets the counts for a rendering.

    message     the index of the message that the template is writing; None outside of loops over messages
    containers  the source of each object and list of the chat, by its id
    date        the day that strftime_now gives the template
    """

    intercepted_binops = frozenset(["*", "**", "%"])
    code_generator_class = Compiler

    def __init__(self, date: str) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], optimized=False)
        self.date = datetime.fromisoformat(date)
        self.constants: list[Text | Int] = []
        self._safe: dict[tuple[type, str], bool] = {}
        self.concat = self.collect  # type: ignore[method-assign]
        self._add_names()
        self.begin({}, {})

    def begin(self, containers: dict[int, Field], messages: dict[int, int]) -> None:
        """Starts a rendering.  `messages` holds the index of each message by its id."""
        self.steps = self.made = 0
        self.message: int | None = None
        self.containers, self.messages = containers, messages

    def compiled(self, source: str) -> Template:
        """`source` compiled with counts and sources."""
        self.begin({}, {})
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.MarkSafeIfAutoescape(loop.iter, lineno=loop.lineno)
            if loop.test is not None:
                loop.test = nodes.And(nodes.EnvironmentAttribute("tick()"), loop.test, lineno=loop.lineno)
            if isinstance(loop.target, nodes.Name):
                start = nodes.ExprStmt(nodes.Name(loop.target.name, "load", lineno=loop.lineno), lineno=loop.lineno)
                start.begins_loop = True  # type: ignore[attr-defined]
            else:
                start = nodes.ExprStmt(nodes.Tuple([], "load"), lineno=loop.lineno)
            loop.body.insert(0, start)
        for assignment in tree.find_all(nodes.Assign):
            assignment.node = nodes.MarkSafe(assignment.node, lineno=assignment.lineno)
        for scope in tree.find_all(nodes.With):
            scope.values = [nodes.MarkSafe(value, lineno=scope.lineno) for value in scope.values]
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def constant(self, value: str | int) -> int:
        """The index in `constants` of a constant of the template."""
        self.constants.append(Text.of(value, CONSTANT) if isinstance(value, str) else Int.of(value, CONSTANT))
        return len(self.constants) - 1

    # What compiled templates call

    def enter(self, item: Any) -> None:
        """Begins a turn of a loop.  If `item` is a message, the template now writes this message."""
        self.tick()
        index = self.messages.get(id(item))
        if index is not None:
            self.message = index

    def write(self, value: Any) -> Text:
        """The text that the template writes for a value."""
        text = value if type(value) is Text else self.text_of(value)
        self.tick(len(text))
        return text

    def write_escaped(self, eval_context: Any, value: Any) -> str:
        """`write` where the template may have switched escaping on, whose results have no sources."""
        if not eval_context.autoescape:
            return self.write(value)
        text = Markup.escape(value if isinstance(value, str) else self.text_of(value))
        self.tick(len(text))
        return str(text)

    def collect(self, parts: Iterable[str]) -> Text:
        """What a macro, a set block or a call block collected, written for the message of now."""
        return self._written(concatenated(parts))

    def _written(self, text: Text) -> Text:
        """A text whose new pieces, at its end, are written for the message of now."""
        pieces, writer = text.pieces, self.message
        first = len(pieces)
        while first and pieces[first - 1].writer is None:
            first -= 1
        if writer is None or first == len(pieces):
            return text
        return sourced(text, (*pieces[:first], *(piece._replace(writer=writer) for piece in pieces[first:])))

    def named(self, value: Any) -> Any:
        """A value that gets a name."""
        if type(value) is Text:
            return self._written(value)
        if isinstance(value, list | tuple | dict | Namespace):
            self.check_value(value)
        return value

    def sliced(self, value: Any, part: slice) -> Any:
        """value[start:stop:step]."""
        result = value[part]
        self.of_result(result)
        return result

    def concatenate(self, parts: tuple[Any, ...]) -> Text:
        """The operator ~."""
        text = concatenated([part if type(part) is Text else self.text_of(part) for part in parts])
        self.tick(len(text))
        return text

    def concatenate_escaped(self, eval_context: Any, parts: tuple[Any, ...]) -> str:
        """The operator ~ where the template may have switched escaping on."""
        if not eval_context.autoescape:
            return self.concatenate(parts)
        text = Markup("").join([part if isinstance(part, str) else self.text_of(part) for part in parts])
        self.tick(len(text))
        return text

    def add(self, left: Any, right: Any) -> Any:
        """The operator +."""
        value = left + right
        if type(value) is Text:
            self.tick(len(value))
            return value
        if isinstance(value, str):
            self.tick(len(value))
            return self._safe_sum(left, right, value)
        if isinstance(value, list | tuple):
            self.check_value(value)
        elif isinstance(left, Int) and isinstance(right, Int) and left.field is right.field is CONSTANT:
            return Int.of(value, CONSTANT)  # a template that counts
        self.of_result(value)
        return value

    # Sources

    def _safe_sum(self, left: Any, right: Any, value: str) -> str:
        """A sum with text marked safe, which escapes the other part."""
        if not isinstance(value, Markup):
            return value
        parts = [self.text_of(part) for part in (left, right)]
        text = concatenated(parts)
        return _Safe(value, text.pieces if str.__eq__(text, value) else None)

    def text_of(self, value: Any) -> Text:
        """The text of a value, as str() makes it."""
        if isinstance(value, Text):
            return value
        if isinstance(value, _Safe):
            return Text(str.__str__(value), value.pieces)
        if isinstance(value, str):
            return Text(value, whole(UNKNOWN, len(value)))
        if isinstance(value, Int | Float):
            return Text.of(str(value), value.field)
        if value is None or isinstance(value, bool):  # one of three words
            return Text.of(str(value), CONSTANT)
        self.check_value(value)
        text = str(value)
        source = self.containers.get(id(value)) or Unknown(f"the text of {_kind(value)}")
        return Text.of(str.__str__(text), source)

    def _sourced(self, value: Any, operation: str) -> Any:
        """The result of a filter or function; one without sources gets the name of the operation."""
        if type(value) is Text:
            return value
        if isinstance(value, Iterator):
            return self.counted(value)
        self.of_result(value)
        return Text.of(value, Unknown(operation)) if type(value) is str else value

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """transformers' filter: JSON, in which the text of a value of the chat has the value's source."""
        self.check_value(value)
        options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "separators": separators, "sort_keys": sort_keys}
        plain = json.dumps(value, indent=indent, **options)
        source = self._source_of(value)
        if source is not None:
            text = Text.of(plain, source) if not isinstance(value, Text) else _escaped(value, plain)
        else:  # an object that the template made
            parts: list[str] = []
            self._write_json(value, parts, indent, options, 0)
            text = concatenated(parts)
            if str.__ne__(text, plain):
                text = Text.of(plain, Unknown("tojson"))
        self.tick(len(text))
        return text

    def _source_of(self, value: Any) -> Any:
        if isinstance(value, Text):
            return value.pieces[0].source if value.pieces else CONSTANT
        if isinstance(value, Int | Float):
            return value.field
        if value is None or isinstance(value, bool):
            return CONSTANT
        return self.containers.get(id(value))

    def _write_json(self, value: Any, parts: list[str], indent: Any, options: dict[str, Any], depth: int) -> None:
        source = self._source_of(value)
        if source is not None and (indent is None or depth == 0 or not isinstance(value, dict | list)):
            plain = json.dumps(value, **options)
            parts.append(_escaped(value, plain) if isinstance(value, Text) else Text.of(plain, source))
        elif isinstance(value, dict | list | tuple):
            of_template = self.containers.get(id(value)) or CONSTANT
            pair, colon = options["separators"] or ((", ", ": ") if indent is None else (",", ": "))
            width = " " * indent if isinstance(indent, int) else indent
            inner = "" if indent is None else "\n" + width * (depth + 1)
            outer = "" if indent is None else "\n" + width * depth
            brackets, items = (
                ("{}", [*value.items()]) if isinstance(value, dict) else ("[]", [(None, v) for v in value])
            )
            if options["sort_keys"] and isinstance(value, dict):
                items.sort()
            parts.append(Text.of(brackets[0], of_template))
            for number, (key, item) in enumerate(items):
                parts.append(Text.of((pair if number else "") + inner, of_template))
                if isinstance(value, dict):
                    self._write_json(key if isinstance(key, str) else str(key), parts, None, options, depth + 1)
                    parts.append(Text.of(colon, of_template))
                self._write_json(item, parts, indent, options, depth + 1)
            parts.append(Text.of((outer if value else "") + brackets[1], of_template))
        else:
            parts.append(Text.of(json.dumps(value, **options), Unknown("tojson")))

    def safe(self, value: Any) -> "_Safe":
        """The filter `safe`."""
        text = self.text_of(value)
        return _Safe(str.__str__(text), text.pieces)

    def join(self, value: Any, d: Any = "", attribute: Any = None) -> Text:
        """The filter `join`, with the parts checked before they are joined."""
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        parts = [self.text_of(part) for part in value]
        separator = self.text_of(d)
        self.tick(sum(map(len, parts)) + len(separator) * max(0, len(parts) - 1))
        return joined(separator, parts)

    def indent(self, s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> Text:
        """The filter `indent`: a margin of `width` spaces, or of a text, before each line but the first."""
        text = self.text_of(s)
        margin = self.text_of(width) if isinstance(width, str) else Text.of(" " * width, CONSTANT)
        lines = (text + Text.of("\n", CONSTANT)).splitlines()
        self.check(len(text) + len(lines) * len(margin))
        rest = [line if not line and not blank else margin + line for line in lines[1:]]
        return joined(Text.of("\n", CONSTANT), [margin + lines[0] if first else lines[0], *rest])

    # Jinja's sandbox

    def getattr(self, obj: Any, attribute: str) -> Any:
        """obj.attribute as in Jinja, but without the AttributeError that Jinja raises and catches for keys."""
        if type(obj) is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if isinstance(obj, LoopContext | Namespace) and self._safe.get((type(obj), attribute)):
            value = getattr(obj, attribute)
            return Int.of(value, CONSTANT) if type(value) is int and isinstance(obj, LoopContext) else value
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's result, cached because it is slow; it depends only on the type of `obj` and on `attr`.  Attributes
        that our texts and numbers have beside those of Python are hidden."""
        key = type(obj), attr
        if key not in self._safe:
            hidden = attr in _OWN and isinstance(obj, str | int | float)
            self._safe[key] = not hidden and super().is_safe_attribute(obj, attr, value)
        return self._safe[key]

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's safe `format`, with sources if the format is simple."""
        if not isinstance(value, MethodType | BuiltinMethodType):
            return None
        wrapped, subject = super().wrap_str_format(value), value.__self__
        if wrapped is None:
            return None
        plain_format, text = wrapped, subject if isinstance(subject, Text) else Text(str(subject))

        @wraps(plain_format)
        def formatted(*args: Any, **kwargs: Any) -> str:
            self.of_format(text, (*args, *kwargs.values()))
            plain = str.__str__(plain_format(*args, **kwargs))
            if value.__name__ == "format_map":
                args, kwargs = (), dict(*args)
            filled = text.filled(
                [self.text_of(a) for a in args], {k: self.text_of(v) for k, v in kwargs.items()}, plain
            )
            return filled if isinstance(filled, Text) else Text.of(plain, Unknown("format"))

        return formatted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Checks the operators whose result can be much larger than their operands."""
        self.of_operator(operator, left, right)
        if operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            right = tuple(self.text_of(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in values)
            right = values if any("%" in left and c in left for c in ("%d", "%i", "%f", "%g", "%x")) else right
        return self._sourced(super().call_binop(context, operator, left, right), f"the operator {operator}")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Checks a call of a method or function by the template."""
        self.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str | bytes | int | type):
            args = self.of_method(name, owner, args, (*args, *kwargs.values()))
        elif type(obj) is not Macro:
            for value in (*args, *kwargs.values()):
                self.named(value)
        result = super().call(context, obj, *args, **kwargs)
        if type(result) is not Text:
            return self._sourced(result, name or "a call")
        if isinstance(owner, str):
            self.made += len(result)  # the next step compares it
        return result

    def guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a filter: counts it, refuses arguments that would make too much text, and keeps sources."""
        first = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

        @wraps(function)
        def guard(*args: Any, **kwargs: Any) -> Any:
            subject = args[first] if len(args) > first else None
            self.of_filter(name, subject, (*args[first + 1 :], *kwargs.values()))
            return self._sourced(function(*args, **kwargs), f"the filter {name}")

        return guard

    def _strftime_now(self, format: str) -> Text:
        """The date of the run, with English names in every locale."""
        date = self.date
        names = {
            "%a": _NAMES[int(date.strftime("%w"))][:3],
            "%A": _NAMES[int(date.strftime("%w"))],
            "%b": _MONTHS[date.month - 1][:3],
            "%h": _MONTHS[date.month - 1][:3],
            "%B": _MONTHS[date.month - 1],
        }
        self.of_format(format, ())
        text = re.sub(r"%[aAbBh]", lambda match: names[match[0]], str.__str__(format))
        return Text.of(date.strftime(text), CONSTANT)

    def _add_names(self) -> None:
        """The filters and functions of transformers' environment.  transformers itself takes a second to import."""
        self.globals.update(strftime_now=self._strftime_now, raise_exception=_raise_exception)
        del self.globals["lipsum"]  # writes random text of any length
        ours = {"tojson": self.tojson, "safe": self.safe, "join": self.join, "indent": self.indent}
        filters = {**self.filters, **ours, "string": self.text_of}
        self.filters.update({name: self.guarded(name, function) for name, function in filters.items()})


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


class _Safe(Markup):
    """A text that the template declares safe; like Markup, it escapes what is added to it."""

    pieces: tuple[Piece, ...]

    def __new__(cls, value: object = "", pieces: tuple[Piece, ...] | None = None) -> "_Safe":
        self = super().__new__(cls, value)
        self.pieces = whole(Unknown("an operation on text marked safe"), len(self)) if pieces is None else pieces
        return self


class _Generation(Extension):
    """{% generation %}: the text inside is marked."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        if type(text) is not Text:
            return text
        marked = (p._replace(source=MARKED) if p.source is CONSTANT else p for p in text.pieces)
        return sourced(text, tuple(marked))


def _escaped(text: Text, plain: str) -> Text:
    """JSON of a text.  If no character was escaped, each keeps its source."""
    if len(plain) == len(text) + 2 and str.__eq__(text, plain[1:-1]):
        quote = (Piece(text.pieces[0].source, 0, 0, 1),) if text.pieces else whole(CONSTANT, 1)
        return Text(plain, (*quote, *text.pieces, *quote))
    sources = {piece.source for piece in text.pieces}
    if len(sources) > 1:  # the field of one part could stand for a part of another
        return Text.of(plain, Unknown("tojson of a composed text"))
    first, last = min(piece.start for piece in text.pieces), max(piece.stop for piece in text.pieces)
    return Text(plain, (Piece(text.pieces[0].source, first, last, len(plain)),))


def _kind(value: Any) -> str:
    return "a computed number" if isinstance(value, int | float) else f"a {type(value).__name__}"
