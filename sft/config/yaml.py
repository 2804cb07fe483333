"""Reads and writes the part of YAML 1.2 that a recipe needs.

This module decides the type and value of a scalar.  It refuses anchors, aliases, tags and several documents.  It does
not know the keys of a recipe.  PyYAML parses the text into events, and this module reads the events.  PyYAML's own
loader is not used, because it reads YAML 1.1 (no is false, 010 is 8, 1e-5 is text), accepts duplicate keys and drops
line numbers.

    1e-5 -> 1e-05    5e4 -> 50000.0    7 -> 7    true -> True    ~ -> None    "7" -> "7"
    text: no, on, off, yes, 010, 0x1F, 1_000, 1:30:00, 2024-01-01
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import yaml

from sft.errors import ConfigError

MAX_DEPTH = 20
# Events of the parser: keys and values, and the start and the end of each list and mapping.  A recipe of all keys has
# about 1,000, and data.train may list thousands of files.
MAX_VALUES = 20_000
INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")


class Pairs(list[tuple[str, int, Any]]):
    """A mapping as a list of (key, line, value) in the order of the file, including duplicate keys."""


def read(text: str, source: str) -> Any:
    """The document in `text`: scalars, lists, and Pairs for mappings.  An empty text is a mapping without keys.

    source: the name of the text in errors
    Raises ConfigError if the text is not the part of YAML that this module reads.
    """
    try:
        events = _counted(yaml.parse(text, Loader=yaml.SafeLoader), source)
        starts = (event for event in events if isinstance(event, yaml.DocumentStartEvent))
        documents = [_node(events, source, 0) for _ in starts]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line if error.problem_mark else 0
        advice = "Indent with spaces." if "\\t" in str(error.problem) else "Quote texts with special characters."
        raise _unreadable(source, line, f"{error.problem}.  {advice}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        raise _unreadable(source, line, f"control character {error.character:#x}.  Remove it.") from None
    if len(documents) > 1:
        raise _unreadable(source, 0, f"{len(documents)} YAML documents.  A recipe is exactly one, without lines ---.")
    return documents[0] if documents else Pairs()


def _counted(events: Iterator[Any], source: str) -> Iterator[Any]:
    """Yields the events.  Raises ConfigError after `MAX_VALUES` events, before the rest of the text is read."""
    for number, event in enumerate(events):
        if number > MAX_VALUES:
            line = event.start_mark.line
            raise _unreadable(source, line, f"more than {MAX_VALUES:,} keys and values.  A recipe has fewer.")
        yield event


def _node(events: Iterator[Any], source: str, depth: int, event: Any = None) -> Any:
    """Parses one YAML value.  event: its first parser event; None: the next event of `events`"""
    event = event or next(events)
    line = event.start_mark.line
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise _unreadable(
            source, line, "YAML anchors and aliases (& and *) are not supported.  Write the value out, or quote it."
        )
    if event.tag is not None:
        raise _unreadable(source, line, f"the tag {event.tag} is not supported.  Remove it; a value in quotes is text.")
    if depth > MAX_DEPTH:
        raise _unreadable(source, line, f"more than {MAX_DEPTH} levels of nesting.  A recipe has fewer levels.")
    if isinstance(event, yaml.ScalarEvent):
        return _text(event, source) if event.style else scalar(event.value)
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_node(events, source, depth + 1, event))
        return items
    pairs = Pairs()
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        line = event.start_mark.line
        if isinstance(_node(events, source, depth + 1, event), list):
            raise _unreadable(source, line, "the key is a list or a mapping.  A key must be a name.")
        pairs.append((_text(event, source), line + 1, _node(events, source, depth + 1)))
    return pairs


def _text(event: Any, source: str) -> str:
    r"""The text of a scalar.  JSON writes an emoji as two escapes: "\ud83d\ude80" -> 🚀"""
    try:
        return str(event.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise _unreadable(
            source,
            event.start_mark.line,
            "half a surrogate pair, which is not valid text.  Write the character itself.",
        ) from None


def _unreadable(source: str, line: int, why: str) -> ConfigError:
    return ConfigError(f"{source}, line {line + 1}: {why}")


def scalar(text: str) -> Any:
    """An unquoted scalar: 1e-5 -> 1e-05, 7 -> 7, true -> True, ~ -> None, 010 -> "010", no -> "no"."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if INT.fullmatch(text):
        return int(text)
    return float(text) if FLOAT.fullmatch(text) else text


def plain(value: Any) -> Any:
    """Replaces Pairs by dicts, at every depth of `value`."""
    if isinstance(value, Pairs):
        return {name: plain(child) for name, _, child in value}
    return [plain(child) for child in value] if isinstance(value, list) else value


def repeated(value: Any) -> list[str]:
    """The duplicate keys of all mappings in `value`.  A Python dict would keep only the last value of such a key."""
    if isinstance(value, Pairs):
        names = [name for name, _, _ in value]
        inner = [f"{name}.{below}" for name, _, child in value for below in repeated(child)]
        counts = Counter(names)
        return [name for name, count in counts.items() for _ in range(count - 1)] + inner
    return [name for child in value for name in repeated(child)] if isinstance(value, list) else []


def write(value: Any) -> str:
    """One line of YAML for `value`, which `read` reads back: runs/a -> runs/a, 1e5 -> "1e5", {"a": [1]} -> {a: [1]}."""
    if isinstance(value, dict) and value:
        return f"{{{', '.join(f'{write(name)}: {write(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(write(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and scalar(value) == value:
        return value
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value) + '"'
