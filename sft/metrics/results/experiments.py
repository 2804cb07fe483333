"""Compares two runs as experiments: their recipes, losses, tokens and hours, and which run is better.

A difference of held-out losses counts only if it exceeds twice its noise.  The noise of a run is the scatter of its
last evaluations around a line: without scatter, an evaluation is the mean of its two neighbours.  If evaluations have
independent errors of standard deviation s, then x[i-1] - 2 x[i] + x[i+1] has the standard deviation sqrt(6) s (von
Neumann, 1941).  A curved course increases the estimate.  Another seed, or other held-out rows, may move a loss further
than this noise, and only another run can show that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sft.config import yaml
from sft.console import duration
from sft.files.folder_files import CONFIG_BYTES, UnsafeFileError, read_file
from sft.metrics.results.compare import aligned
from sft.metrics.results.records import EVAL, TRAIN, RunError, by_step, falls_below_start, held_out_set, read_records

ENOUGH = 4  # evaluations from which the noise can be estimated
CLEAR = 2.0  # a difference counts from this multiple of its noise
LAST_SHARE = 0.2  # of all steps: those whose training losses are compared
FEWEST_STEPS = 5
# Keys of a folder, not of an experiment.
_OF_FOLDERS = ("run.dir", "data.cache_dir")
_DATA = ("documents", "tokens/real", "tokens/supervised")  # equal for equal data, whatever the layout


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One run as an experiment.

    recipe   the text of each key in recipe.yaml; None if the folder has no such file
    train    records of steps, in the order of steps
    held_out {name of a set: its records in the order of steps}
    seconds  of steps and evaluations, also of steps that were repeated after a restart
    ranks    number of ranks of the newest start
    planned  number of steps of the whole run; None if no start record names it
    falls    warnings about long-context questions whose answers fell below the start of the run
    """

    path: Path
    recipe: dict[str, str] | None
    train: list[dict[str, Any]]
    held_out: dict[str, list[dict[str, Any]]]
    seconds: float
    gpu_seconds: float
    planned: int | None
    falls: list[str]

    @staticmethod
    def read(path: Path) -> "Experiment":
        """The run in a folder or a metrics.jsonl.  Raises RunError if its metrics or its recipe cannot be read."""
        records = read_records(path)
        seconds = gpu_seconds = 0.0
        ranks, planned = 1, None
        evaluations: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            if record["kind"] == "start":
                ranks = record.get("layout", {}).get("world_size", ranks)
                planned = record.get("num-steps", planned)
            if record["kind"] == EVAL:
                evaluations.setdefault(held_out_set(record), []).append(record)
            spent = sum(record.get(name) or 0.0 for name in ("step-time-s", "eval-time-s", "long-time-s"))
            seconds, gpu_seconds = seconds + spent, gpu_seconds + spent * ranks
        return Experiment(
            path=path,
            recipe=_recipe(path),
            train=by_step([record for record in records if record["kind"] == TRAIN]),
            held_out={name: by_step(entries) for name, entries in evaluations.items()},
            seconds=seconds,
            gpu_seconds=gpu_seconds,
            planned=planned,
            falls=falls_below_start(path, records),
        )

    def total(self, name: str) -> int:
        """The sum of a count over all steps."""
        return sum(record.get(name) or 0 for record in self.train)

    @property
    def steps(self) -> str:
        last = self.train[-1]["step"] if self.train else 0
        return f"{last}" if self.planned is None else f"{last} of {self.planned}"


class Loss(NamedTuple):
    """A held-out loss in nats per token, and the step after which it was measured."""

    value: float
    step: int

    def __str__(self) -> str:
        return f"{self.value:.4f} (step {self.step})"


def losses(records: Sequence[dict[str, Any]]) -> list[Loss]:
    """The mean -log p of each record, without those that are not finite.

    `nll` is this mean if the objective is another one (loss.reduction, loss.distill, ...).
    """
    pairs = [(record.get("nll", record.get("lm loss")), record["step"]) for record in records]
    return [Loss(value, step) for value, step in pairs if value is not None]


def scatter(values: Sequence[float]) -> float | None:
    """The standard deviation of the last half of these values, at least `ENOUGH`, around a line.

    None if there are fewer values.  [2, 1, 2, 1] -> sqrt(mean(4, 4) / 6)
    """
    if len(values) < ENOUGH:
        return None
    last = values[-max(ENOUGH, len(values) // 2) :]
    bends = [(a - 2 * b + c) ** 2 for a, b, c in zip(last, last[1:], last[2:], strict=False)]
    return math.sqrt(sum(bends) / len(bends) / 6)


def report(a: Experiment, b: Experiment) -> list[str]:
    """The lines of the comparison."""
    lines = [f"A  {a.path}", f"B  {b.path}", "", *_recipes(a, b), ""]
    rows = [
        ("steps", a.steps, b.steps, ""),
        _counts("tokens", a, b, "tokens/real"),
        _counts("supervised tokens", a, b, "tokens/supervised"),
        ("hours", duration(a.seconds), duration(b.seconds), _ratio(a.seconds, b.seconds)),
        ("hours x ranks", duration(a.gpu_seconds), duration(b.gpu_seconds), _ratio(a.gpu_seconds, b.gpu_seconds)),
    ]
    verdicts = []
    for name in dict.fromkeys([*a.held_out, *b.held_out]):
        label = "held out" if name == EVAL else f"held out {name}"
        left, right = (losses(run.held_out.get(name, [])) for run in (a, b))
        if not left or not right:
            verdicts.append(f"{label}: only {'A' if left else 'B'} has this set")
            continue
        rows.append((f"{label}, final loss", str(left[-1]), str(right[-1]), _change(left[-1], right[-1])))
        rows.append((f"{label}, best loss", str(min(left)), str(min(right)), _change(min(left), min(right))))
        ends = [run.held_out[name][-1] for run in (a, b)]
        if different := [key for key in _DATA if ends[0].get(key) != ends[1].get(key)]:
            numbers = ", ".join(f"{key} {ends[0].get(key)} and {ends[1].get(key)}" for key in different)
            verdicts.append(f"{label}: the runs score other data or tokens ({numbers}), so no run is better")
        else:
            verdicts.append(f"{label}: {_verdict(left, right)}")
    trained, remarks = _training(a, b)
    lines += [*aligned([("", "A", "B", "B against A"), *rows, *trained], left=1), ""]
    if not verdicts:
        remarks.append("no run has a held-out set (data.eval), so nothing shows which one is better on other data")
    falls = [
        f"WARNING: {letter}, below its start: {fall}" for letter, run in (("A", a), ("B", b)) for fall in run.falls
    ]
    return lines + verdicts + remarks + falls


def _verdict(left: Sequence[Loss], right: Sequence[Loss]) -> str:
    best = (min(left), min(right))
    difference = abs(best[0].value - best[1].value)
    better = "A" if best[0].value < best[1].value else "B"
    amount = f"{difference:.4f} nats per token"
    noises = [scatter([loss.value for loss in run]) for run in (left, right)]
    if difference == 0:
        return "the best losses of A and B are equal"
    if None in noises:
        return f"{better} is lower by {amount}; with fewer than {ENOUGH} evaluations of a run, the noise is unknown"
    noise = math.hypot(*(value for value in noises if value is not None))
    times = difference / noise if noise else math.inf
    if times < CLEAR:
        return f"no clear difference: {better} is lower by {amount}, {times:.1f} times the noise of {noise:.4f}"
    return f"{better} is better by {amount}, {times:.1f} times the noise of {noise:.4f} between evaluations"


def _training(a: Experiment, b: Experiment) -> tuple[list[tuple[str, ...]], list[str]]:
    """A row with the mean training loss of the last steps of both runs, and a line about their paired difference."""
    sides = [{loss.step: loss.value for loss in losses(run.train)} for run in (a, b)]
    both = sorted(sides[0].keys() & sides[1].keys())
    last = both[-max(FEWEST_STEPS, math.ceil(LAST_SHARE * len(both))) :]
    if len(last) < FEWEST_STEPS:
        return [], []
    left, right = ([side[step] for step in last] for side in sides)
    means = [sum(values) / len(last) for values in (left, right)]
    name = f"train loss, steps {last[0]}-{last[-1]}"
    row = (name, f"{means[0]:.4f}", f"{means[1]:.4f}", f"{means[1] - means[0]:+.4f}")
    counts = [{record["step"]: tuple(record.get(key) for key in _DATA) for record in run.train} for run in (a, b)]
    if any(counts[0][step] != counts[1][step] for step in last):
        return [row], ["training: the steps of A and B hold different data, so their losses cannot be paired"]
    gaps = [y - x for x, y in zip(left, right, strict=True)]
    mean = means[1] - means[0]
    error = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps))
    return [row], [f"training: B - A is {mean:+.4f} with a standard error of {error:.4f}, paired by step"]


def _recipes(a: Experiment, b: Experiment) -> list[str]:
    """Lines about the keys that differ."""
    if a.recipe is None or b.recipe is None:
        missing = " and ".join(name for name, run in (("A", a), ("B", b)) if run.recipe is None)
        return [f"recipes not compared: {missing} has no recipe.yaml beside its metrics"]
    keys = [key for key in dict.fromkeys([*a.recipe, *b.recipe]) if key not in _OF_FOLDERS]
    rows = [(key, *(run.get(key, "absent") for run in (a.recipe, b.recipe))) for key in keys]
    different = [row for row in rows if row[1] != row[2]]
    if not different:
        return ["the recipes are equal, but for folders"]
    return aligned([("recipe", "A", "B"), *different], left=3)


def _recipe(path: Path) -> dict[str, str] | None:
    file = (path if path.is_dir() else path.parent) / "recipe.yaml"
    try:
        text = read_file(file, CONFIG_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnsafeFileError, UnicodeDecodeError) as error:
        raise RunError(f"{file} cannot be read: {error}.") from error
    return dict(_flat("", yaml.read(text, str(file))))


def _flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, yaml.Pairs):
        return [item for name, _, child in value for item in _flat(f"{prefix}.{name}".lstrip("."), child)]
    return [(prefix, yaml.write(yaml.plain(value)))]


def _counts(label: str, a: Experiment, b: Experiment, name: str) -> tuple[str, str, str, str]:
    left, right = a.total(name), b.total(name)
    return label, f"{left:,}", f"{right:,}", _ratio(left, right)


def _ratio(left: float, right: float) -> str:
    return f"x {right / left:.2f}" if left and right else ""


def _change(left: Loss, right: Loss) -> str:
    return f"{right.value - left.value:+.4f}"
