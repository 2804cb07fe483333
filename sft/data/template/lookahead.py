"""Finds how far the keys of a loop (`iterations.py`) read along the list of messages.

Decides which iterations of a loop have the same result when more messages follow, without comparing the keys of each.
Let a loop be executed for n messages, let its keys read up to `reach` messages after the iteration's own message, and
let all other values that the keys read be equal.  Then the first n - reach iterations have the same keys for more
messages.  Keys that read up to `behind` messages before their own may read messages[-1] in the first `behind`
iterations, which are compared one by one.

    {% if loop.last %}, messages[loop.index0 + 1]     reach 1
    messages[loop.index0 - 1]                         behind 1
    a query of messages[loop.index:]                  reach 1, if all further messages have the outcome of the last one
    messages | length, messages[2:]                   not known: the keys of every iteration are compared
"""

from collections.abc import Sequence
from typing import NamedTuple

from jinja2 import nodes

from sft.data.template.queries import Query
from sft.data.template.scans import IndexScan

_AT = {"index0": 0, "index": 1}  # attributes of `loop`, as an index relative to the message
_BEFORE = frozenset((*_AT, "first", "previtem"))
_AFTER = frozenset(("last", "nextitem"))


class Lookahead(NamedTuple):
    """The values that the keys of a loop read.

    reach   the most messages after the iteration's message that a key reads
    behind  the most messages before it that a key reads
    lists   names of lists of which keys read items at an index relative to the message
    queries the position of each query among the keys, and the name of its list
    values  names that keys read, each with the attribute or the fixed index that is read; None: the value of the name
    """

    reach: int
    behind: int
    lists: tuple[str, ...]
    queries: tuple[tuple[int, str], ...]
    values: tuple[tuple[str, str | int | None], ...]


class _Far(Exception):
    """The error for a key that may depend on all messages."""


def lookahead(keys: Sequence[nodes.Expr | Query | IndexScan], target: str) -> Lookahead | None:
    """The values that the keys of a loop read; None if they are not known.  target: the name of the loop's item"""
    finder = _LookaheadFinder(target)
    try:
        for position, key in enumerate(keys):
            if isinstance(key, Query):
                finder.read_query(position, key.items)
            elif isinstance(key, IndexScan):
                return None
            else:
                finder.read(key)
    except _Far:
        return None
    return Lookahead(finder.reach, finder.behind, tuple(finder.lists), tuple(finder.queries), tuple(finder.values))


class _LookaheadFinder:
    def __init__(self, target: str) -> None:
        self.target, self.reach, self.behind = target, 0, 0
        self.lists: dict[str, None] = {}
        self.queries: list[tuple[int, str]] = []
        self.values: dict[tuple[str, str | int | None], None] = {}

    def read_query(self, position: int, items: nodes.Expr) -> None:
        match items:
            case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Slice(start=nodes.Node() as start, stop=None)):
                offset = _offset(start)
                if items.arg.step is None and offset is not None and offset >= 0:  # type: ignore[attr-defined]
                    self.lists[name] = None
                    self.queries.append((position, name))
                    self.reach = max(self.reach, offset)
                    return
        raise _Far

    def read(self, node: nodes.Node) -> None:
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
                if attr not in _BEFORE | _AFTER:
                    raise _Far
                self.reach = max(self.reach, attr in _AFTER)
            case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=int(index))) if name != self.target:
                self.values[name, index] = None
            case nodes.Getitem(node=nodes.Name(name=name)) if name != self.target:
                offset = _offset(node.arg)
                if offset is None:
                    raise _Far
                self.lists[name] = None
                self.reach, self.behind = max(self.reach, offset), max(self.behind, -offset)
            case nodes.Name(name=self.target):
                pass
            case nodes.Getattr(node=nodes.Name(name=self.target)):
                pass
            case nodes.Getattr(node=nodes.Name(name=name), attr=attr):
                self.values[name, attr] = None
            case nodes.Name(name=name):
                self.values[name, None] = None
            case nodes.Filter() | nodes.Slice():
                raise _Far
            case _:
                for child in node.iter_child_nodes():
                    self.read(child)


def _offset(index: nodes.Node) -> int | None:
    """The index relative to that of the loop's item: 1 for loop.index0 + 1; None if `index` has no such form."""
    match index:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
            return _AT.get(attr)
        case nodes.Add(right=nodes.Const(value=int(number))) | nodes.Sub(right=nodes.Const(value=int(number))):
            base = _offset(index.left)
            sign = 1 if isinstance(index, nodes.Add) else -1
            return None if base is None else base + sign * number
    return None
