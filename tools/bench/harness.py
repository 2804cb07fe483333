"""Runs a benchmark: measures its cases, prints a table and bars, writes JSON lines, and returns an exit status.

A subject, one module of this folder, declares its cases, columns and bars, and measures one case at a time.
results.py defines rows, the table and bars.
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
    """A measurement would be meaningless: a result is wrong, or the machine lacks something.  Exit status 2."""


@dataclass(frozen=True)
class Option:
    """A size or another setting of a subject, `--name` on the command line.

    tiny  default with --tiny; None: as without --tiny
    read  converts text to a value; None: the type of the default.  A list collects the values of all `--name VALUE`
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
    """A benchmark.  These fields hold everything in which benchmarks differ.  With --tiny, a benchmark takes less than
    20 s on one CPU core.

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
    """Measures all cases.  Returns 1 if a case failed or, with --check, if a bar is missed or there is no bar."""
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
