"""Questions have the wanted length and depth, can be answered from their text, and only from their evidence."""

from collections.abc import Callable

import numpy as np
import pytest

from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer, FolderTokenizer
from sft.data.long.asking import without_thinking
from sft.data.long.compose import Bin, Question, compose
from sft.data.long.tasks import TASKS
from tests.unit.data.long.solvers import SOLVERS

Tokenizers = Callable[[str], FolderTokenizer]
BYTE = ByteTokenizer()
# The longest passage of each kind of text has fewer bytes than this.
LONGEST_PASSAGE = 250
ONE_LINE = ("needle", "keys", "code", "records")  # tasks whose only line between passages is the evidence


def made(
    task: str, length: int = 3000, depth: float = 0.5, number: int = 0, tokenizer: ChatTokenizer = BYTE
) -> Question:
    question = compose(Bin(task, length, depth), number, 0, tokenizer)
    assert question is not None
    return question


def solved(content: str, task: str) -> str | None:
    """The answer from the text; None if it does not contain one."""
    try:
        return SOLVERS[task](content)
    except (ValueError, KeyError):
        return None


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_follows_from_the_text(task: str) -> None:
    for number in range(20):
        question = made(task, number=number)
        assert solved(question.content, task) == question.answer


@pytest.mark.parametrize("task", TASKS)
def test_without_any_line_of_its_evidence_the_text_has_no_answer(task: str) -> None:
    """Nothing else in the prompt gives the answer away."""
    for number in range(5):
        question = made(task, number=number)
        starts = question.evidence
        text = bytes(np.where(question.tokens < 256, question.tokens, 0).astype(np.uint8)).decode()
        for start in starts:
            line = text[start : text.index("\n", start)]
            content = question.content.replace(f"{line}\n", "")
            assert len(content) == len(question.content) - len(line) - 1
            assert solved(content, task) != question.answer
            if len(starts) == 1 and task != "association":  # names are in other lines, too
                assert question.answer not in content


@pytest.mark.parametrize("task", TASKS)
def test_answers_of_other_questions_are_at_chance(task: str) -> None:
    """With shuffled answers, a reader that answers every question is right as often as a guess."""
    questions = [made(task, 1600 if task != "documents" else 3000, number=number) for number in range(100)]
    shuffled = [question.answer for question in questions[1:] + questions[:1]]
    right = sum(solved(question.content, task) == answer for question, answer in zip(questions, shuffled))
    chance = {"counting": 1 / 8, "documents": 1 / 30, "association": 1 / 40}.get(task, 0)
    assert right <= 100 * chance + 3 * (100 * chance) ** 0.5  # three standard deviations
    assert sum(solved(question.content, task) == question.answer for question in questions) == 100


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [2000, 8000])
def test_the_length_is_reached_and_never_exceeded(task: str, length: int) -> None:
    for number in range(3):
        question = made(task, length, number=number)
        assert length - 2 * LONGEST_PASSAGE < len(question.tokens) <= length


@pytest.mark.parametrize("task", TASKS)
def test_the_first_evidence_lies_at_the_depth(task: str) -> None:
    for depth in (0, 0.25, 0.5, 0.75, 1):
        question = made(task, 8000, depth)
        assert list(question.evidence) == sorted(question.evidence)
        ends = len(question.content.split("\n")[-1]) + 60  # the question and the template
        expected = depth * (question.start - ends)
        # Lines of evidence and other lines, of up to 20 times 60 bytes, lie between the passages.
        assert abs(question.evidence[0] - expected) < (300 if task in ONE_LINE else 1500)


def test_the_tokens_are_those_of_the_chat_up_to_the_answer() -> None:
    question = made("needle", 1000)
    prompt = f"\0user\n{question.content}\0\n\0assistant\n"
    assert (
        bytes(np.where(question.tokens < 256, question.tokens, 0).astype(np.uint8)).decode() == prompt + question.answer
    )
    assert question.start == len(prompt) and prompt[question.evidence[0] :].startswith("The password of")


@pytest.mark.parametrize("name", ["llama31", "gemma", "phi3"])
def test_the_tokens_of_a_template(tokenizers: Tokenizers, name: str) -> None:
    """They are the tokens of the prompt that the template writes for inference, and then of the answer."""
    tokenizer = without_thinking(tokenizers(name))
    assert isinstance(tokenizer, FolderTokenizer)
    for task in ("needle", "code", "values"):
        question = made(task, 1200, tokenizer=tokenizer)
        messages = [{"role": "user", "content": question.content}]
        prompt = tokenizer.template.render(messages, prompt=True).text
        assert question.tokens[: question.start].tolist() == tokenizer.encode(prompt).ids.tolist()
        assert tokenizer.decode(question.tokens[question.start :]).strip() == question.answer
        assert 1200 - LONGEST_PASSAGE < len(question.tokens) <= 1200
        evidence = {"needle": "The password of", "code": "LIMIT_", "values": "One of the passwords"}[task]
        assert tokenizer.decode(question.tokens[question.evidence[0] :]).lstrip().startswith(evidence)


def test_a_question_that_does_not_fit() -> None:
    assert compose(Bin("needle", 150, 0.5), 0, 0, BYTE) is None
    assert compose(Bin("needle", 300, 0.5), 0, 0, BYTE) is not None


def test_questions_depend_on_their_bin_their_number_and_the_seed_only() -> None:
    first = compose(Bin("needle", 1000, 0.5), 0, 0, BYTE)
    again = compose(Bin("needle", 1000, 0.5), 0, 0, BYTE)
    others = [compose(Bin("needle", 1000, 0.5), 1, 0, BYTE), compose(Bin("needle", 1000, 0.5), 0, 1, BYTE)]
    assert first is not None and again is not None and first.content == again.content
    assert all(other is not None and other.answer != first.answer for other in others)
