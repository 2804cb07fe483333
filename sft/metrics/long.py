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
class BinAnswers:
    """The answers of one task and length.

    right  whether each is right, in the order of depths and numbers
    loss   mean over answers of the mean -log p of their tokens, in nats
    """

    right: tuple[bool, ...]
    loss: float

    @property
    def share(self) -> float:
        """The share of right answers."""
        return sum(self.right) / len(self.right)


Answers = Mapping[tuple[str, int], BinAnswers]  # by task and length


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

    @property
    def answers(self) -> dict[tuple[str, int], BinAnswers]:
        """The answers by task and length, tasks in the order of questions."""
        bins = {(task, length): self.of(task, length) for task in self.tasks for length in self.lengths}
        return {
            key: BinAnswers(
                right=tuple(question.right for question in questions),
                loss=sum(question.loss for question in questions) / len(questions),
            )
            for key, questions in bins.items()
            if questions
        }

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


def differences(before: Answers, after: Answers) -> dict[tuple[str, int], Difference]:
    """The difference of right answers for each task and length that both have.  Both must have the same questions."""
    return {key: difference(before[key].right, answers.right) for key, answers in after.items() if key in before}


def table(answers: Answers, before: Answers | None = None) -> list[str]:
    """Lines of two tables, task x length: the share of right answers, and the mean loss of answers.

    With `before`, a cell also has the difference, with a star if its confidence interval does not contain 0.
    """
    changes = differences(before or {}, answers)

    def share(task: str, length: int) -> str:
        change = changes.get((task, length))
        text = f"{answers[task, length].share:.2f}"
        return text if change is None else f"{text} {change.value:+.2f}{'*' if change.is_certain else ' '}"

    lines = _aligned(grid("right answers", answers, share))
    if before is not None:
        lines.append(f"* the {CONFIDENCE:.0%} interval of the difference does not contain 0 (exact, paired questions)")
    loss = grid("nats per token", answers, lambda task, length: f"{answers[task, length].loss:.2f}")
    return [*lines, "", *_aligned(loss)]


def grid(name: str, answers: Answers, cell: Callable[[str, int], str]) -> list[list[str]]:
    """The cells of a table: lengths in the first row, a task in each other row, "-" where no question was asked."""
    lengths = sorted({length for _, length in answers})
    rows = [[name, *(f"{length:,}" for length in lengths)]]
    for task in dict.fromkeys(task for task, _ in answers):
        rows.append([task, *(cell(task, length) if (task, length) in answers else "-" for length in lengths)])
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width) for i, (text, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


def falls(before: Answers, after: Answers) -> Iterator[str]:
    """Yields a warning for each task and length at which fewer answers are right than before, beyond chance."""
    for (task, length), change in differences(before, after).items():
        if change.is_fall:
            old, new = (answers[task, length] for answers in (before, after))
            yield (
                f"{task} at {length:,} tokens fell from {old.share:.2f} to {new.share:.2f} of {len(new.right)} "
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
