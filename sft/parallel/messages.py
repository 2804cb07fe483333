"""Messages between the ranks of a run: values as JSON, which a rank reads without running code.

A pickle can run any command as the user who reads it, so no message of this project holds one.  null, booleans,
numbers, strings, and dicts whose keys are strings are sent as JSON values.  Every other value is a JSON array that
begins with the name of its class.  Objects of a class can only be sent if the class is registered.  All ranks run the
same code, so all ranks have the same registered classes.

[3, Path("a")]  ->  ["list", 3, ["PosixPath", "a"]]
"""

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sft.errors import SftError

C = TypeVar("C", bound=type)

_PLAIN = (type(None), bool, int, float, str)


class InvalidMessage(ValueError):
    """The bytes are not a message that this program writes."""


class _Kind(NamedTuple):
    name: str
    parts: Callable[[Any], list[Any]]  # value -> its parts
    value: Callable[[list[Any]], Any]  # parts -> an equal value


_by_class: dict[type, _Kind] = {}
_by_name: dict[str, _Kind] = {}


def encode(value: Any) -> bytes:
    """The message of `value`.  Raises TypeError if `value` holds an object of a class that is not registered."""
    return json.dumps(_node(value), separators=(",", ":")).encode("ascii")


def decode(message: bytes) -> Any:
    """The value of a message from another rank.  Raises InvalidMessage if the bytes are no message."""
    try:
        return _value(json.loads(message))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidMessage(reason[:200]) from error


def register(kind: type, parts: Callable[[Any], list[Any]], value: Callable[[list[Any]], Any]) -> None:
    """Allow objects of exactly the class `kind` in messages.

    parts  object -> a list of values of registered classes
    value  this list -> an equal object
    """
    assert kind.__name__ not in _by_name or kind in _by_class, f"two classes {kind.__name__} would be sent"
    _by_class[kind] = _by_name[kind.__name__] = _Kind(kind.__name__, parts, value)


def message(kind: C) -> C:
    """Register a dataclass, a named tuple or an enumeration, and return it.  Also used as a decorator."""
    if issubclass(kind, Enum):
        register(kind, lambda member: [member.name], lambda parts: kind[parts[0]])
        return kind
    names = (
        [field.name for field in fields(kind)] if is_dataclass(kind) else list(getattr(kind, "_fields"))
    )  # noqa: B009

    def value(parts: list[Any]) -> Any:
        return kind(**dict(zip(names, parts, strict=True)))

    register(kind, lambda of: [getattr(of, name) for name in names], value)
    return kind


def error_message(error: Exception, rank: int) -> list[Any]:
    """The parts of `error` that are sent to other ranks.  The other ranks raise it again (`to_error`).

    An error that is neither an SftError nor an OSError is a bug.  Of a bug, class, text and `rank` are sent.
    """
    if isinstance(error, SftError):
        names = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, SftError)]
        return ["SftError", names, str(error)]
    if isinstance(error, OSError) and error.errno is not None:
        files = [None if name is None else str(name) for name in (error.filename, error.filename2)]
        return ["OSError", error.errno, str(error.strerror), *files]
    if isinstance(error, OSError):
        return ["OSError", None, f"{type(error).__name__}: {error}" if type(error) is not OSError else str(error)]
    return ["bug", f"rank {rank}: {type(error).__name__}: {error}"]


def to_error(sent: list[Any]) -> Exception:
    """The error from which `error_message` made `sent`.

    The result for an SftError has the error's class, or its nearest base class that this process has imported.  The
    result for a bug is a RuntimeError.

    Raises InvalidMessage if `sent` describes no error.
    """
    match sent:
        case ["SftError", [*names], str(text)]:
            known = {kind.__name__: kind for kind in _errors(SftError)}
            return next((known[name](text) for name in names if name in known), SftError(text))
        case ["OSError", None, str(text)]:
            return OSError(text)
        case ["OSError", int(number), str(text), filename, filename2]:
            return OSError(number, text, filename, None, filename2)
        case ["bug", str(text)]:
            return RuntimeError(text)
    raise InvalidMessage(f"not the description of an error: {sent!r:.100}")


def _errors(base: type[SftError]) -> Iterator[type[SftError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _errors(kind)


def _node(value: Any) -> Any:
    """The JSON form of a value."""
    if type(value) in _PLAIN:
        return value
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _node(item) for key, item in value.items()}
    kind = _by_class.get(type(value))
    if kind is None:
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not registered for messages")
    return [kind.name, *map(_node, kind.parts(value))]


def _only(parts: list[Any]) -> Any:
    (part,) = parts
    return part


def _value(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _value(item) for key, item in node.items()}
    if not isinstance(node, list):
        return node
    if not node or type(node[0]) is not str or node[0] not in _by_name:
        raise InvalidMessage(f"a value of the unknown kind {node[0] if node else None!r:.100}")
    return _by_name[node[0]].value([_value(part) for part in node[1:]])


register(list, lambda items: items, lambda parts: parts)
register(tuple, list, tuple)
register(set, list, set)
register(frozenset, list, frozenset)
register(
    dict,
    lambda items: [key_or_item for pair in items.items() for key_or_item in pair],
    lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
)
register(
    bytes, lambda data: [base64.b64encode(data).decode()], lambda parts: base64.b64decode(_only(parts), validate=True)
)
register(type(Path()), lambda path: [str(path)], lambda parts: Path(_only(parts)))
