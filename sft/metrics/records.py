"""Records, as metrics.jsonl holds them: one when a run starts, one a step, one a held-out pass.

`rows.py` declares their numbers.  Does not write anything (`log.py`, `writers.py`).
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sft.metrics.rows import ROWS, SCHEMA, Row, RunFacts
from sft.metrics.totals import StepResult, Totals

Record = dict[str, Any]


def start_record(step: int, run: RunFacts, *, num_steps: int) -> Record:
    """The beginning of a run, or its continuation after `step`."""
    return _record({"schema": SCHEMA, "kind": "start", "step": step, "time": time.time(), "num-steps": num_steps}, run)


def train_record(step: int, result: StepResult, run: RunFacts, *, seconds: float) -> Record:
    """One optimizer step."""
    return _record({"kind": "train", "step": step}, replace(run, seconds=seconds), result)


def eval_record(step: int, totals: Totals, run: RunFacts, *, set_name: str, seconds: float) -> Record:
    """One pass over the held-out set `set_name`."""
    return _record({"kind": "eval", "step": step, "set": set_name}, replace(run, seconds=seconds), totals)


def _record(facts: Record, run: RunFacts, totals: Totals | None = None) -> Record:
    """The rows of one kind of record; `facts` holds the rows that have no source."""
    record: Record = {}
    for row in ROWS:
        if facts["kind"] in row.records and (row.only_if is None or row.only_if(totals, run)):
            value = row.value(totals, run) if row.source else facts[row.name]
            _put(record, row, value)
    return record


def _put(record: Record, row: Row, value: Any) -> None:
    """ "loss by source/NAME/tokens", nested, {"chat": 3} -> record["loss by source"]["chat"]["tokens"] = 3"""
    if not row.nested:
        record[row.name] = _finite(value)
        return
    outer, *middle, inner = row.name.split("/")
    group = record.setdefault(outer, {})
    if middle:
        for name, number in value.items():
            group.setdefault(name, {})[inner] = _finite(number)
    else:
        group[inner] = value


def _finite(value: Any) -> Any:
    """None for a number that is not finite: JSON has none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """{"a": 1, "b": {"c": {"d": 2}}} -> ("a", 1), ("b/c/d", 2)"""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", x) for inner, x in flat(value))
        else:
            yield name, value
