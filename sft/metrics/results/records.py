"""Reads metrics.jsonl of a run, for the commands that compare and draw runs.  Needs only Python.

Reads schemas 1 to 10.  A resumed run may repeat steps; callers decide which record of a step is used.  An incomplete
last line, which a killed run leaves, is skipped.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.errors import SftError
from sft.files.folder_files import METRICS_BYTES, UnsafeFileError, read_file
from sft.metrics.long_records import LONG, answers_of_run

Value = int | float | None
Metrics = dict[str, Value]  # by name; "/" joins the names of nested values: `loss by position/0-4K/loss`

SCHEMAS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
TRAIN, EVAL = "train", "eval"


class RunError(SftError):
    """The error if the metrics of a run cannot be read or compared."""


def read_records(run: Path) -> list[dict[str, Any]]:
    """All records of a run folder or of a metrics.jsonl.

    Raises RunError if the file cannot be read, has lines that are no records, or has neither a step nor an evaluation.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    try:
        *lines, tail = read_file(path, METRICS_BYTES).split(b"\n")
    except FileNotFoundError:
        raise RunError(
            f"{path} does not exist. Give the folder of a run (run.dir of its recipe, such as runs/demo) "
            "or its metrics.jsonl."
        ) from None
    except (OSError, UnsafeFileError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"{path} cannot be read: {reason}. Give the folder of a run that you may read.") from error
    records = [_record(path, number, line) for number, line in enumerate(lines, 1)]
    if _is_whole(tail):
        records.append(_record(path, len(lines) + 1, tail))
    for record in records[:1] + [record for record in records if "schema" in record]:
        if record.get("schema") not in SCHEMAS:
            raise RunError(
                f"{path} has schema {record.get('schema')}; this version reads {SCHEMAS[0]} to {SCHEMAS[-1]}. "
                "Use the version of sft that made the run."
            )
    if not any(record["kind"] in (TRAIN, EVAL, LONG) for record in records):
        raise RunError(f"{path} has no step and no evaluation: the run has not finished a step, or ended before that.")
    return records


def held_out_set(record: dict[str, Any]) -> str:
    """The name of the held-out set of an evaluation record.  Before schema 3, records did not contain the name."""
    name: str = record.get("set", EVAL)
    return name


def by_step(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last record of each step, in the order of steps."""
    by_number = {entry["step"]: entry for entry in records}
    return [by_number[step] for step in sorted(by_number)]


def _is_whole(tail: bytes) -> bool:
    """Whether the text after the last line break is a record; a killed run may leave an incomplete record."""
    try:
        return isinstance(json.loads(tail), dict)
    except (ValueError, RecursionError):
        return False


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, or not even UTF-8
        is_deep = isinstance(error, RecursionError)
        reason = "nested too deeply" if is_deep else getattr(error, "msg", "not UTF-8")
        raise RunError(
            f"{path}:{number} is not JSON ({reason}): the file is damaged, or does not hold the metrics of a run. "
            "Remove that line, or give the folder of a run."
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str) or type(record.get("step")) is not int:
        raise RunError(
            f"{path}:{number} is not a record with a kind and an integer step: the file does not hold metrics of sft. "
            "Give the folder of a run."
        )
    return record


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """Metrics of one run by kind and step.  A kind is `train`, `eval`, `eval NAME` for a named held-out set, or
    `long LENGTH` for the long-context questions of a length.

    first    the step after which the run began; it may have evaluations after this step, but has no train record of it
    last     step and kind of the last record, in the order of steps and then of kinds
    records  {kind: {step: metrics}}
    """

    path: Path
    first: int
    last: tuple[int, str]
    records: dict[str, dict[int, Metrics]]


def read_metrics(path: Path) -> RunMetrics:
    """The metrics of the run in a folder or file.  Of a repeated step, the last record is used.

    Raises the errors of `read_records`.
    """
    entries = read_records(path)
    records: dict[str, dict[int, Metrics]] = {TRAIN: {}}
    for entry in entries:
        if (kind := kind_of(entry)) is not None:
            records.setdefault(kind, {})[entry["step"]] = numbers_of({k: v for k, v in entry.items() if k != "step"})
    kinds = list(records)  # in the order in which a run writes the records of one step
    step, order = max((step, kinds.index(kind)) for kind, steps in records.items() for step in steps)
    return RunMetrics(path=path, first=entries[0]["step"], last=(step, kinds[order]), records=records)


def falls_below_start(path: Path, entries: list[dict[str, Any]]) -> list[str]:
    """Warnings about long-context questions whose last answers fell below those before the first step.

    path: for messages.  Raises RunError if a record of answers is damaged.
    """
    try:
        answers = answers_of_run(entries)
    except (LookupError, TypeError, ValueError) as error:
        raise RunError(f"{path} has a damaged record of long-context questions: {error}.  Remove that line.") from error
    return answers.falls if answers else []


def kind_of(entry: dict[str, Any]) -> str | None:
    """The kind of a record; None for a record that is not of a step or an evaluation, such as `start`."""
    if entry["kind"] == EVAL:
        name = held_out_set(entry)
        return EVAL if name == EVAL else f"{EVAL} {name}"
    if entry["kind"] == LONG:
        return f"{LONG} {entry['length']}"
    return TRAIN if entry["kind"] == TRAIN else None


def flat(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the values of nested objects with joined names: {"a": 1, "b": {"c": {"d": 2}}} -> ("a", 1), ("b/c/d",
    2)"""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", x) for inner, x in flat(value))
        else:
            yield name, value


def numbers_of(record: dict[str, Any]) -> Metrics:
    """The numbers of a record by joined names.

    {"loss": 2.5, "by": {"0-4K": {"n": 3}}, "kind": "train"} -> {"loss": 2.5, "by/0-4K/n": 3}
    """
    return {name: value for name, value in flat(record) if value is None or isinstance(value, int | float)}


def kinds_of(*runs: RunMetrics) -> list[str]:
    """The kinds of records of all runs: train, then those of held-out sets in the order of their records."""
    return list(dict.fromkeys(kind for run in runs for kind in run.records))
