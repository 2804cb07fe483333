"""Decides when two values of a template are equal, so that a statement has the same result with both.

    texts             if they have the same characters from the same sources
    parts of the chat if they are the same message, object or list
    lists             that the template made: if their items are equal
    true and 1        are not equal, because their texts differ

A value that the template may change later, such as a namespace or a macro, is equal to no value.
"""

from collections.abc import Callable
from typing import Any

from jinja2.runtime import Undefined
from jinja2.utils import Namespace, missing

from sft.data.template.operations import Operations
from sft.data.template.trace import Float, Int, Text

_MOST_ITEMS = 100_000  # items of a list that the template made
_DEPTH = 4  # levels of such lists


class Incomparable(Exception):
    """The error for a value that is equal to no value."""


class ValueKeys(Operations):
    """Compares values of a template by keys."""

    def key(self, values: tuple[Any, ...], lists: list[int]) -> tuple[Any, ...] | None:
        """A key that is equal for equal values; None if one of the values is equal to no value.

        lists: the ids of lists among the values that the template made are added to it
        """
        try:
            return tuple([self._part(value, lists, _DEPTH) for value in values])
        except Incomparable:
            return None

    def _part(self, value: Any, lists: list[int], depth: int) -> Any:
        kind = type(value)
        if kind is bool or value is None:
            return value  # numbers are parts of tuples, so True is not 1
        if kind is Text:
            self.step(len(value.pieces))
            return Text, value, value.pieces
        if kind is str or kind is int:
            return kind, value
        if kind is Int:
            return Int, int(value), value.field
        if kind is Float or kind is float:
            return kind, repr(float(value)), getattr(value, "field", None)
        if value is missing or isinstance(value, Undefined):
            return (missing,)
        if kind is dict or kind is list or kind is tuple:
            if id(value) in self.messages or id(value) in self.containers:
                return id(value), kind
            if kind is not dict and depth and len(value) <= _MOST_ITEMS:
                lists.append(id(value))
                self.step(len(value))
                return kind, tuple([self._part(item, lists, depth - 1) for item in value])
        raise Incomparable

    def scan(self, items: Any, indices: Any, stops: Callable[[Any], tuple[Any, ...]]) -> tuple[int, ...]:
        """The indices and the ids of the items of a scan, up to the first item that stops it."""
        if type(items) is not list or type(indices) is not range:
            raise Incomparable
        passed: list[int] = []
        for index in indices:
            self.step(1)
            item = items[index]
            if id(item) not in self.messages:
                raise Incomparable
            passed += [index, id(item)]
            if any(stops(item)):
                break
        return tuple(passed)


def value_of(owner: Any, attribute: str | None) -> Any:
    """The value of an attribute of a namespace, or, if `attribute` is None, the list.  Raises Incomparable for
    others."""
    if attribute is None:
        if type(owner) is not list:
            raise Incomparable
        return owner
    if type(owner) is not Namespace:
        raise Incomparable
    return owner._Namespace__attrs.get(attribute, missing)


def leave(owner: Any, attribute: str | None, value: Any) -> None:
    """Gives an attribute of a namespace, or a list, the value that a kept statement left in it."""
    now = value_of(owner, attribute)
    if type(now) is list:
        now[:] = value
    elif value is missing:
        owner._Namespace__attrs.pop(attribute, None)
    else:
        owner._Namespace__attrs[attribute] = value
