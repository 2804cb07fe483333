"""JSON in which the text of each value of a chat has the value's source."""

import json
from collections.abc import Mapping
from typing import Any

from sft.data.template.sources import CONSTANT, Field, Piece, Source, Unknown
from sft.data.template.trace import Float, Int, Text, concatenated, whole

Containers = Mapping[int, Field]  # the source of each object and list of the chat, by its id


def json_text(value: Any, containers: Containers, indent: int | str | None, **options: Any) -> Text:
    """The text of json.dumps, with sources.

    {"day": "Mon"} of the chat   the source of all characters is this object
    an object of the template    the source of braces is the template, and each value keeps its own source
    """
    plain = json.dumps(value, indent=indent, **options)
    source = _source_of(value, containers)
    if source is not None:
        return _escaped(value, plain) if isinstance(value, Text) else Text.of(plain, source)
    parts: list[str] = []
    _write(value, containers, parts, indent, options, 0)
    text = concatenated(parts)
    return text if str.__eq__(text, plain) else Text.of(plain, Unknown("tojson"))


def _source_of(value: Any, containers: Containers) -> Source | None:
    if isinstance(value, Text):
        return value.pieces[0].source if value.pieces else CONSTANT
    if isinstance(value, (Int, Float)):
        return value.field
    if value is None or isinstance(value, bool):
        return CONSTANT
    return containers.get(id(value))


def _write(
    value: Any, containers: Containers, parts: list[str], indent: Any, options: dict[str, Any], depth: int
) -> None:
    source = _source_of(value, containers)
    if source is not None and (indent is None or depth == 0 or not isinstance(value, (dict, list))):
        plain = json.dumps(value, **options)
        parts.append(_escaped(value, plain) if isinstance(value, Text) else Text.of(plain, source))
    elif isinstance(value, (dict, list, tuple)):
        of_template = containers.get(id(value)) or CONSTANT
        pair, colon = options["separators"] or ((", ", ": ") if indent is None else (",", ": "))
        width = " " * indent if isinstance(indent, int) else indent
        inner = "" if indent is None else "\n" + width * (depth + 1)
        outer = "" if indent is None else "\n" + width * depth
        brackets, items = ("{}", [*value.items()]) if isinstance(value, dict) else ("[]", [(None, v) for v in value])
        if options["sort_keys"] and isinstance(value, dict):
            items.sort()
        parts.append(Text.of(brackets[0], of_template))
        for number, (key, item) in enumerate(items):
            parts.append(Text.of((pair if number else "") + inner, of_template))
            if isinstance(value, dict):
                _write(key if isinstance(key, str) else str(key), containers, parts, None, options, depth + 1)
                parts.append(Text.of(colon, of_template))
            _write(item, containers, parts, indent, options, depth + 1)
        parts.append(Text.of((outer if value else "") + brackets[1], of_template))
    else:
        parts.append(Text.of(json.dumps(value, **options), Unknown("tojson")))


def _escaped(text: Text, plain: str) -> Text:
    """The JSON of a text.  If no character was escaped, each character keeps its source."""
    if len(plain) == len(text) + 2 and str.__eq__(text, plain[1:-1]):
        quote = (Piece(text.pieces[0].source, 0, 0, 1),) if text.pieces else whole(CONSTANT, 1)
        return Text(plain, (*quote, *text.pieces, *quote))
    sources = {piece.source for piece in text.pieces}
    if len(sources) > 1:  # an escaped character of one part could be attributed to the field of another
        return Text.of(plain, Unknown("tojson of a composed text"))
    first, last = min(piece.start for piece in text.pieces), max(piece.stop for piece in text.pieces)
    return Text(plain, (Piece(text.pieces[0].source, first, last, len(plain)),))
