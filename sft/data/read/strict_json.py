"""Parses a row strictly as JSON.  A row of a table is a value already and is not parsed.

Refuses some JSON that Python's reader accepts: duplicate keys, NaN and Infinity, numbers too large for a float, half
surrogate pairs, and nesting beyond MAX_DEPTH.  An error names the fault.  If the text is not JSON or not UTF-8, it also
names the position inside the row.  This module knows neither files nor row numbers.
"""

import json
import math
import re
from collections import Counter
from typing import Any, NamedTuple

from sft.errors import DataError

MAX_DEPTH = 100  # tool schemas reach 20; functions and templates can recurse to this depth

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Unreadable(NamedTuple):
    """Replaces a row that cannot be read, and holds the reason."""

    reason: str


Content = bytes | dict[str, Any] | Unreadable  # unparsed JSON, or a row of a table


def parse(content: Content) -> Any:
    """The value of a row; a row of a table is returned unchanged.  Raises DataError if the row is not strict JSON."""
    if isinstance(content, Unreadable):
        raise DataError(content.reason)
    return parse_json(content) if isinstance(content, bytes) else content


def parse_json(content: bytes | str) -> Any:
    """The value of the JSON text `content`.  Raises DataError if it is not strict JSON.

    b'{"a": 1}' -> {"a": 1}        b'{"a": 1' -> DataError: not JSON: Expecting ',' delimiter at column 8 of 7 ...
    """
    text = content if isinstance(content, str) else _decode(content)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise DataError(f"not JSON: {error.msg.removesuffix(' at')} at {where} of {len(text):,} characters.") from error
    except RecursionError:
        raise DataError(f"not usable JSON: nested too deeply, beyond {MAX_DEPTH} levels.") from None
    except ValueError as error:  # an integer has more digits than Python accepts
        raise DataError(f"not usable JSON: {error}") from error
    _check_depth(value, text)
    _check_surrogates(value, text)
    return value


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8: byte {content[error.start]:#04x} at position {error.start + 1}.  Convert the file to UTF-8."
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise DataError(f"key {next(name for name in counts if counts[name] > 1)!r} appears twice in one object.")
    return value


def _no_constant(name: str) -> Any:
    raise DataError(f"{name} is not JSON.")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise DataError(f"not usable JSON: the number {digits[:40]} is too large.")
    return value


def _check_depth(value: object, text: str) -> None:
    if text.count("[") + text.count("{") <= MAX_DEPTH:  # too few brackets for a deeper value: skips the slow check
        return
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise DataError(f"not usable JSON: nested too deeply, beyond {MAX_DEPTH} levels.")


def _check_surrogates(value: object, text: str) -> None:
    if _SURROGATE.search(text) is None:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(f"contains half a surrogate pair ({code}), which is not valid text.") from None
