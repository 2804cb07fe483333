"""The best checkpoint by a metric: checkpoints of older versions, records of evaluations, an origin that moves."""

import io
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sft.checkpoint import held_out_pass, manifest
from sft.checkpoint.best import Best
from sft.checkpoint.judge import Judge
from sft.checkpoint.manifest import Manifest
from sft.checkpoint.origin import RunOrigin
from sft.checkpoint.train_state import TrainState
from sft.config import CheckpointConfig, LossConfig
from sft.console import Console
from sft.errors import CheckpointError
from sft.parallel import messages

LOSS = Best(metric="eval/lm loss", lower_is_better=True, data="79bc", documents=3)


def checkpoint(path: Path, content: int = 0) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "metadata.json").touch()
    manifest.write(path, Manifest(files={}, facts={"content": content}))
    return path


def test_the_best_is_the_lowest_or_the_highest_and_of_equals_the_first() -> None:
    steps: dict[bool, list[int | None]] = {True: [], False: []}
    for lower in steps:
        best = replace(LOSS, lower_is_better=lower)
        for step, value in enumerate([3.0, 2.0, 2.0, 4.0, 1.0], start=1):
            best = best.judged(step, value)
            steps[lower].append(best.step)
    assert steps == {True: [1, 2, 2, 2, 5], False: [1, 1, 1, 4, 4]}
    assert best.value == 4.0


def test_what_makes_values_incomparable() -> None:
    assert list(LOSS.differences(LOSS.judged(4, 1.0))) == []
    accuracy = replace(LOSS, metric="eval/token accuracy", lower_is_better=False)
    assert list(LOSS.differences(accuracy)) == ["checkpoint.keep_best was eval/lm loss, is eval/token accuracy"]
    (line,) = LOSS.differences(replace(LOSS, data="0a", documents=2))
    assert line == "the held-out set of eval/lm loss has changed (3 documents, now 2)"
    each, once = (LossConfig(shared=shared).weighing for shared in ("each", "once"))
    assert list(replace(LOSS, loss=each).differences(replace(LOSS, loss=once))) == [
        "the weights of tokens were those of loss.reduction = token, loss.shared = each, and are those of "
        "loss.reduction = token, loss.shared = once"
    ]
    assert list(LOSS.differences(replace(LOSS, loss=once))) == []  # an earlier version did not record them


def test_the_state_of_a_checkpoint_also_of_an_earlier_version() -> None:
    origin = RunOrigin(path="/data/a/iter_0000002", written="a/iter_0000002", step=2, manifest="3f")
    state = TrainState(step=8, evaluated=8, best=LOSS.judged(6, 5.0), origin=origin)
    assert TrainState.read(asdict(state)) == state
    assert messages.decode(messages.encode(state)) == state  # rank 0 sends the state to the other ranks
    old = {"step": 8, "evaluated": 6, "best_step": 6, "best_value": 5.0, "origin": "/data/a/iter_0000002"}
    read = TrainState.read(old)
    assert (read.best_step, read.evaluated) == (6, 6) and read.best is not None and read.best.value == 5.0
    (line,) = read.best.differences(LOSS)
    assert line == "an earlier version recorded the best value without its metric and its held-out set"
    assert read.origin == RunOrigin(path="/data/a/iter_0000002", written=None, step=2, manifest=None)
    assert TrainState.read({"step": 1, "best_step": None, "best_value": None, "origin": None}) == TrainState(step=1)


def test_the_record_of_a_pass_holds_for_its_checkpoint_only(tmp_path: Path) -> None:
    path, saved = checkpoint(tmp_path / "iter_0000008"), TrainState(step=8, evaluated=6, best=LOSS.judged(6, 5.1))
    assert held_out_pass.added(path, saved) == saved
    judged = TrainState(step=8, evaluated=8, best=LOSS.judged(8, 4.9))
    held_out_pass.write(path, judged)
    assert held_out_pass.added(path, saved) == judged
    moved = path.rename(tmp_path / "moved")
    assert held_out_pass.added(moved, saved) == judged
    checkpoint(moved, content=1)  # a checkpoint of the same step from another history
    assert held_out_pass.added(moved, saved) == saved
    checkpoint(moved)
    for damaged in ("", "[]", "{}", '{"format": "sft held-out pass 1"}', "\x00"):
        (moved / held_out_pass.NAME).write_text(damaged)
        assert held_out_pass.added(moved, saved) == saved


def test_an_origin_is_recognised_by_its_digest(tmp_path: Path) -> None:
    first, other = checkpoint(tmp_path / "p/iter_0000002"), checkpoint(tmp_path / "p/iter_0000004", content=1)
    origin = RunOrigin.of(first, str(first), 2)
    assert origin.is_named_by(first, 8) and not origin.is_named_by(other, 8)
    assert origin.is_named_by(first.parent, 8)  # the folder contains it
    (tmp_path / "p").rename(tmp_path / "q")
    assert origin.is_named_by(tmp_path / "q/iter_0000002", 8) and origin.is_named_by(tmp_path / "q", 8)
    (tmp_path / "link").symlink_to(tmp_path / "q/iter_0000002")
    assert origin.is_named_by(tmp_path / "link", 8)
    assert origin.is_named_by(first, 8)  # the path in the recipe, where no checkpoint is left
    with pytest.raises(CheckpointError, match="that path does not exist in .*has saved step 8.*checkpoint.resume=auto"):
        origin.is_named_by(tmp_path / "r/iter_0000002", 8)
    checkpoint(first, content=2)
    with pytest.raises(CheckpointError, match="that path now holds another checkpoint"):
        origin.is_named_by(first, 8)
    assert not origin.is_named_by(checkpoint(tmp_path / "s/iter_0000002", content=3), 8)


def test_an_origin_without_a_digest_is_compared_by_path_and_step(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "p/iter_0000002")
    origin = RunOrigin.read(str(first))
    assert origin is not None and origin.is_named_by(first, 8)
    moved = (tmp_path / "p").rename(tmp_path / "q")
    assert not origin.is_named_by(checkpoint(moved / "iter_0000004"), 8)
    for doubtful in (moved / "iter_0000002", moved):
        with pytest.raises(CheckpointError, match="nothing shows whether that path is the same checkpoint"):
            origin.is_named_by(doubtful, 8)


def test_a_branch_compares_with_no_value_of_another_run(tmp_path: Path) -> None:
    config, said = CheckpointConfig(keep_last=2, keep_best="eval/lm loss"), io.StringIO()
    judge = Judge(config, {"eval": ("79bc", 3)}, lambda step: True, Console(0, said))
    checkpoint(tmp_path / "iter_0000004")  # this run's own checkpoint with the same step number
    state = TrainState(step=4, evaluated=4, best=LOSS.judged(4, 4.97))
    assert judge.resumed(state, is_ours=False, is_due=True) == replace(state, best=LOSS)
    assert "of another folder, so judging starts anew" in said.getvalue() and judge.best_step is None
