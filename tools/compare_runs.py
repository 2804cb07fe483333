"""Compares two runs: for each metric, the first step at which they differ, and the largest difference.

    python -m tools.compare_runs runs/a runs/b                 -> one line per metric; exit code 0, 1 or 2
    python -m tools.compare_runs a/metrics.jsonl b --rtol 1e-3

Reads metrics.jsonl (tools/run_records.py); needs only Python.  Train records and the records of each held-out set are
compared separately, on the steps that both runs have.  Exit code 0: no difference; 1: a difference; 2: the runs cannot
be compared.

tools/metric_differences.py decides which values differ.  A metric or a step that only one run has is a difference,
except with --ignore-missing.  Steps before the later start or after the earlier end are listed, but are no difference.

Names of nested values contain "/": `loss by position/0-4K/loss`.  Text and lists are not compared.  Metrics that depend
on the clock or the machine (TIMED) are compared only with --all.  A resumed run may repeat steps; the last record of a
step counts.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.metric_differences import Metrics, Row, Tolerance, compare, extent, is_timed, spans, table
from tools.run_records import RunError, RunMetrics, kinds_of, read_metrics


def alone_steps(kind: str, a: RunMetrics, b: RunMetrics) -> tuple[list[str], int]:
    """Lines about records that only one run has, and the number of these records at steps that both runs reached."""
    lines, num_inside = list[str](), 0
    order = {name: i for i, name in enumerate(kinds_of(a, b))}  # train is 0; no run has a train record of step `first`
    first, last = (max(a.first, b.first), 1), min((run.last[0], order[run.last[1]]) for run in (a, b))
    for letter, run, other in (("A", a, b), ("B", b, a)):
        alone = [step for step in run.records.get(kind, {}) if step not in other.records.get(kind, {})]
        is_inside = {step: first <= (step, order[kind]) <= last for step in alone}
        inside, outside = ([step for step in alone if is_inside[step] is where] for where in (True, False))
        num_inside += len(inside)
        if inside:
            lines.append(f"only {letter} has {kind} {spans(inside)}")
        if outside:
            lines.append(f"only {letter} has {kind} {spans(outside)}, outside the steps of the other run")
    return lines, num_inside


def alone_names(kind: str, left: Sequence[str], right: Sequence[str]) -> list[str]:
    return [
        f"only {letter} has {kind} metric {name}"
        for letter, own, other in (("A", left, right), ("B", right, left))
        for name in own
        if name not in other
    ]


def report(
    a: RunMetrics, b: RunMetrics, tolerance: Tolerance, *, ignore_missing: bool, compare_all: bool
) -> tuple[list[str], bool]:
    """The lines to print, and whether the runs differ.  Raises RunError if the runs have no step in common."""
    kinds = kinds_of(a, b)
    pairs = {kind: common(a.records.get(kind, {}), b.records.get(kind, {})) for kind in kinds}
    if not any(pairs.values()):
        raise RunError(
            f"{a.path} and {b.path} have no step in common: A has {extent(a.records)}, B has {extent(b.records)}. "
            "Give two runs that did the same steps."
        )
    rows, missing, lines, skipped = list[Row](), 0, list[str](), dict[str, None]()
    for kind in kinds:
        messages, num_inside = alone_steps(kind, a, b)
        names = [list(dict.fromkeys(name for pair in pairs[kind].values() for name in pair[i])) for i in (0, 1)]
        skipped |= dict.fromkeys(name for side in names for name in side if is_timed(name) and not compare_all)
        left, right = ([name for name in side if name not in skipped] for side in names)
        alone = alone_names(kind, left, right)
        lines += messages + alone
        missing += num_inside + len(alone)
        both = [name for name in left if name in set(right)]
        rows += [compare(kind, name, pairs[kind], tolerance, ignore_missing) for name in both]
    sides = [f"{letter}: {run.path}: {extent(run.records)}" for letter, run in (("A", a), ("B", b))]
    left_out = [f"not compared without --all: {', '.join(skipped)}"] if skipped else []
    num_different = sum(row.first is not None for row in rows)
    end = f"{num_different} of {len(rows)} metrics differ (rtol {tolerance.rtol:g}, atol {tolerance.atol:g})"
    if missing:
        end += f"; {missing} records or metrics in one run only" + (", ignored" if ignore_missing else "")
    text = [*sides, f"compared: {extent(pairs)}", *lines, "", *table(rows), "", *left_out, end]
    return text, num_different > 0 or (missing > 0 and not ignore_missing)


def common(left: dict[int, Metrics], right: dict[int, Metrics]) -> dict[int, tuple[Metrics, Metrics]]:
    """The records of the steps that both runs have, in the order of steps."""
    return {step: (left[step], right[step]) for step in sorted(left) if step in right}


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
    parser.add_argument("--all", action="store_true", help="also compare metrics of time and memory")
    parser.add_argument("--ignore-missing", action="store_true", help="ignore metrics and steps that only one run has")
    arguments = parser.parse_args(argv)
    tolerance = Tolerance(rtol=arguments.rtol, atol=arguments.atol)
    try:
        a, b = read_metrics(arguments.a), read_metrics(arguments.b)
        lines, is_different = report(
            a, b, tolerance, ignore_missing=arguments.ignore_missing, compare_all=arguments.all
        )
    except RunError as error:
        print(f"RunError: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return int(is_different)


if __name__ == "__main__":
    sys.exit(main())
