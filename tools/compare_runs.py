"""Where two runs part: for each metric the first step at which they differ, and by how much at most.

    python tools/compare_runs.py runs/a runs/b                 -> one line per metric; exit code 0, 1 or 2
    python tools/compare_runs.py a/metrics.jsonl b --rtol 1e-3

Reads metrics.jsonl (schema 1 to 5); needs nothing but Python.  Train records and those of each held-out set (before
schema 3: of one, `eval`) are compared apart, each on the steps that both runs have; a shorter run is compared as far
as it goes.  Exit code 0 where nothing differs, 1 where
something does, 2 where the runs cannot be compared.

    floats    differ beyond max(rtol x the larger magnitude, atol); NaN differs from everything
    integers  (counts, false and true) differ unless equal
    null      differs from every number
    absent    a metric or a step that only one run has is a difference, unless --ignore-missing; steps before the
              later start or after the earlier end are told and are none

Nested values are named with "/": `loss by position/0-4K/loss`.  Text and lists are not compared, nor, without
--all, what depends on the clock or the machine (TIMED).  A resumed run may repeat steps: the last record of a
step counts.  A last line that a killed run left half written is left out.
"""

import argparse
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMAS = (1, 2, 3, 4, 5)
TRAIN = "train"
TIMED = ("time", "per-second", "tflop", "mfu", "memory", "data-wait")

Value = int | float | None
Metrics = dict[str, Value]


class CompareError(Exception):
    """Two runs that cannot be compared: one paragraph for the user, exit code 2."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Metrics of one run by kind and step; a kind is `train`, `eval`, or of other held-out sets `eval NAME`.

    first  the step it began after: it would have told the evaluations there, not the training
    last   step and kind of its last record: what comes later in the order of kinds was not told any more
    """

    path: Path
    first: int
    last: tuple[int, str]
    records: dict[str, dict[int, Metrics]]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    rtol: float
    atol: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One metric over the steps at which both runs have a record.

    first     step and both values, as text, where they first differ; None where they never do
    largest   difference, and relative to the larger magnitude; None where no two numbers could be subtracted
    """

    kind: str
    name: str
    num_steps: int
    num_different: int
    first: tuple[int, str, str] | None
    largest: tuple[float, float] | None


def read_run(given: Path) -> Run:
    """The run in a folder or file; CompareError where there is none, or it is damaged or of another schema."""
    path = given / "metrics.jsonl" if given.is_dir() else given
    try:
        *lines, tail = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise CompareError(
            f"{path} does not exist. Give the folder of a run (run.dir of its recipe, like runs/demo) "
            "or its metrics.jsonl."
        ) from None
    except OSError as error:
        raise CompareError(
            f"{path} cannot be read: {error.strerror}. Give the folder of a run that you may read."
        ) from error
    entries = [entry_of(path, number, line) for number, line in enumerate(lines, 1)]
    if is_whole(tail):
        entries.append(entry_of(path, len(lines) + 1, tail))
    for entry in entries[:1] + [entry for entry in entries if "schema" in entry]:
        if entry.get("schema") not in SCHEMAS:
            raise CompareError(
                f"{path} has schema {entry.get('schema')}; this tool reads {SCHEMAS[0]} to {SCHEMAS[-1]}. "
                "Use the compare_runs.py of the version that made the run."
            )
    records: dict[str, dict[int, Metrics]] = {TRAIN: {}}
    for entry in entries:
        if (kind := kind_of(entry)) is not None:
            records.setdefault(kind, {})[entry["step"]] = flat({k: v for k, v in entry.items() if k != "step"})
    if not any(records.values()):
        raise CompareError(f"{path} has no step and no evaluation: the run has only begun, or ended before its first.")
    kinds = list(records)  # in the order in which a run writes them where it writes several after one step
    step, place = max((step, kinds.index(kind)) for kind, steps in records.items() for step in steps)
    return Run(path=given, first=entries[0]["step"], last=(step, kinds[place]), records=records)


def kind_of(entry: dict[str, Any]) -> str | None:
    """What a record is compared with; None where it is of no step: `start`"""
    if entry["kind"] == "eval":
        name = entry.get("set", "eval")
        return "eval" if name == "eval" else f"eval {name}"
    return TRAIN if entry["kind"] == TRAIN else None


def is_whole(tail: bytes) -> bool:
    """Whether what follows the last line break is a record; else a killed run left it half written."""
    try:
        return isinstance(json.loads(tail), dict)
    except ValueError:
        return False


def entry_of(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    try:
        entry = json.loads(line)
    except ValueError as error:  # not JSON, or not even UTF-8
        reason = getattr(error, "msg", "not UTF-8")
        raise CompareError(
            f"{path}:{number} is not JSON ({reason}): the file is damaged, or is not the metrics of a run. "
            "Remove that line, or give the folder of a run."
        ) from error
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str) or type(entry.get("step")) is not int:
        raise CompareError(
            f"{path}:{number} is not a record with a kind and a whole step: not the metrics of a run of sft. "
            "Give the folder of a run."
        )
    return entry


def flat(nested: dict[str, Any], prefix: str = "") -> Metrics:
    """{"loss": 2.5, "by": {"0-4K": {"n": 3}}, "kind": "train"} -> {"loss": 2.5, "by/0-4K/n": 3}"""
    found: Metrics = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        elif value is None or isinstance(value, int | float):
            found[prefix + name] = value
    return found


def is_timed(name: str) -> bool:
    """By the first and the last part of the name; those between are the user's: `loss by source/sentiment/loss`."""
    parts = name.lower().split("/")
    return any(word in part for part in (parts[0], parts[-1]) for word in TIMED)


def do_differ(a: Value, b: Value, tolerance: Tolerance) -> bool:
    if a is None or b is None:
        return a is not b
    if isinstance(a, int) and isinstance(b, int):
        return a != b
    return not math.isclose(a, b, rel_tol=tolerance.rtol, abs_tol=tolerance.atol)


def distance(a: Value, b: Value) -> tuple[float, float] | None:
    """Absolute and relative difference; None where there is none (null, NaN, two infinities)."""
    if a is None or b is None or math.isnan(a - b):
        return None
    size = max(abs(a), abs(b))
    return abs(a - b), abs(a - b) / size if 0 < size < math.inf else float(a != b)


def compare(
    kind: str, name: str, pairs: dict[int, tuple[Metrics, Metrics]], tolerance: Tolerance, ignore_missing: bool
) -> Row:
    """One metric over the common steps in their order; where neither record has it, the step does not count."""
    num_steps, different, distances = 0, list[tuple[int, str, str]](), list[tuple[float, float]]()
    for step, (left, right) in pairs.items():
        num_steps += name in left or name in right
        if name in left and name in right:
            a, b = left[name], right[name]
            is_different = do_differ(a, b, tolerance)
            distances += [found] if (found := distance(a, b)) else []
        else:
            is_different = (name in left) != (name in right) and not ignore_missing
        if is_different:
            different.append((step, shown(left, name), shown(right, name)))
    largest = (max(d for d, _ in distances), max(r for _, r in distances)) if distances else None
    return Row(
        kind=kind,
        name=name,
        num_steps=num_steps,
        num_different=len(different),
        first=different[0] if different else None,
        largest=largest,
    )


def shown(metrics: Metrics, name: str) -> str:
    """A value in as many digits as it has."""
    return json.dumps(metrics[name]) if name in metrics else "absent"


def spans(steps: Collection[int], limit: int = 8) -> str:
    """[1, 2, 3, 7, 9, 10] -> "1-3, 7, 9-10"; where there are more than `limit`: "0, 30, 60, ..., 300 (11 in all)" """
    ends: list[list[int]] = []
    for step in sorted(steps):
        if ends and step == ends[-1][1] + 1:
            ends[-1][1] = step
        else:
            ends.append([step, step])
    told = [f"{first}-{last}" if first < last else str(first) for first, last in ends]
    return ", ".join(told if len(told) <= limit else [*told[:3], "...", f"{told[-1]} ({len(steps)} in all)"])


def short(number: float) -> str:
    """A count as it is, else 3 digits."""
    return str(number) if isinstance(number, int) else f"{number:.3g}"


def table(rows: Sequence[Row]) -> list[str]:
    """One aligned line per metric."""
    cells = [("kind", "metric", "differs", "first at step", "A", "B", "largest", "relative")]
    for row in rows:
        step, a, b = row.first or ("-", "-", "-")
        largest, relative = map(short, row.largest) if row.largest else ("-", "-")
        count = f"{row.num_different} of {row.num_steps}"
        cells.append((row.kind, row.name, count, str(step), a, b, largest, relative))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


def kinds_of(*runs: Run) -> list[str]:
    """train, then the held-out sets of all runs, in the order of their records."""
    return list(dict.fromkeys(kind for run in runs for kind in run.records))


def alone_steps(kind: str, a: Run, b: Run) -> tuple[list[str], int]:
    """What to say of records that one run lacks, and how many of them lie where both were."""
    lines, num_inside = list[str](), 0
    place = {name: i for i, name in enumerate(kinds_of(a, b))}  # train is 0: begun at 0, it is not told there
    first, last = (max(a.first, b.first), 1), min((run.last[0], place[run.last[1]]) for run in (a, b))
    for letter, run, other in (("A", a, b), ("B", b, a)):
        alone = [step for step in run.records.get(kind, {}) if step not in other.records.get(kind, {})]
        is_inside = {step: first <= (step, place[kind]) <= last for step in alone}
        inside, outside = ([step for step in alone if is_inside[step] is where] for where in (True, False))
        num_inside += len(inside)
        if inside:
            lines.append(f"only {letter} has {kind} {spans(inside)}")
        if outside:
            lines.append(f"only {letter} has {kind} {spans(outside)}, where the other had not begun or had ended")
    return lines, num_inside


def alone_names(kind: str, left: Sequence[str], right: Sequence[str]) -> list[str]:
    return [
        f"only {letter} has {kind} metric {name}"
        for letter, mine, other in (("A", left, right), ("B", right, left))
        for name in mine
        if name not in other
    ]


def report(a: Run, b: Run, tolerance: Tolerance, *, ignore_missing: bool, compare_all: bool) -> tuple[list[str], bool]:
    """What to print, and whether the runs differ; CompareError where they have no step in common."""
    kinds = kinds_of(a, b)
    pairs = {kind: common(a.records.get(kind, {}), b.records.get(kind, {})) for kind in kinds}
    if not any(pairs.values()):
        raise CompareError(
            f"{a.path} and {b.path} have no step in common: A has {extent(a.records)}, B has {extent(b.records)}. "
            "Give two runs that did the same steps."
        )
    rows, missing, lines, skipped = list[Row](), 0, list[str](), dict[str, None]()
    for kind in kinds:
        found, num_inside = alone_steps(kind, a, b)
        names = [list(dict.fromkeys(name for pair in pairs[kind].values() for name in pair[i])) for i in (0, 1)]
        skipped |= dict.fromkeys(name for side in names for name in side if is_timed(name) and not compare_all)
        left, right = ([name for name in side if name not in skipped] for side in names)
        alone = alone_names(kind, left, right)
        lines += found + alone
        missing += num_inside + len(alone)
        both = [name for name in left if name in set(right)]
        rows += [compare(kind, name, pairs[kind], tolerance, ignore_missing) for name in both]
    sides = [f"{letter}: {run.path}: {extent(run.records)}" for letter, run in (("A", a), ("B", b))]
    left_out = [f"not compared without --all: {', '.join(skipped)}"] if skipped else []
    num_different = sum(row.first is not None for row in rows)
    end = f"{num_different} of {len(rows)} metrics differ (rtol {tolerance.rtol:g}, atol {tolerance.atol:g})"
    if missing:
        end += f"; {missing} records or metrics in one run only" + (", ignored" if ignore_missing else "")
    told = [*sides, f"compared: {extent(pairs)}", *lines, "", *table(rows), "", *left_out, end]
    return told, num_different > 0 or (missing > 0 and not ignore_missing)


def common(left: dict[int, Metrics], right: dict[int, Metrics]) -> dict[int, tuple[Metrics, Metrics]]:
    """Records of the steps in both, in the order of steps."""
    return {step: (left[step], right[step]) for step in sorted(left) if step in right}


def extent(records: Mapping[str, Mapping[int, object]]) -> str:
    """train 1-24; eval 0, 12, 24"""
    return "; ".join(f"{kind} {spans(steps)}" for kind, steps in records.items() if steps)


def tolerance_of(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A", help="run folder, or its metrics.jsonl")
    parser.add_argument("b", type=Path, metavar="B", help="run folder, or its metrics.jsonl")
    parser.add_argument("--rtol", type=tolerance_of, default=1e-6, help="relative tolerance of floats (1e-6)")
    parser.add_argument("--atol", type=tolerance_of, default=0.0, help="absolute tolerance of floats (0)")
    parser.add_argument("--all", action="store_true", help="compare timing-like metrics too")
    parser.add_argument("--ignore-missing", action="store_true", help="what only one run has is no difference")
    arguments = parser.parse_args(argv)
    tolerance = Tolerance(rtol=arguments.rtol, atol=arguments.atol)
    try:
        a, b = read_run(arguments.a), read_run(arguments.b)
        lines, is_different = report(
            a, b, tolerance, ignore_missing=arguments.ignore_missing, compare_all=arguments.all
        )
    except CompareError as error:
        print(f"CompareError: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return int(is_different)


if __name__ == "__main__":
    sys.exit(main())
