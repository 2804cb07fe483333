"""Finds the statements of a template whose results can be used again in another rendering of the same chat.

Decides on which values the result of a statement depends.  Renderings of one chat differ in the number of messages and
in add_generation_prompt.  So two executions of a statement, or of a loop's iteration for the same message, have the
same result if these values are equal.  They are found in the syntax tree:

    names    values at the start of the loop of names that the template assigns, and of messages and
             add_generation_prompt
    keys     values at the start of the iteration: attributes of namespaces and of `loop`, items of lists, and whole
             conditions that read nothing else, so that `loop.index0 > ns.last_query` depends on true or false only.
             Loops that only ask (`queries.py`) or that end early (`scans.py`) have keys of their own
    changes  attributes of namespaces and lists that the statement may change

A statement that contains an expression that this module does not recognise is always executed.  `replay.py` keeps the
results.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from jinja2 import nodes

from sft.data.template.operations import LIST_METHODS
from sft.data.template.prompt_inputs import PROMPT
from sft.data.template.queries import DECIDING, PURE, Query, query_of
from sft.data.template.scans import IndexScan, scan_of
from sft.data.template.template_names import TemplateNames, at_the_top, is_fresh

_LOOP = frozenset(("index", "index0", "first", "last", "length", "revindex", "revindex0", "previtem", "nextitem"))
_OF_LIST = _LOOP - {"index", "index0", "first", "previtem"}  # attributes that change with the list of the loop
_FUNCTIONS = frozenset(("namespace", "range", "dict", "raise_exception", "strftime_now"))
_GIVEN = frozenset(("messages", PROMPT))
_SPECIAL = frozenset(("self", "super", "caller", "varargs", "kwargs"))
_REFUSED = (
    nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.Macro, nodes.FilterBlock,
    nodes.EvalContextModifier, nodes.ScopedEvalContextModifier, nodes.ContextReference, nodes.DerivedContextReference,
    nodes.InternalName, nodes.ImportedName,
)  # fmt: skip


@dataclass
class Reads:
    """The values that a statement reads, and those that it may change, as the docstring of the module describes them.

    changes  pairs (name, attribute) of namespaces; the attribute None stands for a list with this name
    """

    names: dict[str, None] = field(default_factory=dict)
    keys: list[nodes.Expr | Query | IndexScan] = field(default_factory=list)
    changes: dict[tuple[str, str | None], None] = field(default_factory=dict)


class _Unrecognised(Exception):
    """The error for a statement whose result cannot be kept."""


class Repeated(NamedTuple):
    """A statement whose result can be kept: a loop, each iteration of which has a result, or a text."""

    statement: nodes.For | nodes.Output
    reads: Reads


def repeated(tree: nodes.Template) -> Iterator[Repeated]:
    """Yields the loops and the texts at the top of a template whose results can be kept."""
    if any(True for _ in tree.find_all((nodes.Extends, nodes.Block, nodes.Include, nodes.Import, nodes.FromImport))):
        return
    template = TemplateNames(tree)
    if "loop" in template.assigned | template.all_macros:
        return
    for statement in at_the_top(tree.body):
        if isinstance(statement, nodes.For):
            special = statement.recursive or statement.test or statement.else_
            is_plain = not special and isinstance(statement.target, nodes.Name)
            body = statement.body if is_plain else []
        else:
            calls = any(True for _ in statement.find_all((nodes.Call, nodes.Filter)))
            body = [statement] if calls else []  # plain text is faster to write than to look up
        try:
            if body:
                yield Repeated(statement, _Reader(template, statement, body).reads)
        except _Unrecognised:
            pass


class _Scope(NamedTuple):
    """The names that are visible to an expression.

    local     names that the statement or the macro around the expression assigns
    has_loop  whether `loop` is the loop of the statement
    in_macro  whether the expression is in a macro that the statement calls
    fresh     local names of a macro that get a new namespace before they are used
    scanned   lists, each with the index that a scan around the expression gives it
    """

    local: frozenset[str]
    has_loop: bool
    in_macro: bool
    fresh: frozenset[str] = frozenset()
    scanned: frozenset[tuple[str, str]] = frozenset()


class _Reader:
    """Finds the `Reads` of one statement.  Raises _Unrecognised if its result cannot be kept."""

    def __init__(self, template: TemplateNames, statement: nodes.For | nodes.Output, body: list[nodes.Node]) -> None:
        self.template, self.reads = template, Reads()
        self.tracked: Set[str] = template.assigned | template.all_macros | _GIVEN
        is_loop = isinstance(statement, nodes.For)
        self.target = statement.target.name if isinstance(statement, nodes.For) else None  # type: ignore[attr-defined]
        stored = [name.name for part in body for name in part.find_all(nodes.Name) if name.ctx != "load"]
        self.is_rebound = self.target in stored
        self.local = frozenset(stored) | ({self.target} if self.target else set())
        self._macros: list[str] = []
        scope = _Scope(self.local, is_loop, in_macro=False)
        for part in body:
            self._changes(part, scope)
        self._macros.clear()
        for part in body:
            self._read(part, scope)

    def _changes(self, node: nodes.Node, scope: _Scope) -> None:
        """Finds what a statement, and the macros that it calls, may change."""
        for ref in node.find_all(nodes.NSRef):
            if not (ref.name in scope.local and (ref.name not in self.tracked or ref.name in scope.fresh)):
                self._change(ref.name, ref.attr, scope)
        for call in [*([node] if isinstance(node, nodes.Call) else []), *node.find_all(nodes.Call)]:
            if isinstance(call.node, nodes.Name) and call.node.name in self.template.macros:
                macro = self._macro(call.node.name)
                for part in macro[0] if macro else ():
                    self._changes(part, macro[1])  # type: ignore[index]
            if isinstance(call.node, nodes.Getattr) and call.node.attr in LIST_METHODS:
                match call.node.node:
                    case nodes.Name(name=name):
                        self._change(name, None, scope)
                    case nodes.Getattr(node=nodes.Name(name=name), attr=attr):
                        self._change(name, attr, scope)
                    case _:
                        raise _Unrecognised

    def _change(self, name: str, attr: str | None, scope: _Scope) -> None:
        if name in scope.local or name in self.local or name not in self.tracked:
            raise _Unrecognised
        if attr is not None and name not in self.template.unshared:
            raise _Unrecognised  # another name may have the same namespace; `replay.py` compares lists
        self.reads.changes[name, attr] = None

    def _macro(self, name: str) -> tuple[list[nodes.Node], _Scope] | None:
        """The defaults and the body of a macro, and its scope; None if this statement's macro was read before."""
        if name in self._macros:
            return None
        self._macros.append(name)
        macro = self.template.macros[name]
        parts = [*macro.defaults, *macro.body]
        stored = {n.name for part in macro.body for n in part.find_all(nodes.Name) if n.ctx != "load"}
        fresh = frozenset(name for name in stored if is_fresh(name, parts))
        local = frozenset(stored | {argument.name for argument in macro.args})
        return parts, _Scope(local, has_loop=False, in_macro=True, fresh=fresh)

    def _read(self, node: nodes.Node, scope: _Scope) -> None:
        if isinstance(node, _REFUSED) or (isinstance(node, nodes.Filter) and node.name == "random"):
            raise _Unrecognised
        if isinstance(node, DECIDING) and self._is_known(node, scope):
            self._key(node, scope)
            return
        match node:
            case nodes.Name(ctx="load"):
                self._name(node.name, scope)
            case nodes.Getitem(node=nodes.Name(name=items), arg=nodes.Name(name=at)) if (items, at) in scope.scanned:
                pass
            case nodes.Getattr(node=nodes.Name(name="loop")) | nodes.Getitem(node=nodes.Name(name="loop")):
                if scope.has_loop:
                    if not self._is_known(node, scope):
                        raise _Unrecognised
                    self._key(node, scope)
            case nodes.Getattr(node=nodes.Name(name=name)) if (name, node.attr) in self.reads.changes:
                if name in scope.local - scope.fresh:
                    raise _Unrecognised
            case nodes.Getattr() | nodes.Getitem() | nodes.Filter(name="length" | "count"):
                if isinstance(node.node, nodes.Name) and self._is_known(node, scope):
                    self._key(node, scope)
                else:
                    self._all(node, scope)
            case nodes.Call():
                self._call(node, scope)
            case nodes.For():
                self._loop(node, scope)
            case nodes.CallBlock() if not isinstance(node.call.node, nodes.ExtensionAttribute):
                raise _Unrecognised
            case _:
                self._all(node, scope)

    def _all(self, node: nodes.Node, scope: _Scope) -> None:
        for child in node.iter_child_nodes():
            self._read(child, scope)

    def _name(self, name: str, scope: _Scope) -> None:
        if name in _SPECIAL or (name == "loop" and scope.has_loop):
            raise _Unrecognised
        if name in scope.fresh:
            return
        if name in self.template.all_macros or (name in self.tracked and (name, None) not in self.reads.changes):
            self.reads.names[name] = None

    def _call(self, call: nodes.Call, scope: _Scope) -> None:
        match call.node:
            case nodes.Name(name=name) if name in self.template.macros and name not in scope.local:
                macro = self._macro(name)
                for part in macro[0] if macro else ():
                    self._read(part, macro[1])  # type: ignore[index]
            case nodes.Name(name=name):
                if name not in _FUNCTIONS or name in scope.local:
                    raise _Unrecognised
                self._name(name, scope)
            case nodes.Getattr():
                if call.node.attr not in LIST_METHODS:
                    self._read(call.node.node, scope)
            case nodes.ExtensionAttribute():
                pass
            case _:
                raise _Unrecognised
        for child in call.iter_child_nodes(exclude=("node",)):
            self._read(child, scope)

    def _loop(self, loop: nodes.For, scope: _Scope) -> None:
        if loop.recursive:
            raise _Unrecognised
        query = None if scope.in_macro else query_of(loop, self.tracked)
        if query is not None and self._is_known(query.items, scope):
            self._key(query, scope)
            return
        scan = self._scan_of(loop, scope)
        if scan is not None:
            self.reads.keys.append(scan)
            scanned = scope.scanned | {(scan.items.name, scan.target)}
            for child in loop.body:
                self._read(child, scope._replace(has_loop=False, scanned=scanned))
            return
        for child in loop.iter_child_nodes(exclude=("body",)):
            self._read(child, scope)
        for child in loop.body:
            self._read(child, scope._replace(has_loop=False))

    def _scan_of(self, loop: nodes.For, scope: _Scope) -> IndexScan | None:
        """The loop as a scan over a list that has the same value at the start of the statement; None if it is none."""
        if scope.in_macro or self.template.changes_lists or "range" in self.tracked | scope.local:
            return None
        scan = scan_of(loop, self.template.unshared & (scope.local - self.tracked))  # namespaces that no macro sees
        values = () if scan is None else (scan.items, *scan.indices.args)
        return scan if all(self._is_known(value, scope) for value in values) else None

    def _key(self, key: nodes.Expr | Query, scope: _Scope) -> None:
        """Adds a key, unless its value is the same in all renderings of a chat."""
        node = key.items if isinstance(key, Query) else key
        names = {name.name for name in (node, *node.find_all(nodes.Name)) if isinstance(name, nodes.Name)}
        if (names & self.tracked or (scope.has_loop and "loop" in names)) and key not in self.reads.keys:
            self.reads.keys.append(key)

    def _is_known(self, node: nodes.Node, scope: _Scope) -> bool:
        """Whether the statement does not change the value of the expression before it evaluates the expression.

        If the template changes lists, two names may have the same list.  Then only names, attributes, and values that
        the template is given count as known.
        """
        match node:
            case nodes.Name():
                if node.name == self.target and not scope.in_macro:
                    return not self.is_rebound
                is_free = node.name not in (scope.local | self.local | _SPECIAL | self.template.all_macros | {"loop"})
                return is_free and (node.name, None) not in self.reads.changes
            case nodes.Getattr(node=nodes.Name(name="loop")):
                is_fixed = not (self.template.changes_lists and node.attr in _OF_LIST)
                return scope.has_loop and node.attr in _LOOP and is_fixed
            case nodes.Getattr(node=nodes.Name(name=name)) if self.template.changes_lists:
                return (name, node.attr) not in self.reads.changes and self._is_known(node.node, scope)
            case nodes.Getattr(node=nodes.Name(name=name)) if (name, node.attr) in self.reads.changes:
                return False
            case nodes.Compare() if self.template.changes_lists and _compares_numbers(node):
                return self._is_known(node.expr, scope) and self._is_known(node.ops[0].expr, scope)
            case nodes.Getitem(node=nodes.Name(name=name)):
                if any(name == changed for changed, _ in self.reads.changes):
                    return False
            case nodes.Filter():
                if node.name not in ("length", "count") or node.args or node.kwargs:
                    return False
            case _ if not isinstance(node, PURE):
                return False
        names = {name.name for name in node.find_all(nodes.Name)} - {self.target}
        ours = self.tracked - _GIVEN | self.template.assigned
        if _searches(node) and names & (ours | {"loop"}):
            return False  # the value may be an iterator; a search would take items from it
        return not (self.template.changes_lists and names & ours) and all(
            self._is_known(child, scope) for child in node.iter_child_nodes()
        )


def _searches(node: nodes.Node) -> bool:
    """Whether an expression searches for an item in a value: `in`, `not in`."""
    if isinstance(node, nodes.Compare):
        return any(operand.op in ("in", "notin") for operand in node.ops)
    return isinstance(node, nodes.Test) and node.name == "in"


def _compares_numbers(node: nodes.Node) -> bool:
    """Whether a comparison compares an attribute of `loop` with an attribute, so that no list's items affect it."""
    match node:
        case nodes.Compare(
            expr=nodes.Getattr(node=nodes.Name(name=left)),
            ops=[nodes.Operand(op=operator, expr=nodes.Getattr(node=nodes.Name(name=right)))],
        ):
            return operator not in ("in", "notin") and "loop" in (left, right)
    return False
