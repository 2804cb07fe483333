"""Defines the record of a long-context evaluation, prints it as a table, and compares it with an earlier one.

An answer is right if each of its tokens has the largest score, where the model reads the prompt and the answer's
earlier tokens (teacher forcing).  Greedy generation then writes the same answer.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft.errors import ConfigError
from sft.metrics.paired import CONFIDENCE, Difference, difference

FORMAT = "sft long 1"


@dataclass(frozen=True, kw_only=True)
class QuestionScore:
    """The score of one question.

    length       the length of its suite, in tokens
    depth        the depth that its evidence should have: 0 beginning, 1 end of the text
    number       index of the question in its task, length and depth
    token_depth  share of the prompt's tokens before the first evidence
    prompt       number of tokens of the prompt
    tokens       number of tokens of the answer
    right        whether every token of the answer has the largest score
    loss         mean -log p of the answer's tokens, in nats
    """

    task: str
    length: int
    depth: float
    number: int
    token_depth: float
    prompt: int
    tokens: int
    right: bool
    loss: float


@dataclass(frozen=True, kw_only=True)
class LongScores:
    """The scores of all questions.  digest: a hash of all their tokens, so equal digests are equal questions"""

    digest: str
    questions: tuple[QuestionScore, ...]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(question.task for question in self.questions))

    @property
    def lengths(self) -> list[int]:
        return sorted({question.length for question in self.questions})

    @property
    def depths(self) -> list[float]:
        return sorted({question.depth for question in self.questions})

    def of(self, task: str | None = None, length: int | None = None, depth: float | None = None) -> list[QuestionScore]:
        """The questions of a task, length and depth; None: all."""
        return [
            question
            for question in self.questions
            if task in (None, question.task) and length in (None, question.length) and depth in (None, question.depth)
        ]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "digest": self.digest, "questions": [asdict(question) for question in self.questions]}


def read_scores(option: str, file: Path) -> LongScores:
    """The scores in a file of `sft eval --long --json`.  Raises ConfigError if the file has none.

    option: the option that names the file, for messages
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))["long"]
        if content["format"] != FORMAT:
            raise KeyError(FORMAT)
        questions = tuple(QuestionScore(**question) for question in content["questions"])
        return LongScores(digest=str(content["digest"]), questions=questions)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"cannot be read: {error}" if isinstance(error, OSError) else "has no long-context scores"
        raise ConfigError(
            f"{option} {file} {reason}.  Give a file that `sft eval RECIPE --long --json FILE` has written."
        ) from error


def differences(before: LongScores, after: LongScores) -> dict[tuple[str, int], Difference]:
    """The difference of right answers for each task and length.  Both must have the same questions."""
    assert before.digest == after.digest
    return {
        (task, length): difference(
            [question.right for question in before.of(task, length)], [question.right for question in of_after]
        )
        for task in after.tasks
        for length in after.lengths
        if (of_after := after.of(task, length))
    }


def table(scores: LongScores, before: LongScores | None = None) -> list[str]:
    """Lines of two tables, task x length: the share of right answers, and the mean loss of answers.

    With `before`, a cell also has the difference, with a star if its confidence interval does not contain 0.
    """
    changes = {} if before is None else differences(before, scores)

    def share(questions: Sequence[QuestionScore]) -> str:
        text = f"{sum(question.right for question in questions) / len(questions):.2f}"
        change = changes.get((questions[0].task, questions[0].length))
        if change is None:
            return text
        return f"{text} {change.value:+.2f}" + ("*" if change.low > 0 or change.high < 0 else " ")

    def loss(questions: Sequence[QuestionScore]) -> str:
        return f"{sum(question.loss for question in questions) / len(questions):.2f}"

    lines = _cells("right answers", scores, share)
    if before is not None:
        lines.append(f"* the {CONFIDENCE:.0%} interval of the difference does not contain 0 (exact, paired questions)")
    return [*lines, "", *_cells("nats per token", scores, loss)]


def _cells(name: str, scores: LongScores, cell: Callable[[Sequence[QuestionScore]], str]) -> list[str]:
    rows = [[name, *(f"{length:,}" for length in scores.lengths)]]
    for task in scores.tasks:
        bins = [scores.of(task, length) for length in scores.lengths]
        rows.append([task, *(cell(questions) if questions else "-" for questions in bins)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width) for i, (text, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


def falls(before: LongScores, after: LongScores) -> Iterator[str]:
    """Yields a warning for each task and length at which fewer answers are right than before, beyond chance."""
    for (task, length), change in differences(before, after).items():
        if change.is_fall:
            old, new = (
                sum(question.right for question in scores.of(task, length)) / len(scores.of(task, length))
                for scores in (before, after)
            )
            yield (
                f"{task} at {length:,} tokens fell from {old:.2f} to {new:.2f} of {len(after.of(task, length))} "
                f"answers ({CONFIDENCE:.0%} interval of the difference: {change.low:+.2f} to {change.high:+.2f})"
            )


def scores_of(
    digest: str, facts: Sequence[Mapping[str, Any]], nll: Sequence[float], wrong: Sequence[int]
) -> LongScores:
    """The record of questions with these facts (fields of `QuestionScore`).

    nll    sum of -log p of each answer's tokens
    wrong  number of each answer's tokens that do not have the largest score
    """
    questions = [
        QuestionScore(**fact, right=not missed, loss=total / fact["tokens"])
        for fact, total, missed in zip(facts, nll, wrong, strict=True)
    ]
    return LongScores(digest=digest, questions=tuple(questions))
