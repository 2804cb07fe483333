"""Computes the curves of a run that `sft plot` draws: records by step, smoothed values, loss by position, accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sft.metrics.results.records import EVAL, TRAIN, by_step, held_out_set, read_records

SMOOTH = 0.05  # share of all values that a smoothed value averages
BY_POSITION = "loss by position"  # {bucket: {"loss": nats per supervised token or null, "tokens": count}}

ACCURACY = "token accuracy"  # share of supervised tokens whose logit is the largest

Curves = dict[str, np.ndarray]  # bucket or held-out set -> steps and values, [2, points]


@dataclass(frozen=True, kw_only=True)
class PlottedRun:
    """The records of one run, in the order of steps.  A record has "step" and metrics by name.

    train  records of optimizer steps
    eval   {name of a held-out set: its records}, in the order of the file
    """

    name: str
    train: list[dict]
    eval: dict[str, list[dict]]


def read_run(folder: Path) -> PlottedRun:
    """The run in `folder`.  Raises RunError if its metrics cannot be read."""
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


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of the values around each value.  A mean covers the share SMOOTH of all values, and fewer at both ends.

    NaN is left out of means.  If there are fewer than 30 values, the result is the values themselves.
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
    """The label of a held-out set: eval -> held out; code -> held out code"""
    return "held out" if name == "eval" else f"held out {name}"


def by_position(records: Sequence[dict]) -> Curves:
    """The curve of the loss of each bucket, at steps at which it has tokens.  Buckets without tokens are left out."""
    points: dict[str, list[tuple[int, float]]] = {}
    for entry in records:
        for bucket, part in (entry.get(BY_POSITION) or {}).items():
            points.setdefault(bucket, []).extend([(entry["step"], part["loss"])] if part["tokens"] else [])
    return {bucket: np.array(losses, dtype=float).T for bucket, losses in points.items() if losses}


def positions(runs: Sequence[PlottedRun]) -> tuple[str, list[Curves]]:
    """The name of the data whose loss by position is drawn for all runs, and the curves of each run.

    These are the data of the first held-out set, if every run with losses by position has a curve of two points or more
    for it.  Otherwise, they are the training data, with smoothed curves.
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
    """The curve of the token accuracy of each held-out set that has two or more measured values."""
    measured = {
        name: [(entry["step"], entry[ACCURACY]) for entry in records if entry.get(ACCURACY) is not None]
        for name, records in run.eval.items()
    }
    return {name: np.array(points, dtype=float).T for name, points in measured.items() if len(points) > 1}


def names_of(runs: Sequence[Curves]) -> list[str]:
    """Buckets or held-out sets of all runs, in the order of the records."""
    return list(dict.fromkeys(bucket for curves in runs for bucket in curves))
