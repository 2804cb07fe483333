"""What every benchmark has in common: named cases, one table, bars, JSON lines, an exit status.

A subject (one file beside this one) declares its cases, its columns and its bars, and measures one case at a time:

    python -m tools.bench cp_index --tiny

    | case   | tokens  | indices ms | inverse ms | sum ms |
    |--------|--------:|-----------:|-----------:|-------:|
    | 1000:8 | 131,072 |      1.120 |      0.320 |  1.440 |

A row is a mapping of plain values, so that it can be a line of JSON.  A row with a `status` other than "done" was not
measured, and its status says why.  `notes` of a row are printed below the table.
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


class Refused(Exception):
    """A measurement that would mean nothing: a wrong result, a machine that lacks something.  Exit status 2."""


@dataclass(frozen=True)
class Column:
    """One number of a row: its key, its title, how it is printed (a format of Python) and its unit in that of the row.

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


@dataclass(frozen=True)
class Option:
    """A size or another choice of a subject, `--name` on the command line.

    tiny  its value with --tiny; None: the default
    read  text -> value; None: the type of the default.  A list collects every `--name VALUE`
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
class Bar:
    """A bound and what was measured; `value` None: nothing here measured it."""

    name: str
    value: float | None
    bound: float
    relation: Literal["at most", "at least", "exactly", "above"] = "at most"

    @property
    def is_missed(self) -> bool:
        return self.value is not None and not COMPARISONS[self.relation](self.value, self.bound)

    def __str__(self) -> str:
        """`met           1.7b at 64K, of the roofline: 0.91, at least 0.85`"""
        if self.value is None:
            return f"{'not measured':<14}{self.name}"
        verdict = "MISSED" if self.is_missed else "met"
        return f"{verdict:<14}{self.name}: {_number(self.value)}, {self.relation} {_number(self.bound)}"


def _number(value: float) -> str:
    """412316860416 -> 412,316,860,416; 54123456.7 -> 54,123,457; 0.94251 -> 0.9425"""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _no_bars(rows: Sequence[Row]) -> Iterable[Bar]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A benchmark.  Everything that differs between benchmarks is one of these fields.  With --tiny it takes less than
    20 s on one CPU core.

    measure   yields the rows of a case, as they are measured
    read      the case of a name; raises ValueError
    ways      what is compared, where --ways can choose of it
    validate  refuses options (ValueError) once they are parsed
    prepare   runs once before the first case, yields rows, raises Refused
    device    which devices it can run on; "gpu": also a CPU, but only with --tiny or where --device cpu is given
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
    bars: Callable[[Sequence[Row]], Iterable[Bar]] = _no_bars
    device: Literal["cpu", "any", "gpu"] = "cpu"

    @property
    def has_bars(self) -> bool:
        return self.bars is not _no_bars


def one_of(*names: str) -> Callable[[str], str]:
    """The reader of cases that are a list of names."""

    def read(name: str) -> str:
        if name not in names:
            raise ValueError(f"{name} is not one of {', '.join(names)}")
        return name

    return read


class Table:
    """Prints rows of Markdown as they come, wide enough for what is usual."""

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


def run(subject: Subject, options: argparse.Namespace, header: Mapping[str, Any]) -> int:
    """Measures all cases.  1 where one failed, or with --check a bar is missed or none could be judged."""
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
            keep({"case": name, "status": f"not begun: {options.minutes:g} minutes are over"})
            continue
        for row in subject.measure(case, options):
            keep({"case": name, **row})
    if notes := table.notes():
        print(f"\n{notes}")
    failed = any(str(row.get("status", DONE)).startswith("failed") for row in rows)
    return max(int(failed), judge(subject, rows) if options.check else 0)


def judge(subject: Subject, rows: Sequence[Row]) -> int:
    """Prints the bars; 1 where one is missed, or where there is none."""
    bars = list(subject.bars(rows))
    print("\n" + "\n".join(str(bar) for bar in bars))
    num_missed, num_unmeasured = sum(bar.is_missed for bar in bars), sum(bar.value is None for bar in bars)
    print(f"{len(bars) - num_missed - num_unmeasured} of {len(bars)} bars met, {num_missed} missed")
    return int(num_missed > 0 or not bars)


def append(path: Path | None, row: Mapping[str, Any]) -> None:
    """Adds a line of JSON to a file."""
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
