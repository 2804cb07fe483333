"""What every benchmark has in common: named cases, one table, bars, JSON lines, an exit status.

A subject (one file beside this one) declares its cases, its columns and its bars, and measures one case at a time:

    python -m tools.bench cp_index --tiny

    | case   | tokens  | indices ms | inverse ms | sum ms |
    |--------|--------:|-----------:|-----------:|-------:|
    | 1000:8 | 131,072 |      1.120 |      0.320 |  1.440 |

The table and its rows: results.py.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tools.bench.results import DONE, Bar, Column, Row, Table, judge


class Refused(Exception):
    """A measurement that would mean nothing: a wrong result, a machine that lacks something.  Exit status 2."""


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
    return max(int(failed), judge(subject.bars(rows)) if options.check else 0)


def append(path: Path | None, row: Mapping[str, Any]) -> None:
    """Adds a line of JSON to a file."""
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
