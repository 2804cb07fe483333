"""Finds the names that the statements at the top of a template assign, its macros, and its texts and loops there."""

from collections.abc import Iterable, Iterator

from jinja2 import nodes

from sft.data.template.operations import LIST_METHODS


def at_the_top(statements: list[nodes.Node]) -> Iterator[nodes.For | nodes.Output]:
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
    macros        the macros whose name nothing else has
    changes_lists whether the template calls a method that changes lists
    """

    def __init__(self, tree: nodes.Template) -> None:
        self.assigned = frozenset(_assigned_at_the_top(tree.body))
        macros = list(tree.find_all(nodes.Macro))
        taken = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
        names = [macro.name for macro in macros]
        self.all_macros = frozenset(names)
        self.macros = {m.name: m for m in macros if names.count(m.name) == 1 and m.name not in taken}
        self.changes_lists = any(
            isinstance(call.node, nodes.Getattr) and call.node.attr in LIST_METHODS
            for call in tree.find_all(nodes.Call)
        )


def is_fresh(name: str, statements: list[nodes.Node]) -> bool:
    """Whether all statements that use a name do so after one that gives it a new namespace."""
    for at, statement in enumerate(statements):
        if not _has(name, [statement]):
            continue
        match statement:
            case nodes.Assign(target=nodes.Name(name=target), node=nodes.Call(node=nodes.Name(name="namespace"))):
                return target == name and not _has(name, [statement.node])
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
