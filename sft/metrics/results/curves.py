"""The data of a run that `sft plot` draws: records by step, smoothed values, loss by position, token accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sft.metrics.results.records import EVAL, TRAIN, held_out_set, read_records

SMOOTH = 0.05
BY_POSITION = "loss by position"  # {bucket: {"loss": nats per supervised token or null, "tokens": count}}

ACCURACY = "token accuracy"  # share of supervised tokens whose logit is the largest

Curves = dict[str, np.ndarray]  # bucket or held-out set -> steps and values, [2, points]


@dataclass(frozen=True, kw_only=True)
class PlottedRun:
    """Records of one run in the order of steps; each has "step" and metrics by name.

    eval  records of each held-out set; the sets are in the order of the file
    """

    name: str
    train: list[dict]
    eval: dict[str, list[dict]]


def read_run(folder: Path) -> PlottedRun:
    """The run in `folder`.  Raises RunError."""
    records = read_records(folder)
    evaluations = dict[str, list[dict]]()
    for record in records:
        if record["kind"] == EVAL:
            evaluations.setdefault(held_out_set(record), []).append(record)
    return PlottedRun(
        name=folder.resolve().name,
        train=by_step([record for record in records if record["kind"] == TRAIN]),
        eval={name: by_step(entries) for name, entries in evaluations.items()},
    )


def by_step(records: list[dict]) -> list[dict]:
    """The last record of each step, in the order of steps."""
    by_number = {entry["step"]: entry for entry in records}
    return [by_number[step] for step in sorted(by_number)]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred means; each covers the share SMOOTH of all values, and fewer at both ends.  Gaps (NaN) are left out.

    For fewer than 30 values, the result is the values themselves.
    """
    reach = round(SMOOTH * len(values)) // 2
    is_known = np.isfinite(values)
    sums = np.cumsum(np.append(0.0, np.where(is_known, values, 0.0)))
    counts = np.cumsum(np.append(0, is_known))
    middle = np.arange(len(values))
    low, high = np.maximum(middle - reach, 0), np.minimum(middle + reach + 1, len(values))
    count = counts[high] - counts[low]
    return np.divide(sums[high] - sums[low], count, out=np.full(len(values), np.nan), where=count > 0)


def held_out(name: str) -> str:
    """eval -> held out; code -> held out code"""
    return "held out" if name == "eval" else f"held out {name}"


def by_position(records: Sequence[dict]) -> Curves:
    """Steps and losses of each bucket, at steps where it has tokens; buckets without any tokens are left out."""
    points: dict[str, list[tuple[int, float]]] = {}
    for entry in records:
        for bucket, part in (entry.get(BY_POSITION) or {}).items():
            points.setdefault(bucket, []).extend([(entry["step"], part["loss"])] if part["tokens"] else [])
    return {bucket: np.array(losses, dtype=float).T for bucket, losses in points.items() if losses}


def positions(runs: Sequence[PlottedRun]) -> tuple[str, list[Curves]]:
    """The name of the drawn data, which all runs have in common, and the curves of each run.

    The data are those of the first held-out set, if every run with losses by position has a curve of two points or more
    there.  Otherwise they are smoothed curves of training.
    """
    first = next((name for run in runs for name in run.eval), "eval")
    apart, train = [by_position(run.eval.get(first, [])) for run in runs], [by_position(run.train) for run in runs]
    is_curve = [any(curve.shape[1] > 1 for curve in curves.values()) for curves in apart]
    if all(long or not any(both) for long, *both in zip(is_curve, apart, train, strict=True)):
        return held_out(first), apart
    return "train", [
        {bucket: np.stack([steps, smoothed(losses)]) for bucket, (steps, losses) in curves.items()} for curves in train
    ]


def accuracies(run: PlottedRun) -> Curves:
    """Steps and token accuracy of each held-out set; sets without a second measured value are left out."""
    measured = {
        name: [(entry["step"], entry[ACCURACY]) for entry in records if entry.get(ACCURACY) is not None]
        for name, records in run.eval.items()
    }
    return {name: np.array(points, dtype=float).T for name, points in measured.items() if len(points) > 1}


def names_of(runs: Sequence[Curves]) -> list[str]:
    """Buckets or held-out sets of all runs, in the order of the records."""
    return list(dict.fromkeys(bucket for curves in runs for bucket in curves))
