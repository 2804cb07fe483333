"""Finds queries in a template: loops over messages that only determine whether some message has a property.

    {% for later in messages[loop.index:] %}
      {% if later.role == 'assistant' and 'tool_calls' not in later %}{% set answer.found = true %}{% endif %}
    {% endfor %}

For each item, the conditions have some combination of values.  The result of such a loop depends only on which
combinations occur, and on the order in which each of them occurs last.  It does not depend on the number of items.
"""

from collections.abc import Set
from typing import NamedTuple

from jinja2 import nodes

DECIDING = (nodes.Compare, nodes.And, nodes.Or, nodes.Not, nodes.Test)
PURE = (
    *DECIDING, nodes.Const, nodes.Operand, nodes.Neg, nodes.Add, nodes.Sub, nodes.CondExpr, nodes.Slice, nodes.Tuple,
    nodes.List, nodes.Getattr, nodes.Getitem, nodes.Concat,
)  # fmt: skip


class Query(NamedTuple):
    """A loop that only assigns constants, depending on conditions on its items.

    items   the list, or the part of it, that the loop reads
    target  the name of an item
    tests   the conditions
    """

    items: nodes.Expr
    target: str
    tests: tuple[nodes.Expr, ...]


def query_of(loop: nodes.For, taken: Set[str]) -> Query | None:
    """The loop as a query; None if it is no query.  taken: names that the loop must not change"""
    if loop.test is not None or loop.else_ or loop.recursive:
        return None
    if not isinstance(loop.target, nodes.Name) or not isinstance(loop.iter, nodes.Getitem | nodes.Name):
        return None
    tests: list[nodes.Expr] = []
    waiting: list[nodes.Node] = list(loop.body)
    while waiting:
        match waiting.pop():
            case nodes.If() as block:
                tests.append(block.test)  # type: ignore[arg-type]
                waiting += [*block.body, *block.elif_, *block.else_]
            case nodes.Assign(target=nodes.NSRef(name=name), node=nodes.Const(value=value)) if name not in taken:
                if isinstance(value, str):
                    return None  # a text would get the item's message as its writer
            case nodes.Output() as output if is_blank(output):
                pass
            case _:
                return None
    if any(not reads_only(loop.target.name, test) for test in tests):
        return None
    return Query(loop.iter, loop.target.name, tuple(tests))


def reads_only(item: str, node: nodes.Node) -> bool:
    """Whether an expression reads nothing but the item."""
    is_pure = node.name == item if isinstance(node, nodes.Name) else isinstance(node, PURE)
    return is_pure and all(reads_only(item, child) for child in node.iter_child_nodes())


def is_blank(output: nodes.Output) -> bool:
    """Whether a text of the template writes nothing."""
    return all(isinstance(node, nodes.TemplateData) and not node.data for node in output.nodes)
