"""Runs a benchmark: measures its cases, prints a table and bars, writes JSON lines, and returns an exit status.

A subject is a benchmark, one module of this folder.  It declares its cases, columns and bars, and measures one case at
a time.  A row is a mapping of plain values and is written as a line of JSON.  A row with a `status` other than "done"
was not measured; its status gives the reason.  The table prints the `notes` of rows at its end.  A bar is a bound for a
value of some rows.
"""

import argparse
import json
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Row = dict[str, Any]
DONE = "done"
COMPARISONS = {"at most": operator.le, "at least": operator.ge, "exactly": operator.eq, "above": operator.gt}


@dataclass(frozen=True)
class Column:
    """A column: key of the value in a row, title, Python format, and unit by which the value is divided.

    With key "extra", title "extra MiB", spec ",.1f" and unit 2**20, a value of 1572864 bytes is printed as 1.5.
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
    """A bound and the measured value; None if it was not measured."""

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
        """A line such as `met           1.7b at 64K, share of the roofline: 0.91, at least 0.85`."""
        measured = "" if self.value is None else f": {number(self.value)}, {self.relation} {number(self.bound)}"
        return f"{self.verdict:<14}{self.name}{measured}"


def number(value: float) -> str:
    """The value as text: 412316860416 -> 412,316,860,416; 54123456.7 -> 54,123,457; 0.94251 -> 0.9425"""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Refused(Exception):
    """A measurement would be meaningless: a result is wrong, or the machine lacks something.  Exit status 2."""


@dataclass(frozen=True)
class Option:
    """A size or another setting of a subject, `--name` on the command line.

    tiny  the default with --tiny; None: the same default as without --tiny
    read  converts text to a value; None: the type of the default converts it.  If the default is a list, the option may
          be given several times, and its values are collected
    """

    default: Any
    tiny: Any = None
    help: str = ""
    read: Callable[[str], Any] | None = None

    def add_to(self, parser: argparse.ArgumentParser, name: str, *, tiny: bool) -> None:
        value = self.tiny if tiny and self.tiny is not None else self.default
        flag, text = f"--{name.replace('_', '-')}", f"{self.help} ({value})".strip()
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true", help=self.help)
        elif isinstance(value, list):
            parser.add_argument(flag, action="append", default=value, help=self.help)
        else:
            parser.add_argument(flag, type=self.read or type(value), default=value, help=text.replace("%", "%%"))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A benchmark.  With --tiny, it takes less than 20 s on one CPU core.

    measure   yields the rows of a case, each as soon as it is measured
    read      converts a name to a case; raises ValueError
    ways      names of the compared implementations, if --ways can select among them
    validate  raises ValueError for parsed options that cannot be used
    prepare   runs once before the first case, yields rows, raises Refused
    device    possible devices; "gpu": on a CPU only with --tiny or --device cpu
    """

    measure: Callable[[Any, argparse.Namespace], Iterator[Row]]
    columns: Sequence[Column]
    cases: Sequence[str]
    tiny_cases: Sequence[str]
    read: Callable[[str], Any]
    options: Mapping[str, Option] = field(default_factory=dict)
    ways: Sequence[str] = ()
    validate: Callable[[argparse.Namespace], None] = lambda options: None
    prepare: Callable[[argparse.Namespace], Iterable[Row]] = lambda options: ()
    describe: Callable[[Any], str] = str
    bars: Callable[[Sequence[Row]], Iterable[Bar]] | None = None
    device: Literal["cpu", "any", "gpu"] = "cpu"


def one_of(*names: str) -> Callable[[str], str]:
    """A `read` function that accepts only these names."""

    def read(name: str) -> str:
        if name not in names:
            raise ValueError(f"{name} is not one of {', '.join(names)}")
        return name

    return read


def run(subject: Subject, options: argparse.Namespace, header: Mapping[str, Any]) -> int:
    """Measures all cases.  Returns 1 if a case failed or, with --check, if a bar is missed or there is no bar.

    Otherwise, it returns 0, also if time ran out before all cases had started.
    """
    table, rows = Table(subject.columns, options.names), list[Row]()

    def keep(row: Row) -> None:
        rows.append(row)
        append(options.json, row)
        print(table.line(row), flush=True)

    append(options.json, {"header": dict(header)})
    preparation = list(subject.prepare(options))
    print(f"\n{table.head()}", flush=True)
    for row in preparation:
        keep(row)
    for name, case in zip(options.names, options.cases, strict=True):
        if time.monotonic() > options.ends_at:
            keep({"case": name, "status": f"not started: {options.minutes:g} minutes have passed"})
            continue
        for row in subject.measure(case, options):
            keep({"case": name, **row})
    if notes := table.notes():
        print(f"\n{notes}")
    failed = any(str(row.get("status", DONE)).startswith("failed") for row in rows)
    return max(int(failed), judge(subject.bars(rows)) if options.check and subject.bars else 0)


def append(path: Path | None, row: Mapping[str, Any]) -> None:
    """Appends the row to the file as a line of JSON."""
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def judge(bars: Iterable[Bar]) -> int:
    """Prints the bars and how many are met and missed.  Returns 1 if one is missed or if there is none, else 0.

    A bar that was not measured counts as neither.
    """
    bars = list(bars)
    print("\n" + "\n".join(str(bar) for bar in bars))
    num_missed, num_unmeasured = sum(bar.is_missed for bar in bars), sum(bar.value is None for bar in bars)
    print(f"{len(bars) - num_missed - num_unmeasured} of {len(bars)} bars met, {num_missed} missed")
    return int(num_missed > 0 or not bars)
