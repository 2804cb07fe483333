"""What chat templates left out of the rows of a file: counted by role and kind, and listed.

    {"row": 3, "message": 1, "role": "system", "kind": "content", "num": 1}      a line of omitted.jsonl

Decides how it is told, and what the refusal says where data.on_omitted is error.  Does not decide what is left out
(`chat/omitted.py`).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sft.data.read.rows import row_name
from sft.errors import DataError

_ROWS_LISTED = 100
_SHOWN = 60


class Omission(NamedTuple):
    """Texts of one role and kind that the template left out of a row.

    message    the first of them, from 1; of a tool schema the tool
    num        messages of which such a text is left out
    said, why  how that text begins, and why it is left out; "" but for the first row of a part
    """

    row: int
    message: int
    role: str
    kind: str
    num: int
    said: str = ""
    why: str = ""

    def as_line(self) -> str:
        """The row's line of omitted.jsonl."""
        return json.dumps(dict(zip(self._fields[:5], self[:5], strict=True))) + "\n"


@dataclass(frozen=True, kw_only=True)
class Omitted:
    """Texts of one role and kind that the template left out of a file.

    count, chats  messages, and the chats that they are of
    rows          the first 100 of these chats
    message       the first of the messages: its number in the first of the rows, from 1
    said, why     how its text begins, why it is left out, and what would keep it
    """

    role: str
    kind: str
    count: int
    chats: int
    rows: tuple[int, ...]
    message: int
    said: str
    why: str

    @property
    def name(self) -> str:
        """system content, assistant reasoning, tool result, tool schema"""
        return named(self.role, self.kind)

    def told(self, num_chats: int) -> str:
        """the assistant reasoning of 3 of 10 chats (7 messages)"""
        messages = f" ({self.count:,} {'tools' if self.role == 'tools' else 'messages'})"
        shown = messages if self.count != self.chats else ""
        return f"the {self.name} of {self.chats:,} of {num_chats:,} {'chat' if num_chats == 1 else 'chats'}{shown}"


def named(role: str, kind: str) -> str:
    """What texts of a role and kind are called."""
    return kind if role in ("tool", "tools") else f"{role} {kind}"


class Tally:
    """Adds up the omissions of a file, row by row."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, one: Omission) -> None:
        """Takes the omissions in the order of rows."""
        first = {"count": 0, "chats": 0, "rows": [], "message": one.message, "said": one.said, "why": one.why}
        counts = self._found.setdefault((one.role, one.kind), first)
        counts["count"] += one.num
        counts["chats"] += 1
        counts["rows"] += [one.row] if len(counts["rows"]) < _ROWS_LISTED else []

    def result(self) -> tuple[Omitted, ...]:
        """Most chats first."""
        found = [
            Omitted(role=role, kind=kind, **{**counts, "rows": tuple(counts["rows"])})
            for (role, kind), counts in self._found.items()
        ]
        return tuple(sorted(found, key=lambda one: (-one.chats, one.role, one.kind)))


def added(files: Iterable[Sequence[Omitted]]) -> tuple[Omitted, ...]:
    """The same of several files: counts are added up, rows are not, since they would be of different files."""
    total: dict[tuple[str, str], Omitted] = {}
    for omitted in files:
        for one in omitted:
            sofar = total.setdefault((one.role, one.kind), replace(one, count=0, chats=0, rows=()))
            total[one.role, one.kind] = replace(sofar, count=sofar.count + one.count, chats=sofar.chats + one.chats)
    return tuple(sorted(total.values(), key=lambda one: (-one.chats, one.role, one.kind)))


def check_omitted(file: Path, omitted: Sequence[Omitted], template: str) -> None:
    """Raises DataError where the template, called `template`, left anything out: names the first row."""
    if omitted:
        first = min(omitted, key=lambda one: (one.rows[0], one.message))
        raise refusal(file, first.rows[0], first.message, first, template)


def refusal(file: Path, row: int, message: int, first: Omission | Omitted, template: str) -> DataError:
    """What is said for the first text that is left out."""
    what = "tool" if first.role == "tools" else "message"
    said = json.dumps(first.said if len(first.said) < _SHOWN else first.said[: _SHOWN - 3] + "...", ensure_ascii=False)
    return DataError(
        f"{row_name(file, row)}: {what} {message}: chat template {template} leaves out the "
        f"{named(first.role, first.kind)} {said}, and data.on_omitted is error.  {first.why}  "
        "data.on_omitted = report goes on, and counts what is left out."
    )
