"""Reads the records of long-context questions in metrics.jsonl, and finds what fell below the start of the run."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sft.metrics.long import Answers, BinAnswers, falls

LONG = "long"  # the kind of these records
BY_TASK = "answers by task"


class AnswersOfRun(NamedTuple):
    """Answers before the first step, only to questions that were asked later, too, and answers after `step`."""

    step: int
    before: Answers
    after: Answers

    @property
    def falls(self) -> list[str]:
        return list(falls(self.before, self.after))


def answers_of_run(records: Iterable[Mapping[str, Any]], step: int | None = None) -> AnswersOfRun | None:
    """The answers of a run after `step`; None: after the last step with answers.

    Returns None if no questions were asked after this step.  Other kinds of records are skipped.  Raises LookupError,
    TypeError or ValueError if a record is damaged.
    """
    by_step: dict[int, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        if record["kind"] == LONG:
            by_step.setdefault(record["step"], {})[record["length"]] = record
    step = max(by_step, default=0) if step is None else step
    if step not in by_step:
        return None
    last, first = by_step[step], by_step.get(0, {}) if step else {}
    same = {length: record for length, record in first.items() if _is_same(record, last.get(length))}
    return AnswersOfRun(step, _answers(same), _answers(last))


def _is_same(record: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Whether both records are of the same questions."""
    return other is not None and record["digest"] == other["digest"]


def _answers(by_length: Mapping[int, Mapping[str, Any]]) -> dict[tuple[str, int], BinAnswers]:
    answers = {
        (task, length): BinAnswers(right=tuple(letter == "1" for letter in entry["each"]), loss=entry["loss"])
        for length, record in sorted(by_length.items())
        for task, entry in record[BY_TASK].items()
    }
    if not all(entry.right and isinstance(entry.loss, float) for entry in answers.values()):
        raise ValueError("a record of long-context questions has no answers")
    return answers
