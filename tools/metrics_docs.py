"""Makes the tables of docs/reference/metrics.md, and its schema, from the rows in sft/metrics/rows.py.

tools/pages.py writes both files.  A table is between `<!-- rows: HEADING -->` and `<!-- end -->`; people write the rest
of the page.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from sft.metrics.rows import ALL, BOTH, GROUPS, ROWS, SCHEMA, Row

RECORDS = {
    "start": "A run begins, or continues after a restart.",
    "train": "One optimizer step.",
    "eval": "One pass over a held-out set.",
    "long": "The answers to the long-context questions of one length.",
}
TABLE = re.compile(r"(?<=<!-- rows: )([^\n]+?) -->\n.*?(?=<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with newly generated tables.  Raises ValueError if the page lacks a table."""
    missing = GROUPS.keys() - set(re.findall(r"<!-- rows: (.+?) -->", text))
    if missing:
        raise ValueError(f"metrics.md has no table of {', '.join(sorted(missing))}.")
    return TABLE.sub(lambda match: f"{match[1]} -->\n{table(GROUPS[match[1]])}", text)


def table(rows: Sequence[Row]) -> str:
    head = "| name | in | unit | type | layout | meaning |\n|---|---|---|---|---|---|\n"
    return head + "".join(
        f"| `{row.name}` | {_where(row)} | {row.unit} | {row.kind} | {row.layout} | {row.meaning} |\n".replace(
            "  ", " "
        )
        for row in rows
    )


def _where(row: Row) -> str:
    return {ALL: "all", BOTH: "both"}.get(row.records, row.records[0])


def schema_text(text: str) -> str:
    """The text of docs/reference/metrics.schema.json.  The old text is not read."""
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of one line of metrics.jsonl."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of metrics.jsonl, schema {SCHEMA}",
        "description": "docs/reference/metrics.md says how each number is made.  null: not finite, or undefined.",
        "type": "object",
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in RECORDS],
        "$defs": {
            kind: {
                "description": description,
                **_object({tuple(_path(row)): row for row in ROWS if kind in row.records}, kind),
            }
            for kind, description in RECORDS.items()
        },
    }


def _path(row: Row) -> list[str]:
    return row.name.split("/") if row.nested else [row.name]


def _object(rows: dict[tuple[str, ...], Row], kind: str) -> dict[str, Any]:
    """The schema of an object whose values lie at these paths; NAME stands for any name."""
    below: dict[str, dict[tuple[str, ...], Row]] = {}
    for (first, *rest), row in rows.items():
        below.setdefault(first, {})[tuple(rest)] = row
    properties = {name: _value(rows[()], kind) if () in rows else _object(rows, kind) for name, rows in below.items()}
    if "NAME" in properties:
        return {"type": "object", "additionalProperties": properties["NAME"]}
    return {
        "type": "object",
        "required": [name for name, rows in below.items() if all(row.only_if is None for row in rows.values())],
        "additionalProperties": False,
        "properties": properties,
    }


def _value(row: Row, kind: str) -> dict[str, Any]:
    unit = f"{row.unit}: " if row.unit else ""
    description = {"description": unit + row.meaning.replace("`", "")}
    if row.name == "kind":
        return {"const": kind, **description}
    if row.name == "step" and kind == "train":
        return {**row.json, "minimum": 1, **description}
    return {**row.json, **description}
