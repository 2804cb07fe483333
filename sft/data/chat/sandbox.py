"""Jinja as transformers runs it for chat templates, computing with texts that keep their sources, within limits.

Decides which source the result of each operation of a template has, and how many steps and characters a template may
use.  `Sandbox` is transformers' environment: the same sandbox (no access to Python internals, no changes of the input,
ranges of at most 100,000), filters, functions and options.  Its compiler, `_Compiler`, writes calls of the methods here
into the Python code that Jinja makes of a template.  They are no names of the template, so no template can call them.

    sources     Constants of the template, also inside expressions, get the source CONSTANT.  What a macro, a set block
                or a call block collects keeps its sources, and so do `~`, tojson, join, safe and format.  The result of
                any other filter or function without sources is Unknown, with the name of the operation.
    the writer  A loop over messages says which message is being written.
    steps       Each turn of a loop, each test of a loop, each call and each filter is a step.
    characters  Each text is counted where an operation makes it.  Results of * and %, and of methods and filters that
                lengthen text (join, center, indent, ...), are checked before they are made.

The limits are counts, so they are the same on every machine.  What one built-in operation does with data within the
limits has none; `limits.py` is the backstop.
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MappingProxyType, MethodType
from typing import Any

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup

from sft.data.chat.sources import CONSTANT, MARKED, UNKNOWN, Field, Piece, Unknown
from sft.data.chat.trace import Float, Int, Text, concatenated, joined, sourced, whole
from sft.errors import DataError

MAX_STEPS = 10_000_000  # a chat of 1,500 messages takes some 100,000
MAX_CHARACTERS = 100_000_000  # of one text: about 25 million tokens; longer than any sample, and fits into memory
MAX_MADE = 2_000_000_000  # of all texts that one rendering makes
_MAX_BITS = 100_000  # largest size of an integer
_MAX_NUMBER = 1_000_000  # largest number for methods and filters that lengthen text
_ITEM = 8  # an item of a list or mapping counts as this many characters
_OF_DICTS = frozenset(dir(dict))
_OWN = frozenset(dir(Text)) | {"field"}  # attributes of our texts and numbers that Python's do not have
_PYTHONS = MappingProxyType({Text: frozenset(dir(str)), Int: frozenset(dir(int)), Float: frozenset(dir(float))})
# Methods of text and filters whose result can be much longer than their arguments.
_LONGER = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "replace", "join", "format"}
_NUMERIC = _LONGER | {"round", "slice", "batch", "tojson", "truncate", "encode", "filesizeformat"}
# Filters that look at the items of a list, but not into them.
_SHALLOW = frozenset(
    "length count list first last map select reject selectattr rejectattr items dictsort batch slice reverse default d "
    "sort unique min max sum groupby attr random".split()
)
_WIDE = re.compile(r"\d{6}|\*|\{[^{}]*\{")  # a width of six digits, or a width from an argument
_NAMES = "Sunday Monday Tuesday Wednesday Thursday Friday Saturday".split()
_MONTHS = "January February March April May June July August September October November December".split()


class TooMuch(DataError):
    """The template would take too many steps or write too much."""


class _Compiler(CodeGenerator):
    """Jinja's compiler; constants become texts with a source, and what is written or named passes through Sandbox."""

    environment: "Sandbox"

    def _constant(self, value: str | int) -> str:
        return f"environment.constants[{self.environment.constant(value)}]"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str | int) and not isinstance(node.value, bool):
            self.write(self._constant(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._constant(node.data))

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        raise nodes.Impossible()  # nothing is computed at compile time, where no limit holds

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        escaping = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self.write("environment.write_escaped(context.eval_ctx, " if escaping else "environment.write(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._call("environment.add", (node.left, node.right), frame)

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        if isinstance(node.expr, nodes.Const):  # what is only compared needs no source
            self.write(f" {_OPERATORS[node.op]} {node.expr.value!r}")
        else:
            super().visit_Operand(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Const):
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(f", {node.arg.value!r})")
        else:
            super().visit_Getitem(node, frame)

    def visit_MarkSafe(self, node: nodes.MarkSafe, frame: Frame) -> None:
        """Jinja's parser never makes this node; `Sandbox.compiled` puts it around values that get a name."""
        self._call("environment.named", (node.expr,), frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        if isinstance(node.node, nodes.Tuple) and not node.node.items:  # `Sandbox.compiled` puts it into macros
            self.writeline("environment.tick()")
        elif isinstance(node.node, nodes.Name) and getattr(node, "begins_loop", False):
            self.newline(node)
            self._call("environment.enter", (node.node,), frame)
        else:
            super().visit_ExprStmt(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        outer = self.temporary_identifier()
        self.writeline(f"{outer} = environment.message")
        super().visit_For(node, frame)
        self.writeline(f"environment.message = {outer}")

    def _call(self, function: str, arguments: tuple[nodes.Expr, ...], frame: Frame) -> None:
        self.write(f"{function}(")
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


_OPERATORS = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in"}


class Sandbox(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates.  `begin` resets the counts for a rendering.

    message     the index of the message that the template is writing; None outside of loops over messages
    containers  the source of each object and list of the chat, by its id
    date        what strftime_now tells the template
    """

    intercepted_binops = frozenset(["*", "**", "%"])
    code_generator_class = _Compiler

    def __init__(self, date: str) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], optimized=False)
        self.date = datetime.fromisoformat(date)
        self.constants: list[Text | Int] = []
        self.max_steps, self.max_characters, self.max_made = MAX_STEPS, MAX_CHARACTERS, MAX_MADE
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
        for loop in tree.find_all(nodes.For):
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

    def tick(self, characters: int = 0) -> bool:
        """Counts a step that makes a text of this many characters."""
        self.steps += 1
        self.made += characters
        if self.steps > self.max_steps:
            raise TooMuch(f"takes more than {self.max_steps:,} steps")
        if characters > self.max_characters or self.made > self.max_made:
            raise TooMuch(f"writes more than {min(self.max_characters, self.made):,} characters")
        return True

    def check(self, characters: int) -> None:
        """Refuses a text of this many characters before it is made."""
        if characters > self.max_characters:
            raise TooMuch(f"writes more than {self.max_characters:,} characters")

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
        return str(Markup.escape(value)) if eval_context.autoescape else self.write(value)

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
            self.check(_extent(value, self.max_characters))
        return value

    def concatenate(self, parts: tuple[Any, ...]) -> Text:
        """The operator ~."""
        text = concatenated([part if type(part) is Text else self.text_of(part) for part in parts])
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
            self.check(_extent(value, self.max_characters))
        elif isinstance(left, Int) and isinstance(right, Int) and left.field is right.field is CONSTANT:
            return Int.of(value, CONSTANT)  # a template that counts
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
        self.check(_extent(value, self.max_characters))
        text = str(value)
        source = self.containers.get(id(value)) or Unknown(f"the text of {_kind(value)}")
        return Text.of(str.__str__(text), source)

    def _sourced(self, value: Any, operation: str) -> Any:
        """The result of a filter or function; one without sources gets the name of the operation."""
        if type(value) is str or (isinstance(value, str) and not isinstance(value, Text | _Safe)):
            if type(value) is str:
                self.tick(len(value))
                return Text.of(value, Unknown(operation))
        return value

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """transformers' filter: JSON, in which the text of a value of the chat has the value's source."""
        self.check(_extent(value, self.max_characters))
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
            hidden = attr in _OWN and attr not in _PYTHONS.get(type(obj), _OWN)
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
            self._check_format(text, (*args, *kwargs.values()))
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
        if operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            self._check_format(left, values)
            right = tuple(self.text_of(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in values)
            right = values if any("%" in left and c in left for c in ("%d", "%i", "%f", "%g", "%x")) else right
        elif isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if size > _MAX_BITS:
                raise TooMuch("computes a number of too many digits")
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | bytes | bytearray | list | tuple) and isinstance(times, int):
                    self.check(
                        (len(sequence) if isinstance(sequence, str) else _extent(sequence, self.max_characters)) * times
                    )
        return self._sourced(super().call_binop(context, operator, left, right), f"the operator {operator}")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Checks a call of a method or function by the template."""
        self.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str | bytes):
            args = self._check_method(name, owner, args, kwargs)
        elif type(obj) is not Macro:
            for value in (*args, *kwargs.values()):
                self.named(value)
        result = super().call(context, obj, *args, **kwargs)
        return result if type(result) is Text else self._sourced(result, name or "a call")

    def guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a filter: counts it, refuses arguments that would make too much text, and keeps sources."""
        first = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

        @wraps(function)
        def guard(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            subject, others = args[first] if len(args) > first else None, args[first + 1 :]
            if name in _NUMERIC:
                self._check_numbers((*others, *kwargs.values()))
                text = subject if isinstance(subject, str) else ""
                self._check_longer(name, text, (*others, *kwargs.values()))
            if name not in _SHALLOW and not isinstance(subject, str | int | float | None):
                self.check(_extent(subject, self.max_characters))
            return self._sourced(function(*args, **kwargs), f"the filter {name}")

        return guard

    def _check_method(self, name: str, text: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if name == "join" and args:
            parts = list(args[0])
            self.check(sum(len(part) + len(text) for part in parts if isinstance(part, str)))
            return (parts, *args[1:])
        if name in _NUMERIC:
            self._check_numbers((*args, *kwargs.values()))
            self._check_longer(name, text, (*args, *kwargs.values()))
        return args

    def _check_numbers(self, values: tuple[Any, ...]) -> None:
        if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in values):
            raise TooMuch(f"gives a filter or method a number above {_MAX_NUMBER:,}")

    def _check_longer(self, name: str, text: str, values: tuple[Any, ...]) -> None:
        largest = max([1, *(len(v) if isinstance(v, str) else v for v in values if isinstance(v, str | int))])
        if name == "replace":
            self.check(len(text) + text.count(str(values[0]) if values else "") * largest)
        elif name in ("indent", "wordwrap", "expandtabs"):
            self.check(len(text) + (text.count("\n") + text.count("\t") + len(text) // 2 + 1) * largest)
        elif name == "format":
            self._check_format(text, values)
        elif name == "tojson" and any(isinstance(value, int) and value > 100 for value in values):
            raise TooMuch("indents JSON by more than 100 columns")

    def _check_format(self, template: str, args: tuple[Any, ...]) -> None:
        if _WIDE.search(template):
            raise TooMuch("formats text to a width that is not written in up to five digits")
        longest = max((_extent(arg, self.max_characters) for arg in args), default=0)
        widest = max(map(int, re.findall(r"\d+", template)), default=0)
        self.check(len(template) + (template.count("%") + template.count("{")) * max(longest, widest))

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
        self._check_format(format, ())
        text = re.sub(r"%[aAbBh]", lambda match: names[match[0]], str.__str__(format))
        return Text.of(date.strftime(text), CONSTANT)

    def _add_names(self) -> None:
        """Adds the filters, functions and tests of transformers' environment, which templates use."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template("").environment
        self.globals.update(environment.globals, strftime_now=self._strftime_now)
        del self.globals["lipsum"]  # writes random text of any length
        ours = {"tojson": self.tojson, "safe": self.safe, "join": self.join, "indent": self.indent}
        filters = {**environment.filters, **ours, "string": self.text_of}
        self.filters.update({name: self.guarded(name, function) for name, function in filters.items()})
        self.tests.update(environment.tests)


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
