"""What chat templates left out of the rows of a file: counted by role and kind, and listed.

    {"row": 3, "message": 1, "role": "system", "kind": "content", "num": 1}      a line of omitted.jsonl

Decides how it is described, and what the refusal says where data.on_omitted is error.  Does not decide what is left out
(`chat/omitted.py`).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from sft.data.read.rows import row_name
from sft.errors import DataError

_ROWS_LISTED = 100
_SHOWN = 60


class RowOmission(NamedTuple):
    """Texts of one role and kind that the template left out of a row.

    message    number of the first message, from 1; for a tool schema, of the first tool
    num        messages of which such a text is left out
    said, why  how the first text begins, and why it is left out; "" except in the first such row of a part
    """

    row: int
    message: int
    role: str
    kind: str
    num: int
    said: str = ""
    why: str = ""

    def as_line(self) -> str:
        """A line of omitted.jsonl."""
        return json.dumps(dict(zip(self._fields[:5], self[:5], strict=True))) + "\n"


@dataclass(frozen=True, kw_only=True)
class FileOmission:
    """Texts of one role and kind that the template left out of a file.

    count, chats  messages, and the chats that they are of
    rows          the first 100 of these chats
    message       number of the first message, from 1, in the first of the rows
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

    def describe(self, num_chats: int) -> str:
        """the assistant reasoning of 3 of 10 chats (7 messages)"""
        messages = f" ({self.count:,} {'tools' if self.role == 'tools' else 'messages'})"
        shown = messages if self.count != self.chats else ""
        return f"the {self.name} of {self.chats:,} of {num_chats:,} {'chat' if num_chats == 1 else 'chats'}{shown}"


def named(role: str, kind: str) -> str:
    """What texts of a role and kind are called."""
    return kind if role in ("tool", "tools") else f"{role} {kind}"


class OmissionCounter:
    """Adds up the omissions of a file, row by row."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, omission: RowOmission) -> None:
        """Counts one more; they come in the order of rows."""
        _, message, role, kind, _, said, why = omission
        first = {"count": 0, "chats": 0, "rows": [], "message": message, "said": said, "why": why}
        counts = self._counts.setdefault((role, kind), first)
        counts["count"] += omission.num
        counts["chats"] += 1
        counts["rows"] += [omission.row] if len(counts["rows"]) < _ROWS_LISTED else []

    def result(self) -> tuple[FileOmission, ...]:
        """Most chats first."""
        return _by_chats(
            FileOmission(role=role, kind=kind, **{**counts, "rows": tuple(counts["rows"])})
            for (role, kind), counts in self._counts.items()
        )


def sum_omissions(files: Iterable[Sequence[FileOmission]]) -> tuple[FileOmission, ...]:
    """The same of several files: counts are added up, rows are not, since they would be of different files."""
    total: dict[tuple[str, str], FileOmission] = {}
    for omission in chain.from_iterable(files):
        kind = omission.role, omission.kind
        subtotal = total.setdefault(kind, replace(omission, count=0, chats=0, rows=()))
        total[kind] = replace(subtotal, count=subtotal.count + omission.count, chats=subtotal.chats + omission.chats)
    return _by_chats(total.values())


def _by_chats(omissions: Iterable[FileOmission]) -> tuple[FileOmission, ...]:
    return tuple(sorted(omissions, key=lambda omission: (-omission.chats, omission.role, omission.kind)))


def check_omitted(file: Path, omitted: Sequence[FileOmission], template: str) -> None:
    """Raises DataError where the template, called `template`, left anything out: names the first row."""
    if omitted:
        first = min(omitted, key=lambda omission: (omission.rows[0], omission.message))
        raise refusal(file, first.rows[0], first.message, first, template)


def refusal(file: Path, row: int, message: int, first: RowOmission | FileOmission, template: str) -> DataError:
    """The error for the first text that is left out."""
    source = "tool" if first.role == "tools" else "message"
    text = json.dumps(first.said if len(first.said) < _SHOWN else first.said[: _SHOWN - 3] + "...", ensure_ascii=False)
    return DataError(
        f"{row_name(file, row)}: {source} {message}: chat template {template} leaves out the "
        f"{named(first.role, first.kind)} {text}, and data.on_omitted is error.  {first.why}  "
        "data.on_omitted = report goes on, and counts what is left out."
    )
