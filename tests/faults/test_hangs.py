"""H: a rank that stands still is named, with what it was doing, and the run ends in bounded time."""

import signal
from collections.abc import Callable

import pytest

from tests.faults.ends import End, assert_same_end
from tests.faults.runs import Case, Start

STEP = "sft.mcore.engine:Engine.train_step"
SHORT = ["run.step_timeout_s=3"]
LONG = {"do": "sleep", "s": 300}


def stacks(one: Case, rank: int) -> str:
    path = one.run / "stacks" / f"rank_{rank:05d}.txt"
    return path.read_text() if path.exists() else ""


def assert_named(one: Case, start: Start, phases: dict[int, str], frame: str) -> None:
    """Both left by themselves; stacks of both are in files and on stderr."""
    assert start.wait(45) == [1, 1], start.told()
    for rank, phase in phases.items():
        assert f"rank {rank}: no end of '{phase}" in stacks(one, rank), (rank, stacks(one, rank), start.told())
        assert f"rank {rank}: no end of '{phase}" in start.err(rank)
        assert "Current thread" in stacks(one, rank)
    assert any(frame in stacks(one, rank) for rank in phases), frame
    state = one.status()
    assert state["status"] == "failed-retryable" and "TrainingHangs" in state["reason"], state


@pytest.mark.row("H1", "H2")
@pytest.mark.parametrize(
    "fault,phases,frame",
    [
        (
            {"at": "sft.data.loader:Loader.microbatches", "step": 4, "rank": 1, **LONG},
            {0: "step 4: forward", 1: "step 4: data"},
            "inject.py",
        ),
        pytest.param(
            {"at": "sft.mcore.engine:finalize_model_grads", "step": 4, "rank": 0, **LONG},
            {0: "step 4: forward", 1: "step 4: forward"},
            "inject.py",
            marks=pytest.mark.quick,
        ),
        (
            {"at": "sft.checkpoint.saver:engine_state.write", "step": 4, "rank": 1, **LONG},
            {0: "saving step 4", 1: "saving step 4"},
            "inject.py",
        ),
        (
            {"at": "sft.run.evaluation:evaluate", "step": 4, "rank": 0, "call": 1, **LONG},
            {1: "held-out eval after step 4"},
            "evaluate",
        ),
        (
            {"at": "sft.mcore.engine:finalize_model_grads", "step": 4, "rank": 1, "do": "skip"},
            {0: "step 4: forward", 1: "step 4: forward"},
            "all_reduce",
        ),
    ],
    ids=["data", "collective", "save", "evaluation", "left-out"],
)
def test_a_hang_is_named(
    case: Callable[..., Case],
    reference: End,
    hit: Callable[..., None],
    fault: dict,
    phases: dict[int, str],
    frame: str,
) -> None:
    one = case("run")
    start = one.start(fault, more=SHORT)
    start.until(lambda: bool(start.fired()))
    if fault["do"] == "skip":  # collectives that do not match may also end by an error, at once
        codes = start.wait(45)
        assert 0 not in codes and one.status()["status"] == "failed-retryable", start.told()
        hit("H2")
    else:
        assert_named(one, start, phases, frame)
        hit("H1")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("H1")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_stopped(case: Callable[..., Case], reference: End, hit: Callable[..., None], rank: int) -> None:
    """SIGSTOP: it says nothing itself; the other one does, and leaves.  The launcher's kill ends the stopped one."""
    one = case("run")
    start = one.start({"at": STEP, "step": 4, "rank": rank, "do": "stop"}, more=SHORT)
    other = 1 - rank
    start.until(lambda: start.codes()[other] is not None, 45)
    assert start.codes()[other] == 1, start.told()
    assert f"rank {other}: no end of 'step 4: forward" in stacks(one, other), start.told()
    assert one.status()["status"] == "failed-retryable", one.status()
    start.signal(signal.SIGKILL, rank)
    start.wait(10)
    hit("H1")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("H1", "L10")
def test_a_stopped_run_that_wakes_up_does_no_harm(
    case: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    """Its place was taken: it neither saves nor writes over what the other run wrote."""
    one, other = case("run"), case("other")
    other.overrides[0] = one.overrides[0]
    start = one.start(
        {"at": "sft.run.lifecycle:Lifecycle.after_step", "step": 4, "do": "stop"}, more=["run.step_timeout_s=null"]
    )
    start.until(lambda: len(start.fired()) == 2)
    (one.run / "run.lock").unlink()  # as its refusal says, where no such run is known to exist
    second = other.start()
    assert second.wait() == [0, 0], second.told()
    before = {path: path.stat().st_mtime_ns for path in one.checkpoints.rglob("*")}
    metrics = (one.run / "metrics.jsonl").read_bytes()
    start.signal(signal.SIGCONT)
    codes = start.wait(60)
    assert 0 not in codes, start.told()
    assert {path: path.stat().st_mtime_ns for path in one.checkpoints.rglob("*")} == before
    assert (one.run / "metrics.jsonl").read_bytes() == metrics, "it wrote its steps among those of the other run"
    hit("L10")
    assert_same_end(one, reference)


@pytest.mark.row("H1")
def test_torchrun_ends_a_run_in_which_one_rank_sleeps(
    case: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    one = case("run")
    start = one.torchrun({"at": STEP, "step": 4, "rank": 1, **LONG}, more=SHORT)
    assert start.wait(100) == [1], start.told()
    assert not start.alive()
    assert "no end of 'step 4: forward" in stacks(one, 0) + stacks(one, 1)
    hit("H1")
    one.finish()
    assert_same_end(one, reference)
