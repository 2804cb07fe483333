"""The record of a long-context evaluation: JSON, tables, comparison and picture."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sft.errors import ConfigError
from sft.metrics.log import MetricsLog
from sft.metrics.long import BinAnswers, LongScores, QuestionScore, falls, read_scores, scores_of, table
from sft.metrics.long_records import answers_of_run
from sft.metrics.records import long_record
from sft.metrics.results.long_plot import draw, shares
from sft.metrics.writers import JsonLines, scalars
from tests.unit.fixtures.logs import console
from tests.unit.metric_values import START, config, run_of


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
FACTS = run_of(config())
BEFORE = scores({(NEEDLE, 512): "+" * 9, (CODE, 512): "+-+" * 3, (NEEDLE, 1024): "+" * 9})
AFTER = scores({(NEEDLE, 512): "+" * 9, (CODE, 512): "++-" * 3, (NEEDLE, 1024): "-" * 7 + "++"})


def test_the_score_of_an_answer() -> None:
    fact = dict(task=CODE, length=64, depth=0.5, number=0, token_depth=0.4, prompt=50)
    first, second = scores_of("d", [{**fact, "tokens": 4}, {**fact, "tokens": 5}], [2.0, 1.0], [1, 0]).questions
    assert (first.right, first.loss, second.right, second.loss) == (False, 0.5, True, 0.2)


def test_tables() -> None:
    assert table(AFTER.answers) == [
        "right answers   512  1,024",
        "needle         1.00   0.22",
        "code           0.67      -",
        "",
        "nats per token   512  1,024",
        "needle          0.50   1.67",
        "code            1.00      -",
    ]


def test_a_table_of_differences() -> None:
    assert table(AFTER.answers, BEFORE.answers)[:4] == [
        "right answers          512        1,024",
        "needle         1.00 +0.00   0.22 -0.78*",
        "code           0.67 +0.00             -",
        "* the 95% interval of the difference does not contain 0 (exact, paired questions)",
    ]


def test_warnings_name_what_fell() -> None:
    # 7 answers of 9 are lost, none is gained: 7/9 * (2 * 0.40962 - 1) = -0.14
    assert list(falls(BEFORE.answers, AFTER.answers)) == [
        "needle at 1,024 tokens fell from 1.00 to 0.22 of 9 answers (95% interval of the difference: -0.78 to -0.14)"
    ]
    assert list(falls(AFTER.answers, BEFORE.answers)) == []


def of_length(scores: LongScores, length: int, digest: str) -> LongScores:
    return LongScores(digest=digest, questions=tuple(scores.of(length=length)))


def test_the_answers_of_a_run_are_compared_with_those_before_the_first_step_to_the_same_questions() -> None:
    """The run asked other questions of 512 tokens at its end, and none of 2,048 tokens at its start."""
    last = {512: ("c", AFTER), 1024: ("b", AFTER), 2048: ("d", scores({(NEEDLE, 2048): "+++"}))}
    records = [
        long_record(0, of_length(BEFORE, n, digest), FACTS, seconds=1.0) for n, digest in ((512, "a"), (1024, "b"))
    ]
    records += [{"kind": "train", "step": 7}]
    records += [long_record(7, of_length(of, n, digest), FACTS, seconds=1.0) for n, (digest, of) in last.items()]
    found = answers_of_run(records)
    assert found is not None and found.step == 7 and found == answers_of_run(records, 7)
    assert found.after == {**AFTER.answers, (NEEDLE, 2048): BinAnswers(right=(True,) * 3, loss=0.5)}
    assert list(found.before) == [(NEEDLE, 1024)] and found.falls == list(falls(BEFORE.answers, AFTER.answers))
    start = answers_of_run(records, 0)
    assert start is not None and (start.before, start.after) == ({}, BEFORE.answers)
    assert answers_of_run(records, 3) is None and answers_of_run([]) is None


@pytest.mark.parametrize("damage", [{"right": 1}, {"each": "", "loss": 1.0}, {"each": "1", "loss": None}])
def test_a_damaged_record_of_answers(damage: dict[str, object]) -> None:
    record = {"kind": "long", "step": 3, "length": 512, "digest": "a", "answers by task": {NEEDLE: damage}}
    with pytest.raises((LookupError, ValueError)):
        answers_of_run([record])


def test_the_log_names_what_fell_below_the_start_of_the_run(tmp_path: Path) -> None:
    """An earlier start has written the answers at step 0."""
    before, after = (of_length(of, 1024, "same") for of in (BEFORE, AFTER))
    file = tmp_path / "metrics.jsonl"
    earlier = long_record(0, before, FACTS, seconds=1.0)
    file.write_text(f"{json.dumps(START)}\n{json.dumps(earlier)}\n")

    def logged() -> str:
        said, stream = console()
        log = MetricsLog(tmp_path, [JsonLines(file, 6, is_evaluated=True)], said, FACTS, step=6, num_steps=7)
        log.questions(7, [(after, 2.5)])
        return stream.getvalue()

    text = logged()
    assert "long-context questions after step 7, 2.5 s\n" in text and "needle         0.22 -0.78*" in text, text
    assert f"WARNING: below the start of the run: {list(falls(before.answers, after.answers))[0]}\n" in text
    written = json.loads(file.read_text().splitlines()[-1])
    assert (written["kind"], written["step"], written["answers by task"][NEEDLE]["each"]) == ("long", 7, "000000011")
    assert logged() == text  # a start after step 6 removes and repeats the answers after step 7
    JsonLines(file, 0, is_evaluated=False).close()  # the evaluation before the first step did not end
    assert file.read_text().splitlines() == [json.dumps(START)]
    file.write_text(f"{json.dumps(START)}\n{json.dumps(earlier | {'length': []})}\n")
    assert "WARNING: the answers are not compared with those at the start of the run: " in logged()


def test_numbers_of_answers_in_tensorboard() -> None:
    drawn = scalars(long_record(7, of_length(AFTER, 512, "a"), FACTS, seconds=2.0))
    assert {name for name in drawn if "code" in name} == {f"answers by task/code/{n}/512" for n in ("right", "loss")}
    assert drawn["answers by task/needle/right/512"] == 1 and "length/512" not in drawn


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
