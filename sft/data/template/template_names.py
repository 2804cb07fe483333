"""Finds the loops and texts at the top of a template, the names that the statements there assign, and its macros.

A statement is at the top if it is in no loop or macro; it may be in an `if`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from jinja2 import nodes

from sft.data.template.operations import LIST_METHODS


def at_the_top(statements: list[nodes.Node]) -> Iterator[nodes.For | nodes.Output]:
    """Yields the loops and texts at the top, also those inside `if`."""
    for statement in statements:
        if isinstance(statement, nodes.For | nodes.Output):
            yield statement
        elif isinstance(statement, nodes.If):
            for part in (statement, *statement.elif_):
                yield from at_the_top(part.body)
            yield from at_the_top(statement.else_)


def _assigned_at_the_top(statements: list[nodes.Node]) -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, nodes.If):
            for part in (statement, *statement.elif_):
                yield from _assigned_at_the_top(part.body)
            yield from _assigned_at_the_top(statement.else_)
        elif isinstance(statement, nodes.Assign | nodes.AssignBlock):
            names = [statement.target, *statement.target.find_all(nodes.Name)]
            yield from (name.name for name in names if isinstance(name, nodes.Name))


class TemplateNames:
    """The names of a template.

    assigned      names that statements at the top assign
    macros        macros that are outside of all other statements, and whose name is used for nothing else
    all_macros    the names of all macros
    unshared      names of namespaces that cannot be reached by another name, a list or a namespace
    changes_lists whether the template calls a method that changes lists
    """

    def __init__(self, tree: nodes.Template) -> None:
        self.assigned = frozenset(_assigned_at_the_top(tree.body))
        macros = list(tree.find_all(nodes.Macro))
        taken = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
        names = [macro.name for macro in macros]
        self.all_macros = frozenset(names)
        self.macros = {m.name: m for m in macros if m in tree.body and names.count(m.name) == 1 and m.name not in taken}
        self.unshared = _unshared(tree) - self.all_macros if "namespace" not in taken | self.all_macros else frozenset()
        self.changes_lists = any(
            isinstance(call.node, nodes.Getattr) and call.node.attr in LIST_METHODS
            for call in tree.find_all(nodes.Call)
        )


def _unshared(tree: nodes.Template) -> frozenset[str]:
    """The names that are only assigned new namespaces, and of which only attributes are read."""
    names = list(tree.find_all(nodes.Name))
    stored = Counter(name.name for name in names if name.ctx != "load")
    loaded = Counter(name.name for name in names if name.ctx == "load")
    owners = Counter(get.node.name for get in tree.find_all(nodes.Getattr) if isinstance(get.node, nodes.Name))
    new = Counter(filter(None, map(_gets_namespace, tree.find_all(nodes.Assign))))
    return frozenset(name for name in new if new[name] == stored[name] and owners[name] == loaded[name])


def _gets_namespace(statement: nodes.Node) -> str | None:
    """The name to which a statement assigns a new namespace; None if it does not."""
    match statement:
        case nodes.Assign(target=nodes.Name(name=name), node=nodes.Call(node=nodes.Name(name="namespace"))):
            return name
    return None


def is_fresh(name: str, statements: list[nodes.Node]) -> bool:
    """Whether a name gets a new namespace before the statements use it in any other way."""
    for at, statement in enumerate(statements):
        if not _has(name, [statement]):
            continue
        match statement:
            case nodes.Assign() if _gets_namespace(statement) == name:
                return not _has(name, [statement.node])
            case nodes.If():
                parts = [statement, *statement.elif_]
                bodies = [*(part.body for part in parts), statement.else_]
                conditions = [part.test for part in parts]
            case nodes.For():
                bodies = [statement.body]
                conditions = [*statement.iter_child_nodes(exclude=("body",))]
            case _:
                return False
        inside = all(not _has(name, body) or is_fresh(name, body) for body in bodies)
        return inside and not _has(name, conditions) and not _has(name, statements[at + 1 :])
    return False


def _has(name: str, parts: Iterable[nodes.Node]) -> bool:
    return any(
        n.name == name
        for part in parts
        for n in (part, *part.find_all((nodes.Name, nodes.NSRef)))
        if isinstance(n, nodes.Name | nodes.NSRef)
    )
