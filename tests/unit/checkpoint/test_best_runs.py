"""Runs whose best checkpoint, length, origin or folder changes; all expected values are literals."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft.checkpoint.saver import Saver
from tests.unit.fixtures.runs import End, Runs, runs

LOSS, ACCURACY = "checkpoint.keep_best=eval/lm loss", "checkpoint.keep_best=eval/token accuracy"
BEST = "checkpoint.export_hf=best"
# Losses of the held-out set e fall until step 8; losses of f have their minimum at step 2; accuracies at step 8.
E = [(5.5, 0.75), (5.5, 0.0), (5.25, 0.5), (5.25, 0.0), (5.0, 0.5), (5.0, 0.0), (4.75, 0.25), (4.75, 0.0), (4.5, 0.125)]
F = [(7.0, 0.0), (7.0, 0.0), (1.0, 0.0), (1.0, 0.0), (3.0, 0.0), (3.0, 0.0), (2.0, 0.0), (2.0, 0.0), (2.5, 0.0)]
VALUES = {"e": E + [(9.0, 0.25), (9.0, 0.25), (9.0, 0.0), (9.0, 0.125)], "f": F + [(9.0, 0.0)] * 4}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with runs(tmp_path_factory.mktemp("data")) as started:
        yield started


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*_*") if path.is_dir())


def held_out(run: Path) -> list[tuple[int, float]]:
    """The step and loss of each held-out record in metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["lm loss"]) for record in records if record["kind"] == "eval"]


def test_memory_for_copies_is_prepared_after_each_step(
    engines: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(Saver, "prepare", lambda self, engine, step, num_steps: steps.append(step))
    engines.start(tmp_path, VALUES, End("stop", "train", 3))
    engines.start(tmp_path, VALUES, End("stop", "train", 6))
    assert steps == [1, 2, 3, 4, 5, 6]


def test_another_metric_starts_judging_anew(engines: Runs, tmp_path: Path) -> None:
    """No accuracy exceeds 4.5, the best loss so far, so accuracies must not be compared with it."""
    engines.start(tmp_path, VALUES, End(), LOSS)
    outcome, said = engines.start(tmp_path, VALUES, End(), ACCURACY, BEST, "train.num_steps=12")
    assert outcome is not None and outcome.is_done
    assert "checkpoint.keep_best was eval/lm loss, is eval/token accuracy, so judging starts anew.  The best" in said
    assert [line for line in said.splitlines() if line.startswith("best so far")] == [
        "best so far: step 8, eval/token accuracy 0.125",
        "best so far: step 10, eval/token accuracy 0.25",
    ]
    assert names(tmp_path / "a/checkpoints") == ["iter_0000010", "iter_0000012"]
    assert names(tmp_path / "a/hf_exports") == ["best_0000010"]


def test_another_held_out_file_starts_judging_anew(engines: Runs, tmp_path: Path) -> None:
    """Losses of f are below 4.5 from the beginning; the best of those after step 8 is at step 8."""
    engines.start(tmp_path, VALUES, End(), LOSS)
    other = f"data.eval={engines.data}/f.jsonl"
    _, said = engines.start(tmp_path, VALUES, End(), LOSS, BEST, other, "train.num_steps=12")
    assert "the held-out set of eval/lm loss has changed (3 documents, now 3), so judging starts anew." in said
    assert said.count("best so far") == 1 and "best so far: step 8, eval/lm loss 2.5" in said
    assert names(tmp_path / "a/checkpoints") == ["iter_0000008", "iter_0000010", "iter_0000012"]


def test_the_pass_that_a_signal_interrupts_is_judged_by_the_next_start(engines: Runs, tmp_path: Path) -> None:
    stopped, _ = engines.start(tmp_path, VALUES, End("stop", "pass", 8), LOSS, BEST)
    assert stopped is not None and not stopped.is_done
    assert names(tmp_path / "a/hf_exports") == ["best_0000006"]
    outcome, said = engines.start(tmp_path, VALUES, End(), LOSS, BEST)
    assert outcome is not None and outcome.is_done and "best so far: step 8, eval/lm loss 4.5" in said
    assert names(tmp_path / "a/hf_exports") == ["best_0000008"]
    _, said = engines.start(tmp_path, VALUES, End(), LOSS, BEST)
    assert "nothing to do: " in said
    assert held_out(tmp_path / "a") == [(0, 5.5), (2, 5.25), (4, 5.0), (6, 4.75), (8, 4.5)]


def test_a_run_that_is_shortened_ends(engines: Runs, tmp_path: Path) -> None:
    engines.start(tmp_path, VALUES, End("stop", "train", 5), LOSS, BEST, "train.num_steps=12")
    outcome, said = engines.start(tmp_path, VALUES, End(), LOSS, BEST, "train.num_steps=4")
    assert outcome is not None and outcome.is_done and outcome.step == 5
    assert "the run has 4 steps, and has done 5: it ends after these" in said
    assert held_out(tmp_path / "a") == [(0, 5.5), (2, 5.25), (4, 5.0), (5, 5.0)]
    assert names(tmp_path / "a/hf_exports") == ["best_0000004"]


def test_a_branch_has_a_best_checkpoint_of_its_own(engines: Runs, tmp_path: Path) -> None:
    """The best loss of run a is 5.0, below the losses of run b, which rise to 29.25 and fall to 10.5."""
    engines.start(tmp_path, VALUES, End(), LOSS, "train.num_steps=4")
    values = {"e": [(29.25, 0.0)] * 7 + [(15.0, 0.0)] * 3 + [(10.5, 0.0)] * 3}
    resume = f"checkpoint.resume={tmp_path}/a/checkpoints/iter_0000004"
    overrides = [LOSS, BEST, f"run.dir={tmp_path}/b", "train.num_steps=10", resume]
    outcome, said = engines.start(tmp_path, values, End(), *overrides)
    assert outcome is not None and outcome.is_done
    assert "from a checkpoint of another folder, so judging starts anew.  The best checkpoint so far was step 4" in said
    assert "best so far: step 10, eval/lm loss 10.5" in said
    assert names(tmp_path / "b/hf_exports") == ["best_0000010"]
    assert names(tmp_path / "a/checkpoints") == ["iter_0000002", "iter_0000004"]


def test_a_folder_that_moves_keeps_its_steps(engines: Runs, tmp_path: Path) -> None:
    before, after = tmp_path / "p", tmp_path / "q"
    before.mkdir()
    engines.start(before, VALUES, End(), "train.num_steps=4")

    def start(root: Path, steps: int) -> str:
        resume = f"checkpoint.resume={root}/a/checkpoints/iter_0000002"
        return engines.start(root, VALUES, End(), f"run.dir={root}/b", resume, f"train.num_steps={steps}")[1]

    assert f"resumed step 2 from {before}/a/checkpoints/iter_0000002" in start(before, 8)
    before.rename(after)
    assert f"resumed step 8 from {after}/b/checkpoints/iter_0000008" in start(after, 10)
    assert names(after / "b/checkpoints") == ["iter_0000008", "iter_0000010"]
