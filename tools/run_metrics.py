"""The numbers of a run by kind of record and step, as they are compared."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.metric_differences import Metrics
from tools.run_records import EVAL, TRAIN, held_out_set, read_records


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """Metrics of one run by kind and step; a kind is `train`, `eval`, or of other held-out sets `eval NAME`.

    first  the step it began after: it has evaluations of that step, and no training
    last   step and kind of its last record: it did not write what comes later in the order of kinds
    """

    path: Path
    first: int
    last: tuple[int, str]
    records: dict[str, dict[int, Metrics]]


def read_run(path: Path) -> RunMetrics:
    """The run in a folder or file.  Raises RunError."""
    entries = read_records(path)
    records: dict[str, dict[int, Metrics]] = {TRAIN: {}}
    for entry in entries:
        if (kind := kind_of(entry)) is not None:
            records.setdefault(kind, {})[entry["step"]] = flat({k: v for k, v in entry.items() if k != "step"})
    kinds = list(records)  # in the order in which a run writes them where it writes several after one step
    step, order = max((step, kinds.index(kind)) for kind, steps in records.items() for step in steps)
    return RunMetrics(path=path, first=entries[0]["step"], last=(step, kinds[order]), records=records)


def kind_of(entry: dict[str, Any]) -> str | None:
    """What a record is compared with; None where it is of no step: `start`"""
    if entry["kind"] == EVAL:
        name = held_out_set(entry)
        return EVAL if name == EVAL else f"{EVAL} {name}"
    return TRAIN if entry["kind"] == TRAIN else None


def flat(nested: dict[str, Any], prefix: str = "") -> Metrics:
    """{"loss": 2.5, "by": {"0-4K": {"n": 3}}, "kind": "train"} -> {"loss": 2.5, "by/0-4K/n": 3}"""
    metrics: Metrics = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            metrics |= flat(value, f"{prefix}{name}/")
        elif value is None or isinstance(value, int | float):
            metrics[prefix + name] = value
    return metrics


def kinds_of(*runs: RunMetrics) -> list[str]:
    """train, then the held-out sets of all runs, in the order of their records."""
    return list(dict.fromkeys(kind for run in runs for kind in run.records))
