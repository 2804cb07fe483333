"""`sft compare --exact`: what counts as a difference, and its messages if it cannot compare."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.cli import main

START = {"schema": 1, "kind": "start", "step": 0, "time": 1795267288.03}


def train(step: int, loss: float | None = 2.5, **more: object) -> dict:
    return {"kind": "train", "step": step, "lm loss": loss, "documents": 9, "step-time-s": 0.5 + step} | more


def held_out(step: int, loss: float | None = 2.25, **more: object) -> dict:
    return {"kind": "eval", "step": step, "lm loss": loss} | more


def write(folder: Path, *records: dict, tail: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return folder


Compare = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Compares two runs in the folders a and b.  Returns the exit code and the lines, with one blank between
    columns."""

    def run(a: list[dict], b: list[dict], *flags: str) -> tuple[int, list[str]]:
        folders = [write(tmp_path / name, START, *records) for name, records in (("a", a), ("b", b))]
        code = main(["compare", "--exact", *map(str, folders), *flags])
        output = capsys.readouterr()
        assert output.err == ""
        return code, [" ".join(line.split()) for line in output.out.splitlines()]

    return run


def test_equal_runs(tmp_path: Path, compare: Compare) -> None:
    records = [held_out(0), train(1), train(2, None), held_out(2)]
    timed = [record | {"step-time-s": 9.0} if record["kind"] == "train" else record for record in records]
    code, lines = compare(records, timed)
    assert code == 0
    assert lines == [
        f"A: {tmp_path}/a: train 1-2; eval 0, 2",
        f"B: {tmp_path}/b: train 1-2; eval 0, 2",
        "compared: train 1-2; eval 0, 2",
        "",
        "kind metric differs first at step A B largest relative",
        "train lm loss 0 of 2 - - - 0 0",
        "train documents 0 of 2 - - - 0 0",
        "eval lm loss 0 of 2 - - - 0 0",
        "",
        "not compared without --all: step-time-s",
        "0 of 3 metrics differ (rtol 1e-06, atol 0)",
    ]


def test_the_first_difference_and_the_largest(compare: Compare) -> None:
    a = [train(1, 2.0), train(2, 2.0), train(3, 2.0), train(4, 4.0), held_out(4)]
    b = [train(1, 2.0), train(2, 2.000001), train(3, 2.5), train(4, 4.125), held_out(4)]
    code, lines = compare(a, b)  # 2 and 2.000001 differ by at most 1e-6 of the larger number
    assert code == 1
    assert "train lm loss 2 of 4 3 2.0 2.5 0.5 0.2" in lines
    assert "eval lm loss 0 of 1 - - - 0 0" in lines
    assert lines[-1] == "1 of 3 metrics differ (rtol 1e-06, atol 0)"


@pytest.mark.parametrize(
    "flags, code", [(("--rtol", "0.1"), 1), (("--rtol", "0.2"), 0), (("--atol", "0.4"), 1), (("--atol", "0.5"), 0)]
)
def test_tolerances(compare: Compare, flags: tuple[str, ...], code: int) -> None:
    assert compare([train(1, 2.0)], [train(1, 2.5)], *flags)[0] == code


@pytest.mark.parametrize(
    "a, b, row",
    [
        (7, 8, "1 of 1 1 7 8 1 0.125"),  # counts have no tolerance
        (7, 7.0, "0 of 1 - - - 0 0"),
        (False, True, "1 of 1 1 false true 1 1"),
        (None, 0.0, "1 of 1 1 null 0.0 - -"),
        (math.inf, math.inf, "0 of 1 - - - - -"),
        (math.inf, 1.0, "1 of 1 1 Infinity 1.0 inf 1"),
        (0.0, -0.0, "0 of 1 - - - 0 0"),
    ],
)
def test_values(compare: Compare, a: float | None, b: float | None, row: str) -> None:
    code, lines = compare([train(1, x=a)], [train(1, x=b)], "--rtol", "0.5", "--atol", "2")
    assert f"train x {row}" in lines
    assert code == (not row.startswith("0"))


def test_nested_values_are_compared_text_and_lists_are_not(compare: Compare) -> None:
    a = train(
        1, note="a", parts=[1], **{"loss by position": {"0-4K": {"loss": 2.0, "tokens": 100}, "4-8K": {"loss": None}}}
    )
    b = train(
        1, note="b", parts=[2], **{"loss by position": {"0-4K": {"loss": 2.0, "tokens": 101}, "4-8K": {"loss": None}}}
    )
    code, lines = compare([a], [b])
    assert code == 1
    assert "train loss by position/0-4K/loss 0 of 1 - - - 0 0" in lines
    assert "train loss by position/0-4K/tokens 1 of 1 1 100 101 1 0.0099" in lines
    assert "train loss by position/4-8K/loss 0 of 1 - - - - -" in lines
    assert not any("note" in line or "parts" in line for line in lines)


def test_what_depends_on_the_clock_is_compared_with_all(tmp_path: Path, compare: Compare) -> None:
    names = ["tokens-per-second", "TFLOPs", "mfu", "peak-memory-gib", "data-wait", "eval-time-s"]
    a, b = train(1, **dict.fromkeys(names, 1.0)), train(1, **dict.fromkeys(names, 2.0))
    code, lines = compare([a], [b])
    assert code == 0
    assert "not compared without --all: step-time-s, " + ", ".join(names) in lines
    assert main(["compare", "--exact", f"{tmp_path}/a", f"{tmp_path}/b", "--all"]) == 1


def test_a_metric_of_one_run_only(tmp_path: Path, compare: Compare) -> None:
    a, b = [train(1), train(2, entropy=1.0)], [train(1, nll=2.0), train(2)]
    code, lines = compare(a, b)
    assert code == 1
    assert lines[3:5] == ["only A has train metric entropy", "only B has train metric nll"]
    assert lines[-1] == "0 of 2 metrics differ (rtol 1e-06, atol 0); 2 records or metrics in one run only"
    assert main(["compare", "--exact", f"{tmp_path}/a", f"{tmp_path}/b", "--ignore-missing"]) == 0


def test_a_shorter_run_is_compared_as_far_as_it_goes(compare: Compare) -> None:
    """B ended after step 2, before its evaluation, and so has no metric of step 3."""
    a = [held_out(0), train(1), train(2), held_out(2), train(3, x=1), train(4)]
    code, lines = compare(a, [held_out(0), train(1), train(2)])
    assert code == 0
    assert lines[2:5] == [
        "compared: train 1-2; eval 0",
        "only A has train 3-4, outside the steps of the other run",
        "only A has eval 2, outside the steps of the other run",
    ]


def test_held_out_sets_are_compared_apart(tmp_path: Path, compare: Compare) -> None:
    """In the schema 2 of A, a single set has no name; B also has a second set."""
    a = [held_out(0, 3.0), train(1), train(2), held_out(2, 2.0)]
    b = [held_out(0, 3.0, set="eval"), held_out(0, 9.0, set="code"), train(1), train(2), held_out(2, 2.5, set="eval")]
    code, lines = compare(a, b)
    assert code == 1
    assert lines[:4] == [
        f"A: {tmp_path}/a: train 1-2; eval 0, 2",
        f"B: {tmp_path}/b: train 1-2; eval 0, 2; eval code 0",
        "compared: train 1-2; eval 0, 2",
        "only B has eval code 0",
    ]
    assert "eval lm loss 1 of 2 2 2.0 2.5 0.5 0.2" in lines


def test_a_held_out_set_after_the_end_of_the_other_run(compare: Compare) -> None:
    records = [held_out(0), held_out(0, set="code"), train(1), held_out(1)]
    _, lines = compare([*records, held_out(1, set="code")], records)
    assert "only A has eval code 1, outside the steps of the other run" in lines


def test_a_step_missing_where_both_were(tmp_path: Path, compare: Compare) -> None:
    """B lacks training step 2; and evaluations, although it passed step 0 and step 2."""
    a = [held_out(0), train(1), train(2), held_out(2), train(3)]
    code, lines = compare(a, [train(1), train(3)])
    assert code == 1
    assert lines[2:5] == ["compared: train 1, 3", "only A has train 2", "only A has eval 0, 2"]
    assert lines[-1].endswith("; 3 records or metrics in one run only")
    assert main(["compare", "--exact", f"{tmp_path}/a", f"{tmp_path}/b", "--ignore-missing"]) == 0


def test_a_run_that_began_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B continues from step 2: it has the evaluation of step 2, but not the training record."""
    a = write(tmp_path / "a", START, train(1), train(2), held_out(2), train(3))
    b = write(tmp_path / "b", START | {"step": 2}, train(3))
    assert main(["compare", "--exact", str(a), str(b)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "only A has train 1-2, outside the steps of the other run" in lines and "only A has eval 2" in lines


def test_the_last_record_of_a_step_counts(compare: Compare) -> None:
    a = [train(1, 5.0), train(2, 4.0), START | {"step": 1}, train(2, 4.5)]
    assert compare(a, [train(1, 5.0), train(2, 4.5)])[0] == 0


@pytest.mark.parametrize("tail", ['{"kind": "tra', '{"kind": "train", "step": 2, "lm loss": 2.5', "7"])
def test_a_half_written_last_line_is_left_out(tmp_path: Path, tail: str) -> None:
    a, b = write(tmp_path / "a", START, train(1), tail=tail), write(tmp_path / "b", START, train(1))
    assert main(["compare", "--exact", str(a), str(b)]) == 0
    assert main(["compare", "--exact", str(a / "metrics.jsonl"), str(b / "metrics.jsonl")]) == 0


GOOD = json.dumps(START) + "\n" + json.dumps(train(1)) + "\n"


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "metrics.jsonl does not exist. Give the folder of a run"),
        (b"", "has no step and no evaluation"),
        (b'{"schema": 11, "kind": "start", "step": 0}\n', "has schema 11; this version reads 1 to 10"),
        (GOOD.encode() + b'{"schema": 11, "kind": "start", "step": 1}\n', "has schema 11; this version reads 1 to 10"),
        (GOOD.encode() + b"nonsense\n", "metrics.jsonl:3 is not JSON (Expecting value)"),
        (b"\xff\xfe\x00\n" + GOOD.encode(), "metrics.jsonl:1 is not JSON (not UTF-8)"),
        (b'{"schema": 1, "kind": "start", "step": "0"}\n', "metrics.jsonl:1 is not a record"),
        (GOOD.replace('"step": 1', '"step": 8').encode(), "have no step in common: A has train 1, B has train 8."),
    ],
)
def test_runs_that_cannot_be_compared_get_one_paragraph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes | None, message: str
) -> None:
    good, bad = write(tmp_path / "good", START, train(1)), tmp_path / "bad"
    bad.mkdir()
    if text is not None:
        (bad / "metrics.jsonl").write_bytes(text)
    assert main(["compare", "--exact", str(good), str(bad)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("RunError: ") and message in output.err and output.err.count("\n") == 1


@pytest.mark.parametrize("value", ["-1", "nan", "much"])
def test_a_tolerance_that_is_none(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert main(["compare", "--exact", "a", "b", f"--rtol={value}"]) == 2
    assert f"--rtol: must be a number of at least 0, got '{value}'" in capsys.readouterr().err
