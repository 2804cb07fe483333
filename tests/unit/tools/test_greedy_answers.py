"""Kinds of differences between teacher-forced and generated answers."""

from collections.abc import Sequence
from typing import Any

import pytest

from tools.greedy_answers import DIFFERS, GOES_ON, RIGHT, SAME_TEXT, WRONG, Answer, generated, report

END = 9


def answer(is_right: bool, written: Sequence[int], *, is_ended: bool = True, text: str = "12") -> Answer:
    """The right answer has tokens 1 and 2.  Token 12 has the same text as both, and others have other texts."""
    return Answer(
        is_right=is_right,
        tokens=(1, 2),
        generated=tuple(written),
        is_ended=is_ended,
        text="12",
        written="".join(map(str, written)),
    )


@pytest.mark.parametrize(
    ("is_right", "written", "is_ended", "kind"),
    [
        (True, [1, 2], True, RIGHT),
        (False, [1, 3], True, WRONG),
        (False, [3, 2], True, WRONG),
        (False, [1], True, WRONG),
        (True, [1, 2, 3], True, GOES_ON),
        (True, [1, 2], False, GOES_ON),
        (False, [12], True, SAME_TEXT),
        (False, [12], False, WRONG),
        (True, [1, 3], True, DIFFERS),
        (False, [1, 2], True, DIFFERS),
    ],
)
def test_kinds(is_right: bool, written: list[int], is_ended: bool, kind: str) -> None:
    assert answer(is_right, written, is_ended=is_ended).kind == kind


def test_the_table_and_the_control() -> None:
    answers = [answer(True, [1, 2]), answer(False, [4]), answer(True, [1, 2, 3])]
    other = Answer(is_right=False, tokens=(4,), generated=(1, 2), is_ended=True, text="4", written="12")
    lines = list(report([*answers, other], [("a", 1), ("a", 1), ("a", 2), ("b", 1)]))
    assert lines[0] == "4 answers, 2 of them right by teacher forcing"
    assert [int(line.split()[0]) for line in lines[1:]] == [1, 2, 1, 0, 0, 1]  # the last: "12" for the second question


class Model:
    def generate(self, ids: Any, *, max_new_tokens: int, eos_token_id: int, **words: Any) -> Any:
        import torch

        written = torch.tensor([[5, 6, eos_token_id, 7][:max_new_tokens]])
        return torch.cat([ids, written], dim=1)


def test_generation_ends_with_the_turn() -> None:
    assert generated(Model(), [1, 2, 3], 4, END) == ((5, 6), True)
    assert generated(Model(), [1, 2, 3], 2, END) == ((5, 6), False)
