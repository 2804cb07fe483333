"""Compares two runs: for each metric, the first step at which they differ, and the largest difference.

floats    differ if the difference exceeds max(rtol x the larger magnitude, atol); NaN differs from every value
integers  (counts, false and true) differ unless they are equal
null      differs from every number
absent    a value that only one of two records has is a difference, unless missing values are ignored

Train records and the records of each held-out set are compared separately, on the steps that both runs have.  A step
that only one run has is a difference, too; steps before the later start or after the earlier end are only listed.  Text
and lists are not compared.  Metrics that depend on the clock or the machine (TIMED) are compared only with --all.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sft.metrics.results.records import Metrics, RunError, RunMetrics, Value, kinds_of

TIMED = ("time", "per-second", "tflop", "mfu", "memory", "data-wait")


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The relative and the absolute difference by which two floats may differ and still count as equal."""

    rtol: float
    atol: float


@dataclass(frozen=True, kw_only=True)
class MetricDifference:
    """The comparison of one metric over the steps that both runs have.

    num_steps      number of steps at which a record has the metric
    num_different  number of steps at which the values differ
    first          step and both values, as text, of the first difference; None if there is none
    largest        largest absolute and largest relative difference; None if no two numbers could be subtracted
    """

    kind: str
    name: str
    num_steps: int
    num_different: int
    first: tuple[int, str, str] | None
    largest: tuple[float, float] | None


def is_timed(name: str) -> bool:
    """Whether the metric depends on the clock or the machine, decided by the first and last part of its name.

    The parts between are names that users choose: `loss by source/sentiment/loss`.
    """
    parts = name.lower().split("/")
    return any(word in part for part in (parts[0], parts[-1]) for word in TIMED)


def do_differ(a: Value, b: Value, tolerance: Tolerance) -> bool:
    """Whether two values differ by the rules in the docstring of this module."""
    if a is None or b is None:
        return a is not b
    if isinstance(a, int) and isinstance(b, int):
        return a != b
    return not math.isclose(a, b, rel_tol=tolerance.rtol, abs_tol=tolerance.atol)


def distance(a: Value, b: Value) -> tuple[float, float] | None:
    """The absolute difference, and the difference relative to the larger absolute value.

    None if the difference is undefined: one value is null or NaN, or both are the same infinity.
    """
    if a is None or b is None or math.isnan(a - b):
        return None
    size = max(abs(a), abs(b))
    return abs(a - b), abs(a - b) / size if 0 < size < math.inf else float(a != b)


def compare(
    kind: str, name: str, pairs: dict[int, tuple[Metrics, Metrics]], tolerance: Tolerance, ignore_missing: bool
) -> MetricDifference:
    """Compares one metric over the steps that both runs have.  Ignores steps of which neither record has the metric.

    pairs: {step: (metrics of A, metrics of B)} in rising order of steps
    """
    num_steps, different, distances = 0, list[tuple[int, str, str]](), list[tuple[float, float]]()
    for step, (left, right) in pairs.items():
        num_steps += name in left or name in right
        if name in left and name in right:
            a, b = left[name], right[name]
            is_different = do_differ(a, b, tolerance)
            distances += [both] if (both := distance(a, b)) else []
        else:
            is_different = (name in left) != (name in right) and not ignore_missing
        if is_different:
            different.append((step, shown(left, name), shown(right, name)))
    largest = (max(d for d, _ in distances), max(r for _, r in distances)) if distances else None
    return MetricDifference(
        kind=kind,
        name=name,
        num_steps=num_steps,
        num_different=len(different),
        first=different[0] if different else None,
        largest=largest,
    )


def shown(metrics: Metrics, name: str) -> str:
    """A value as text with all its digits."""
    return json.dumps(metrics[name]) if name in metrics else "absent"


def spans(steps: Collection[int], limit: int = 8) -> str:
    """Steps as text: [1, 2, 3, 7, 9, 10] -> "1-3, 7, 9-10"; with more than `limit` ranges "0, 30, 60, ..., 300 (11 in
    all)"."""
    ends: list[list[int]] = []
    for step in sorted(steps):
        if ends and step == ends[-1][1] + 1:
            ends[-1][1] = step
        else:
            ends.append([step, step])
    texts = [f"{first}-{last}" if first < last else str(first) for first, last in ends]
    return ", ".join(texts if len(texts) <= limit else [*texts[:3], "...", f"{texts[-1]} ({len(steps)} in all)"])


def short(number: float) -> str:
    """A number as text: an integer with all its digits, a float with 3 significant digits."""
    return str(number) if isinstance(number, int) else f"{number:.3g}"


def table(rows: Sequence[MetricDifference]) -> list[str]:
    """The lines of a table with one line per metric."""
    cells = [("kind", "metric", "differs", "first at step", "A", "B", "largest", "relative")]
    for row in rows:
        step, a, b = row.first or ("-", "-", "-")
        largest, relative = map(short, row.largest) if row.largest else ("-", "-")
        count = f"{row.num_different} of {row.num_steps}"
        cells.append((row.kind, row.name, count, str(step), a, b, largest, relative))
    return aligned(cells, left=2)


def aligned(cells: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """The lines of a table.  The first `left` columns are aligned on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def extent(records: Mapping[str, Mapping[int, object]]) -> str:
    """The steps of each kind of record as text: "train 1-24; eval 0, 12, 24"."""
    return "; ".join(f"{kind} {spans(steps)}" for kind, steps in records.items() if steps)


def alone_steps(kind: str, a: RunMetrics, b: RunMetrics) -> tuple[list[str], int]:
    """Lines about records of a kind that only one run has.

    Also returns the number of those that lie within the steps of both runs.
    """
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
    """Lines about metrics of a kind that only one run has.  left, right: names of the metrics of A and of B"""
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
    rows, missing, lines, skipped = list[MetricDifference](), 0, list[str](), dict[str, None]()
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
