"""Compares two runs: for each metric, the first step at which they differ, and the largest difference.

    sft compare runs/a runs/b                 -> one line per metric; exit code 0, 1 or 2
    sft compare a/metrics.jsonl b --rtol 1e-3

Reads metrics.jsonl (records.py).  Train records and the records of each held-out set are compared separately, on the
steps that both runs have.  Exit code 0: no difference; 1: a difference; 2: the runs cannot be compared.

differences.py decides which values differ.  A metric or a step that only one run has is a difference,
except with --ignore-missing.  Steps before the later start or after the earlier end are listed, but are no difference.

Names of nested values contain "/": `loss by position/0-4K/loss`.  Text and lists are not compared.  Metrics that depend
on the clock or the machine (TIMED) are compared only with --all.  A resumed run may repeat steps; the last record of a
step counts.
"""

from collections.abc import Sequence

from sft.metrics.results.differences import (
    MetricDifference,
    Metrics,
    Tolerance,
    compare,
    extent,
    is_timed,
    spans,
    table,
)
from sft.metrics.results.records import RunError, RunMetrics, kinds_of


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
