"""Rows of a benchmark, the table that shows the rows, and the bars that apply to them.

A row is a mapping of plain values and is written as a line of JSON.  A row with a `status` other than "done" was not
measured; its status gives the reason.  The table prints the `notes` of rows at its end.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = dict[str, Any]
DONE = "done"
COMPARISONS = {"at most": operator.le, "at least": operator.ge, "exactly": operator.eq, "above": operator.gt}


@dataclass(frozen=True)
class Column:
    """A column: key of the value in a row, title, Python format, and unit by which the value is divided.

    key "extra" in bytes, title "extra MiB", spec ",.1f", unit 2**20: 1572864 -> 1.5
    """

    key: str
    title: str
    spec: str = ""
    unit: float = 1

    def cell(self, row: Row) -> str:
        value = row.get(self.key)
        if value is None:
            return "-"
        return format(value if self.unit == 1 else value / self.unit, self.spec)


class Table:
    """Formats rows as a Markdown table.  Widths are fixed before the first row, so rows can be printed one by one."""

    def __init__(self, columns: Sequence[Column], names: Sequence[str]) -> None:
        self._columns = columns
        self._widths = [max(34, *map(len, names))] + [max(9, len(column.title)) for column in columns]
        self._notes: list[str] = []

    def head(self) -> str:
        titles = self._line(["case", *(column.title for column in self._columns)])
        rules = [f"|{'-' * (self._widths[0] + 2)}|", *(f"{'-' * (width + 1)}:|" for width in self._widths[1:])]
        return f"{titles}\n{''.join(rules)}"

    def line(self, row: Row) -> str:
        name = ", ".join(str(row[key]) for key in ("case", "way") if key in row)
        self._notes += [f"{name}: {note}" for note in row.get("notes", ())]
        if row.get("status", DONE) != DONE:
            return f"| {name:<{self._widths[0]}} | {row['status']} |"
        return self._line([name, *(column.cell(row) for column in self._columns)])

    def notes(self) -> str:
        return "\n".join(self._notes)

    def _line(self, cells: Sequence[str]) -> str:
        first, *others = (f"{cell:>{width}}" for cell, width in zip(cells, self._widths, strict=True))
        return f"| {' | '.join([f'{first.strip():<{self._widths[0]}}', *others])} |"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bound and the measured value; a value of None was not measured."""

    name: str
    value: float | None
    bound: float
    relation: Literal["at most", "at least", "exactly", "above"] = "at most"

    @property
    def is_missed(self) -> bool:
        return self.value is not None and not COMPARISONS[self.relation](self.value, self.bound)

    @property
    def verdict(self) -> str:
        return "not measured" if self.value is None else "MISSED" if self.is_missed else "met"

    def __str__(self) -> str:
        """`met           1.7b at 64K, share of the roofline: 0.91, at least 0.85`"""
        measured = "" if self.value is None else f": {number(self.value)}, {self.relation} {number(self.bound)}"
        return f"{self.verdict:<14}{self.name}{measured}"


def number(value: float) -> str:
    """412316860416 -> 412,316,860,416; 54123456.7 -> 54,123,457; 0.94251 -> 0.9425"""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def judge(bars: Iterable[Bar]) -> int:
    """Prints the bars.  Returns 1 if a bar is missed or if there is no bar."""
    bars = list(bars)
    print("\n" + "\n".join(str(bar) for bar in bars))
    num_missed, num_unmeasured = sum(bar.is_missed for bar in bars), sum(bar.value is None for bar in bars)
    print(f"{len(bars) - num_missed - num_unmeasured} of {len(bars)} bars met, {num_missed} missed")
    return int(num_missed > 0 or not bars)
