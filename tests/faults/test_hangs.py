"""Rows H of the fault matrix: if a rank hangs, the run names it and its activity, and ends in bounded time."""

import signal

import pytest

from tests.faults.runs import STEP, Case, Fault, MakeCase

SHORT = ["run.progress_timeout_s=3"]
LONG = {"step": 4, "do": "sleep", "s": 300}
DATA = {"at": "sft.data.loader:Loader.microbatches_of", "rank": 1, **LONG}
COLLECTIVE = {"at": "sft.mcore.engine:finalize_model_grads", "rank": 0, **LONG}
SAVE = {"at": "sft.checkpoint.saver:engine_state.write", "rank": 1, **LONG}
MICROBATCH = {"at": "sft.mcore.engine:lm_loss", "rank": 1, "call": 2, **LONG}
EVALUATION = {"at": "sft.run.evaluation:evaluate", "rank": 0, **LONG}


def stacks(one: Case, rank: int) -> str:
    path = one.run / "stacks" / f"rank_{rank:05d}.txt"
    return path.read_text() if path.exists() else ""


@pytest.mark.row("H1")
@pytest.mark.parametrize(
    "fault,phases,frame",
    [
        pytest.param(DATA, ["step 4: sum of the loss weights over ranks'", "step 4: data'"], "inject.py", id="data"),
        pytest.param(
            MICROBATCH,
            ["step 4: backward of microbatch 2 of 2'", "step 4: forward of microbatch 2 of 2'"],
            "inject.py",
            id="microbatch",
            marks=pytest.mark.quick,
        ),
        pytest.param(COLLECTIVE, ["step 4: sum of the gradients over ranks'"] * 2, "inject.py", id="collective"),
        pytest.param(SAVE, ["saving step 4", "saving step 4"], "inject.py", id="save"),
        pytest.param(EVALUATION, [None, "held-out eval after step 4"], "evaluate", id="evaluation"),
    ],
)
def test_a_hang_is_named(case: MakeCase, fault: Fault, phases: list[str | None], frame: str) -> None:
    """Both ranks end by themselves; the stacks of both are in files and on stderr."""
    one = case()
    start = one.start(fault, more=SHORT)
    start.until(lambda: bool(start.fired()))
    start.ends(1)
    named = [rank for rank, phase in enumerate(phases) if phase]
    for rank in named:
        for told in (stacks(one, rank), start.err(rank)):
            assert f"rank {rank}: '{phases[rank]}" in told, (rank, told, start.told())
        assert "Current thread" in stacks(one, rank)
    assert any(frame in stacks(one, rank) for rank in named), frame
    state = one.status()
    assert state["status"] == "failed-retryable" and "TrainingHangs" in state["reason"], state
    one.finish_the_same()


@pytest.mark.row("H1")
def test_a_step_may_last_longer_than_the_limit(case: MakeCase) -> None:
    """Each of the two microbatches of the step takes 3 s, and a pass may take 5 s."""
    one = case()
    slow = {"at": "sft.mcore.engine:lm_loss", "step": 3, "every": True, "do": "sleep", "s": 3}
    start = one.start(slow, more=["run.progress_timeout_s=5"]).ends(0)
    assert len(start.fired()) == 4, start.told()
    one.assert_same_end()


@pytest.mark.row("H2")
def test_a_rank_leaves_out_a_collective(case: MakeCase) -> None:
    """The other rank's collective then does not match; a mismatch may also raise an error at once."""
    one = case()
    start = one.start({**COLLECTIVE, "rank": 1, "do": "skip"}, more=SHORT)
    assert 0 not in start.wait() and start.fired() and one.status()["status"] == "failed-retryable", start.told()
    one.finish_the_same()


@pytest.mark.row("H1")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_stopped(case: MakeCase, rank: int) -> None:
    """A rank that got SIGSTOP prints nothing; the other rank reports it and exits.  The launcher kills the stopped
    rank."""
    one, other = case(), 1 - rank
    start = one.start({"at": STEP, "step": 4, "rank": rank, "do": "stop"}, more=SHORT)
    start.until(lambda: start.codes()[other] is not None)
    assert start.codes()[other] == 1, start.told()
    assert f"rank {other}: 'step 4: sum of the loss weights" in stacks(one, other), start.told()
    assert one.status()["status"] == "failed-retryable", one.status()
    start.signal(signal.SIGKILL, rank)
    start.wait()
    one.finish_the_same()


@pytest.mark.row("L10")
def test_a_stopped_run_that_wakes_up_does_no_harm(case: MakeCase) -> None:
    """Another run has taken over its folder: the woken run neither saves nor overwrites files of the other run."""
    one, other = case(), case()
    other.overrides[0] = one.overrides[0]
    stop = {"at": "sft.run.lifecycle:Lifecycle.after_step", "step": 4, "do": "stop"}
    start = one.start(stop, more=["run.progress_timeout_s=null"])
    start.until(lambda: len(start.fired()) == 2)
    (one.run / "run.lock").unlink()  # allowed by the message of the refusal, if no such run is known to exist
    other.finish()
    before = {path: path.stat().st_mtime_ns for path in one.checkpoints.rglob("*")}
    metrics = (one.run / "metrics.jsonl").read_bytes()
    start.signal(signal.SIGCONT)
    assert 0 not in start.wait(), start.told()
    assert {path: path.stat().st_mtime_ns for path in one.checkpoints.rglob("*")} == before
    assert (one.run / "metrics.jsonl").read_bytes() == metrics, "it wrote its steps among those of the other run"
    one.assert_same_end()


@pytest.mark.row("H1")
def test_torchrun_ends_a_run_in_which_one_rank_sleeps(case: MakeCase) -> None:
    one = case()
    one.torchrun({"at": STEP, "rank": 1, **LONG}, more=SHORT).ends(1)
    assert "'step 4: sum of the loss weights" in stacks(one, 0) + stacks(one, 1)
    one.finish_the_same()
