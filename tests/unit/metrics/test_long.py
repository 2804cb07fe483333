"""The record of a long-context evaluation: JSON, tables, comparison and picture."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sft.errors import ConfigError
from sft.metrics.long import LongScores, QuestionScore, falls, read_scores, scores_of, table
from sft.metrics.results.long_plot import draw, shares


def scores(right: dict[tuple[str, int], str]) -> LongScores:
    """Scores from a letter for each question: + right, - wrong; one for each of the depths 0, 0.5 and 1, in turn."""
    questions = [
        QuestionScore(
            task=task, length=length, depth=(0.0, 0.5, 1.0)[i % 3], number=i // 3, token_depth=0.1, prompt=length - 9,
            tokens=6, right=letter == "+", loss=0.5 if letter == "+" else 2.0,
        )
        for (task, length), letters in right.items()
        for i, letter in enumerate(letters)
    ]  # fmt: skip
    return LongScores(digest="d", questions=tuple(questions))


NEEDLE, CODE = "needle", "code"
BEFORE = scores({(NEEDLE, 512): "+" * 9, (CODE, 512): "+-+" * 3, (NEEDLE, 1024): "+" * 9})
AFTER = scores({(NEEDLE, 512): "+" * 9, (CODE, 512): "++-" * 3, (NEEDLE, 1024): "-" * 7 + "++"})


def test_the_score_of_an_answer() -> None:
    fact = dict(task=CODE, length=64, depth=0.5, number=0, token_depth=0.4, prompt=50)
    first, second = scores_of("d", [{**fact, "tokens": 4}, {**fact, "tokens": 5}], [2.0, 1.0], [1, 0]).questions
    assert (first.right, first.loss, second.right, second.loss) == (False, 0.5, True, 0.2)


def test_tables() -> None:
    assert table(AFTER) == [
        "right answers   512  1,024",
        "needle         1.00   0.22",
        "code           0.67      -",
        "",
        "nats per token   512  1,024",
        "needle          0.50   1.67",
        "code            1.00      -",
    ]


def test_a_table_of_differences() -> None:
    assert table(AFTER, BEFORE)[:4] == [
        "right answers          512        1,024",
        "needle         1.00 +0.00   0.22 -0.78*",
        "code           0.67 +0.00             -",
        "* the 95% interval of the difference does not contain 0 (exact, paired questions)",
    ]


def test_warnings_name_what_fell() -> None:
    # 7 answers of 9 are lost, none is gained: 7/9 * (2 * 0.40962 - 1) = -0.14
    assert list(falls(BEFORE, AFTER)) == [
        "needle at 1,024 tokens fell from 1.00 to 0.22 of 9 answers (95% interval of the difference: -0.78 to -0.14)"
    ]
    assert list(falls(AFTER, BEFORE)) == []


def test_scores_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    file.write_text(json.dumps({"format": "sft eval 1", "long": AFTER.to_json()}))
    assert read_scores("--before", file) == AFTER


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sets": {}}', '{"long": {"format": "sft long 2"}}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "scores.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"--before {file} has no long-context scores.  Give a file that `sft eval"):
        read_scores("--before", file)
    with pytest.raises(ConfigError, match="gone.json cannot be read"):
        read_scores("--before", tmp_path / "gone.json")


def test_the_picture(tmp_path: Path) -> None:
    assert shares(AFTER, NEEDLE).tolist() == [[1, 0], [1, 1 / 3], [1, 1 / 3]]
    assert np.isnan(shares(AFTER, CODE)[:, 1]).all()
    for ending in ("png", "svg"):
        draw(AFTER, tmp_path / f"a.{ending}")
    svg = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {text} -->" in svg for text in ("needle", "code", "512", "1K", "0.33", "depth of the evidence"))
    draw(replace(AFTER, questions=AFTER.questions[:1]), tmp_path / "one.png")  # a task at one length
