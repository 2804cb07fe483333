"""Finds scans in a template: loops over the indices of a list that do nothing after the first item with a property.

    {% for k in range(loop.index0 + 1, messages | length) %}
      {% if ns.stopped %}{% elif messages[k].role != 'tool' %}{% set ns.stopped = true %}{% else %}...{% endif %}
    {% endfor %}

Such a loop depends on the items up to this one, whatever the length of the list is: once `ns.stopped` is true, each
further iteration neither writes nor changes anything.  Without such a property, it depends on all items of its range.

Decides from the form of a loop alone.  A loop of another form is no scan, and `iterations.py` reads all its values.
"""

from collections.abc import Set
from copy import deepcopy
from typing import NamedTuple

from jinja2 import nodes

from sft.data.template.queries import is_blank, reads_only


class IndexScan(NamedTuple):
    """A loop over indices of a list.

    items    the name of the list
    indices  the call of `range`
    target   the name of an index
    stops    a condition on the item, which the name `target` has here, after which nothing happens; None: there is none
    """

    items: nodes.Name
    indices: nodes.Call
    target: str
    stops: nodes.Expr | None


def scan_of(loop: nodes.For, unshared: Set[str]) -> IndexScan | None:
    """The loop as a scan; None if it is none.  unshared: names of namespaces that no other name has

    The caller checks that the list and the arguments of `range` have the same value at the start of the statement.
    """
    if loop.test is not None or loop.else_ or loop.recursive or not isinstance(loop.target, nodes.Name):
        return None
    target, indices = loop.target.name, loop.iter
    if not isinstance(indices, nodes.Call) or not isinstance(indices.node, nodes.Name) or indices.node.name != "range":
        return None
    if indices.kwargs or indices.dyn_args is not None or indices.dyn_kwargs is not None:
        return None
    names = [name for part in loop.body for name in [part, *part.find_all(nodes.Name)] if isinstance(name, nodes.Name)]
    lists = {
        get.node.name
        for part in loop.body
        for get in part.find_all(nodes.Getitem)
        if isinstance(get.node, nodes.Name) and isinstance(get.arg, nodes.Name) and get.arg.name == target
    }
    stored = {name.name for name in names if name.ctx != "load"}
    if len(lists) != 1 or stored & {target, *lists} or any(name.name == "loop" for name in names):
        return None  # `loop.last` depends on the length of the range
    if any(True for part in loop.body for _ in part.find_all((nodes.Continue, nodes.Break))):
        return None  # the statement that ends the scan may not be reached
    [items] = lists
    return IndexScan(nodes.Name(items, "load"), indices, target, _stop(loop, items, unshared - stored))


def _stop(loop: nodes.For, items: str, unshared: Set[str]) -> nodes.Expr | None:
    """The condition on an item after which the iterations of a loop do nothing; None if none is recognised."""
    body = _without_blanks(loop.body)
    if len(body) != 1 or not isinstance(body[0], nodes.If):
        return None
    block = body[0]
    match block.test:
        case nodes.Getattr(node=nodes.Name(name=name), attr=flag) if not _without_blanks(block.body):
            first = block.elif_[:1]  # the branch that is tested first while the flag is false
        case nodes.Not(node=nodes.Getattr(node=nodes.Name(name=name), attr=flag)):
            if block.elif_ or _without_blanks(block.else_):
                return None
            first = [inner for inner in block.body if isinstance(inner, nodes.If)]
        case _:
            return None
    if name not in unshared or not _is_only_set(loop, name, flag):
        return None
    for inner in first:
        if any(_sets(statement, name, flag) for statement in inner.body):
            target = loop.target.name  # type: ignore[attr-defined]
            test = _of_item(deepcopy(inner.test), items, target)
            return test if isinstance(test, nodes.Expr) and reads_only(target, test) else None
    return None


def _of_item(node: nodes.Node, items: str, index: str) -> nodes.Node:
    """An expression in which the name of the index stands for the item: items[k].role -> k.role"""
    match node:
        case nodes.Getitem(node=nodes.Name(name=owner), arg=nodes.Name(name=at)) if (owner, at) == (items, index):
            return nodes.Name(index, "load")
        case nodes.Name(name=other) if other == index:
            return nodes.Name(items, "load")  # the index itself, which is no property of the item
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _of_item(value, items, index))
        elif isinstance(value, list):
            setattr(node, name, [_of_item(v, items, index) if isinstance(v, nodes.Node) else v for v in value])
    return node


def _sets(statement: nodes.Node, name: str, flag: str) -> bool:
    """Whether a statement is {% set name.flag = true %}."""
    match statement:
        case nodes.Assign(target=nodes.NSRef(name=owner, attr=attr), node=nodes.Const(value=True)):
            return (owner, attr) == (name, flag)
    return False


def _is_only_set(loop: nodes.For, name: str, flag: str) -> bool:
    """Whether a loop gives the attribute no value but true."""
    refs = sum((ref.name, ref.attr) == (name, flag) for ref in loop.find_all(nodes.NSRef))
    return refs == sum(_sets(statement, name, flag) for statement in loop.find_all(nodes.Assign))


def _without_blanks(statements: list[nodes.Node]) -> list[nodes.Node]:
    return [node for node in statements if not (isinstance(node, nodes.Output) and is_blank(node))]
