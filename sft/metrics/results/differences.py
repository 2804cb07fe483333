"""Compares the values of a metric in two runs: the first difference, the largest difference, and a table of both.

floats    differ if the difference exceeds max(rtol x the larger magnitude, atol); NaN differs from every value
integers  (counts, false and true) differ unless they are equal
null      differs from every number
absent    a value that only one of two records has is a difference, unless missing values are ignored
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

TIMED = ("time", "per-second", "tflop", "mfu", "memory", "data-wait")

Value = int | float | None
Metrics = dict[str, Value]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    rtol: float
    atol: float


@dataclass(frozen=True, kw_only=True)
class MetricDifference:
    """The comparison of one metric over the steps of which both runs have a record.

    first     step and both values, as text, of the first difference; None if there is none
    largest   largest absolute and largest relative difference; None if no two numbers could be subtracted
    """

    kind: str
    name: str
    num_steps: int
    num_different: int
    first: tuple[int, str, str] | None
    largest: tuple[float, float] | None


def is_timed(name: str) -> bool:
    """Decides by the first and last part of the name; users name the parts between: `loss by source/sentiment/loss`."""
    parts = name.lower().split("/")
    return any(word in part for part in (parts[0], parts[-1]) for word in TIMED)


def do_differ(a: Value, b: Value, tolerance: Tolerance) -> bool:
    if a is None or b is None:
        return a is not b
    if isinstance(a, int) and isinstance(b, int):
        return a != b
    return not math.isclose(a, b, rel_tol=tolerance.rtol, abs_tol=tolerance.atol)


def distance(a: Value, b: Value) -> tuple[float, float] | None:
    """Absolute and relative difference; None if it is undefined (null, NaN, two infinities)."""
    if a is None or b is None or math.isnan(a - b):
        return None
    size = max(abs(a), abs(b))
    return abs(a - b), abs(a - b) / size if 0 < size < math.inf else float(a != b)


def compare(
    kind: str, name: str, pairs: dict[int, tuple[Metrics, Metrics]], tolerance: Tolerance, ignore_missing: bool
) -> MetricDifference:
    """Compares one metric over the common steps in order.  Ignores steps of which neither record has the metric."""
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
    """[1, 2, 3, 7, 9, 10] -> "1-3, 7, 9-10"; with more than `limit` ranges: "0, 30, 60, ..., 300 (11 in all)" """
    ends: list[list[int]] = []
    for step in sorted(steps):
        if ends and step == ends[-1][1] + 1:
            ends[-1][1] = step
        else:
            ends.append([step, step])
    texts = [f"{first}-{last}" if first < last else str(first) for first, last in ends]
    return ", ".join(texts if len(texts) <= limit else [*texts[:3], "...", f"{texts[-1]} ({len(steps)} in all)"])


def short(number: float) -> str:
    """An integer with all digits, another number with 3."""
    return str(number) if isinstance(number, int) else f"{number:.3g}"


def table(rows: Sequence[MetricDifference]) -> list[str]:
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


def extent(records: Mapping[str, Mapping[int, object]]) -> str:
    """train 1-24; eval 0, 12, 24"""
    return "; ".join(f"{kind} {spans(steps)}" for kind, steps in records.items() if steps)
