"""The Jinja environment for chat templates: transformers' environment, with limits, and with texts that keep sources.

Decides the source of the result of each operation of a template.  `limits.py` counts the operations.  As in
transformers, a template has no access to Python internals, cannot change its inputs, and has ranges of at most 100,000;
filters, functions and options are the same.  Unlike there, a template may change a list that it has made itself
(Kimi-K2 does).  The compiler (`compiler.py`) inserts calls of the sandbox's methods into the Python code that Jinja
makes from a template.  These methods are not names in the template, so no template can call them.

    sources  Constants of the template, also inside expressions, have the source CONSTANT.  The text of a macro, a set
             block or a call block keeps its sources, and so do the results of `~`, `+`, slices, tojson, join, indent,
             safe and format, and of many methods of texts (`trace.py`).  The source of any other result is Unknown,
             with the name of the operation.
    writer   In a loop over messages, the loop's message is the writer of the texts that the template makes.
"""

from collections.abc import Callable
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing

from sft.data.template.compiler import Compiler
from sft.data.template.filters import Filters
from sft.data.template.iterations import repeated
from sft.data.template.operations import LIST_METHODS
from sft.data.template.rendering import Output
from sft.data.template.replay import Replay
from sft.data.template.sources import CONSTANT, MARKED, Unknown
from sft.data.template.statement_code import mark_kept
from sft.data.template.trace import Int, Text, sourced

_OF_DICTS = frozenset(dir(dict))
_OWN = frozenset(("pieces", "field", "of", "filled"))  # attributes that our texts and numbers add to Python's

# Methods of texts that Jinja's sandbox does not wrap.
_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}


class Sandbox(Replay, Filters, ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates.  `begin` resets the counts for a rendering.

    message     the index of the message that the template is writing; None outside of loops over messages
    containers  the source of each object and list of the chat, by its id
    date        the date that strftime_now returns
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
        self.begin_output(Output([], []), None)

    def compiled(self, source: str) -> Template:
        """The compiled template, which counts operations and keeps sources.  Raises TemplateSyntaxError."""
        self.begin({}, {})
        tree = self.parse(source)
        statements = list(repeated(tree))
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
        for number, (statement, reads) in enumerate(statements):
            mark_kept(statement, number, reads)
        for assignment in tree.find_all(nodes.Assign):
            assignment.node = nodes.MarkSafe(assignment.node, lineno=assignment.lineno)
        for scope in tree.find_all(nodes.With):
            scope.values = [nodes.MarkSafe(value, lineno=scope.lineno) for value in scope.values]
        return self.template_class.from_code(self, self.compile(tree), {**self.globals})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The value of obj.attribute, as in Jinja.  Unlike Jinja, it raises and catches no AttributeError for keys."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is Text and attribute in _METHODS:
            return getattr(obj, attribute)
        if kind in (LoopContext, Namespace) and self.is_safe_attribute(obj, attribute, None):
            value = getattr(obj, attribute, missing)  # another namespace has this attribute
            if value is not missing:
                return Int.of(value, CONSTANT) if type(value) is int and kind is LoopContext else value
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read the attribute.  Jinja decides, except for two kinds of attributes.

        Methods that change lists are safe, because `call` checks them.  Attributes that `Text` and `Int` add to
        Python's types are never safe.  The result depends only on the type of `obj` and on `attr`.  It is cached,
        because Jinja is slow.
        """
        key = type(obj), attr
        if key not in self._safe:
            hidden = attr in _OWN and isinstance(obj, (str, int, float))
            is_change = key[0] is list and attr in LIST_METHODS  # `call` checks that the template made the list
            self._safe[key] = is_change or (not hidden and super().is_safe_attribute(obj, attr, value))
        return self._safe[key]

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's safe `format`.  The result has sources if the format is simple."""
        if not isinstance(value, (MethodType, BuiltinMethodType)):
            return None
        wrapped, subject = super().wrap_str_format(value), value.__self__
        if wrapped is None:
            return None
        plain_format, text = wrapped, subject if isinstance(subject, Text) else Text(str(subject))

        @wraps(plain_format)
        def formatted(*args: Any, **kwargs: Any) -> str:
            self.check_format(text, (*args, *kwargs.values()))
            plain = str.__str__(plain_format(*args, **kwargs))
            if value.__name__ == "format_map":
                args, kwargs = (), dict(*args)
            filled = text.filled(
                [self.text_of(a) for a in args], {k: self.text_of(v) for k, v in kwargs.items()}, plain
            )
            return filled if isinstance(filled, Text) else Text.of(plain, Unknown("format"))

        return formatted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result of `*`, `**` or `%`.  Raises TooMuch if it would be too large."""
        self.check_operator(operator, left, right)
        if operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            right = tuple(self.text_of(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in values)
            right = values if any("%" in left and c in left for c in ("%d", "%i", "%f", "%g", "%x")) else right
        return self._sourced(super().call_binop(context, operator, left, right), f"the operator {operator}")

    def call(
        self, context: Context, obj: Any, /, *args: Any, _loop_vars: Any = None, _block_vars: Any = None, **kwargs: Any
    ) -> Any:
        """The result of a method or function that the template calls.  Raises TooMuch if it would be too large.

        _loop_vars, _block_vars: arguments that Jinja adds
        """
        self.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if type(owner) is list and name in LIST_METHODS:
            args = self.check_change(owner, name, args)
        elif isinstance(owner, (str, bytes, int, type)):
            args = self.check_method(name, owner, args, (*args, *kwargs.values()))
        elif type(obj) is not Macro:
            for value in (*args, *kwargs.values()):
                self.named(value)
        if type(owner) is Text and name in _METHODS:
            result = obj(*args, **kwargs)
        else:
            result = super().call(context, obj, *args, _loop_vars=_loop_vars, _block_vars=_block_vars, **kwargs)
        if type(result) is not Text:
            return self._sourced(result, name or "a call")
        if isinstance(owner, str):
            self.made += len(result)  # the next step compares the sum with its limit
        return result

    def guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the filter `function` with checks.  The result has the sources of its characters.

        Each call is counted, and refused if its result would be too large.
        """
        first = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

        @wraps(function)
        def guard(*args: Any, **kwargs: Any) -> Any:
            subject = args[first] if len(args) > first else None
            self.check_filter(name, subject, (*args[first + 1 :], *kwargs.values()))
            return self._sourced(function(*args, **kwargs), f"the filter {name}")

        return guard

    def _add_names(self) -> None:
        """Adds the filters and functions of transformers' environment, without the import of transformers, which takes
        a second."""
        self.globals.update(strftime_now=self.strftime_now, raise_exception=_raise_exception)
        del self.globals["lipsum"]  # writes random text of any length
        ours = {"tojson": self.tojson, "safe": self.safe, "join": self.join, "indent": self.indent}
        filters = {**self.filters, **ours, "string": self.text_of}
        self.filters.update({name: self.guarded(name, function) for name, function in filters.items()})


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """The block {% generation %}: constants of the template in it get the source MARKED."""

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
