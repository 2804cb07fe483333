"""Makes the records of metrics.jsonl: one per start of a run, one per step, one per held-out pass, and one for each
length of long-context questions.

`rows.py` declares the numbers of a record.  `log.py` and `writers.py` write records.
"""

import math
import time
from dataclasses import replace
from typing import Any

from sft.metrics.long import LongScores
from sft.metrics.long_records import BY_TASK, LONG
from sft.metrics.rows import ROWS, SCHEMA, Row
from sft.metrics.run_facts import RunFacts
from sft.metrics.totals import StepResult, Totals

Record = dict[str, Any]


def start_record(step: int, run: RunFacts, *, num_steps: int) -> Record:
    """The record of a start of the run, which begins or continues after `step`."""
    return _record({"schema": SCHEMA, "kind": "start", "step": step, "time": time.time(), "num-steps": num_steps}, run)


def train_record(step: int, result: StepResult, run: RunFacts, *, seconds: float) -> Record:
    """The record of one optimizer step."""
    return _record({"kind": "train", "step": step}, replace(run, seconds=seconds), result)


def eval_record(step: int, totals: Totals, run: RunFacts, *, set_name: str, seconds: float) -> Record:
    """The record of one pass over the held-out set `set_name`."""
    return _record({"kind": "eval", "step": step, "set": set_name}, replace(run, seconds=seconds), totals)


def long_record(step: int, scores: LongScores, run: RunFacts, *, seconds: float) -> Record:
    """The record of the answers to the questions of one length."""
    (length, *others), answers = scores.lengths, {task: of_task for (task, _), of_task in scores.answers.items()}
    assert not others
    each = {task: "".join("01"[right] for right in of_task.right) for task, of_task in answers.items()}
    facts = {
        "length": length,
        "digest": scores.digest,
        f"{BY_TASK}/NAME/right": {task: of_task.share for task, of_task in answers.items()},
        f"{BY_TASK}/NAME/loss": {task: of_task.loss for task, of_task in answers.items()},
        f"{BY_TASK}/NAME/each": each,
    }
    return _record({"kind": LONG, "step": step, **facts}, replace(run, seconds=seconds))


def _record(facts: Record, run: RunFacts, totals: Totals | None = None) -> Record:
    """The record of kind facts["kind"].  facts: the values of rows that have no source"""
    record: Record = {}
    for row in ROWS:
        if facts["kind"] in row.records and (row.only_if is None or row.only_if(totals, run)):
            value = row.value(totals, run) if row.source else facts[row.name]
            _put(record, row, value)
    return record


def _put(record: Record, row: Row, value: Any) -> None:
    """Puts the value of a row into a record.

    {"chat": 3} of the nested row "loss by source/NAME/tokens" -> record["loss by source"]["chat"]["tokens"] = 3
    """
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
    """The value; None for a number that is not finite, because JSON cannot represent inf and NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
