"""A run asks long-context questions before its first step and at its end, and trains as a run that asks none."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sft.cli import main
from sft.run import evaluation
from tests.builders import chats
from tests.launching import RECIPE, records
from tests.ranks.commands import Result, scored, sft
from tests.ranks.layouts import PP, SHARDED, SP
from tests.ranks.pool import RankPool, Ranks

RUN = ["optim.schedule=constant", "train.global_batch_size=2"]
ASKED = [
    *("data.long.tasks=[needle, counting]", "data.long.lengths=[1, 2]", "data.long.depths=2"),
    "data.long.questions=1",
]
IN_RUN = [*ASKED, "data.long.in_run=true"]
ONE = "parallel.cp=1"
STEPS = 2  # of RECIPE


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with prepared data and questions of 256 and 512 tokens."""
    folder = tmp_path_factory.mktemp("in_run")
    chats(folder, 20)
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.format(folder=folder).replace("seq_length: 256", f"seq_length: 256, cache_dir: {folder}/c"))
    assert main(["data", "prepare", str(file), *IN_RUN]) == 0
    return file


def trained(
    pool: RankPool, recipe: Path, name: str, *overrides: str, stops_at: tuple[int, int] | None = None
) -> tuple[Path, Result]:
    """The folder of a run and the result of `sft train`.

    stops_at: the step and the number of the suite before which rank 0 gets SIGTERM
    """
    folder = recipe.parent / name
    words = [f"run.dir={folder}/run", *RUN, *overrides]
    return folder, sft(pool, "train", str(recipe), *words, within=Stopping(stops_at))


class Stopping:
    """Makes a context in which rank 0 sends itself SIGTERM before it scores a suite; None: in which nothing happens."""

    def __init__(self, at: tuple[int, int] | None) -> None:
        self.at = at

    @contextmanager
    def __call__(self) -> Iterator[None]:
        suites = list[int]()
        ask, score = evaluation.Evaluator._ask, evaluation.score_suite

        def asked(evaluator: Any, step: int) -> Any:
            suites[:] = [step]
            return ask(evaluator, step)

        def scores(engine: Any, suite: Any, *arguments: Any) -> Any:
            if (suites[0], len(suites)) == self.at and os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGTERM)
            suites.append(suite.length)
            return score(engine, suite, *arguments)

        with (
            mock.patch.object(evaluation.Evaluator, "_ask", asked),
            mock.patch.object(evaluation, "score_suite", scores),
        ):
            yield


def answers(folder: Path) -> list[dict[str, Any]]:
    return [untimed_answers(record) for record in records(folder, "long")]


def untimed_answers(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "long-time-s"}


@pytest.fixture(scope="module")
def whole(ranks: Ranks, recipe: Path) -> Path:
    """The folder of a run that nothing interrupted."""
    folder, result = trained(ranks(2), recipe, "whole", *IN_RUN)
    assert result.code == 0, result.err
    assert f"long-context questions after step {STEPS}" in result.out and "needle" in result.out
    return folder


def test_scores_are_those_of_sft_eval_bit_for_bit(ranks: Ranks, recipe: Path, whole: Path) -> None:
    found = answers(whole)
    assert [(record["step"], record["length"]) for record in found] == [(0, 256), (0, 512), (STEPS, 256), (STEPS, 512)]
    for step, run in ((0, "untrained"), (STEPS, "whole")):
        words = [f"run.dir={recipe.parent}/{run}/run", *RUN, *ASKED, "--long"]
        questions = scored(ranks(2), recipe, *words)["long"]["questions"]
        for record in found:
            if record["step"] == step:
                for task, of_task in record["answers by task"].items():
                    of_bin = [q for q in questions if (q["task"], q["length"]) == (task, record["length"])]
                    assert of_task["each"] == "".join("01"[q["right"]] for q in of_bin) and len(of_bin) == 2
                    assert of_task["loss"] == sum(q["loss"] for q in of_bin) / 2
                    assert of_task["right"] == sum(q["right"] for q in of_bin) / 2
    assert found[0]["answers by task"] != found[2]["answers by task"]


def test_the_training_is_that_of_a_run_without_questions(ranks: Ranks, recipe: Path, whole: Path) -> None:
    folder, result = trained(ranks(2), recipe, "without", "data.long.in_run=auto")
    assert result.code == 0 and records(folder, "train") == records(whole, "train") and not records(folder, "long")
    assert "questions" not in result.out.split("world_size")[1]  # on a CPU, auto asks none; `sft check` says so


@pytest.mark.parametrize("stops_at", [(0, 2), (STEPS, 1)], ids=["before the first step", "at the end"])
def test_a_stop_between_two_suites_repeats_the_questions_of_this_step_only(
    ranks: Ranks, recipe: Path, whole: Path, stops_at: tuple[int, int]
) -> None:
    name = f"stopped-{stops_at[0]}"
    folder, result = trained(ranks(2), recipe, name, *IN_RUN, stops_at=stops_at)
    assert result.code == 75 and {record["step"] for record in answers(folder)} == ({0} if stops_at[0] else set())
    folder, result = trained(ranks(2), recipe, name, *IN_RUN)
    assert result.code == 0 and f"after step {STEPS}" in result.out
    assert answers(folder) == answers(whole) and records(folder, "train") == records(whole, "train")
    again = trained(ranks(2), recipe, name, *IN_RUN)[1]
    assert again.code == 0 and "nothing to do" in again.out and answers(folder) == answers(whole)


LAYOUTS = {
    "pp 2": [ONE, *PP],
    "tp 2": [ONE, *SP],
    "dp 2 with sharded weights": [ONE, *SHARDED, "parallel.shard=weights"],
    "dynamic cp 2": ["parallel.dynamic_cp=true"],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_other_layouts_differ_by_rounding(ranks: Ranks, recipe: Path, whole: Path, layout: list[str]) -> None:
    folder, result = trained(ranks(2), recipe, f"layout-{len(layout)}{layout[-1]}", *IN_RUN, *layout)
    assert result.code == 0, result.err
    for ours, theirs in zip(answers(folder), answers(whole), strict=True):
        for task, of_task in theirs.pop("answers by task").items():
            # fp32 sums in another order, also in the two steps of training
            assert ours["answers by task"][task].pop("loss") == pytest.approx(of_task.pop("loss"), rel=1e-5)
            assert ours["answers by task"][task] == of_task
        assert ours.items() >= theirs.items()


def test_questions_that_are_missing_from_the_cache(ranks: Ranks, recipe: Path) -> None:
    _, result = trained(ranks(2), recipe, "missing", *IN_RUN, "data.long.seed=8")
    assert result.code == 2 and result.err.count("\n") == 1
    assert "DataError: the questions of 256, 512 tokens are not in data.cache_dir" in result.err
    assert "data.long.seed=8" in result.err and "first." in result.err


def test_export_and_comparison_name_what_fell(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With answers of 9 questions, of which all were right before, and 1 after."""
    run = tmp_path / "run"
    run.mkdir()
    lines = [json.loads(line) for line in (whole / "run/metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "long" and line["length"] == 512:
            entry = line["answers by task"]["needle"]
            entry["each"], entry["right"] = ("000000001", 1 / 9) if line["step"] else ("111111111", 1.0)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["compare", str(whole / "run"), str(run)]) == 0
    out = capsys.readouterr().out
    fell = "needle at 512 tokens fell from 1.00 to 0.11 of 9 answers (95% interval of the difference: -0.89 to -0.23)"
    assert f"WARNING: B, below its start: {fell}" in out and "WARNING: A" not in out
    assert main(["compare", "--exact", str(whole / "run"), str(run)]) == 1
    assert "long 512  answers by task/needle/right" in capsys.readouterr().out
