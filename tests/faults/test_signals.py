"""G: a run that is asked to stop: all ranks save once, after the same step, and the same command goes on."""

import json
import signal
import time
from collections.abc import Callable

import pytest

from tests.faults.ends import End, assert_same_end, assert_whole
from tests.faults.runs import Case

STEP = "sft.mcore.engine:Engine.train_step"
SLOW = {"at": STEP, "do": "sleep", "s": 0.3, "every": True}


def assert_preempted(one: Case, step: int | None = None) -> None:
    state = one.status()
    assert state["status"] == "preempted" and state["step"] == state["saved_step"], state
    assert step is None or state["step"] == step, state
    assert_whole(one, state["step"])


@pytest.mark.quick
@pytest.mark.row("G1")
def test_signals_to_one_worker(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """In step 3, 6 and 9: saved once, though no save is due then."""
    one = case("run", "checkpoint.save_every=100")
    for do, rank, step in (("term", 1, 3), ("usr1", 0, 6), ("int", 1, 9)):
        start = one.start({"at": STEP, "step": step, "rank": rank, "do": do})
        assert start.wait(40) == [75, 75], start.told()
        assert_preempted(one, step)
        assert start.out().count("saved ") == 1 and "the same command resumes from there" in start.out()
        hit("G1")
    assert one.steps() == [3, 6, 9]
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("G1")
def test_signals_to_the_launcher(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """torchrun hands SIGTERM and SIGINT on to the workers, which have until its own timeout (30 s)."""
    one = case("run", "checkpoint.save_every=100")
    for number in (signal.SIGTERM, signal.SIGINT):
        start = one.torchrun(SLOW)
        start.until(lambda: "\nstep " in start.out())
        start.process.send_signal(number)
        assert start.wait(60)[0] not in (0, None), start.told()
        assert not start.alive()
        assert_preempted(one)
        hit("G1")
    assert len(one.steps()) == 2
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("G1")
def test_usr1_to_the_launcher_as_slurm_sends_it(
    case: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    one = case("run", "checkpoint.save_every=100")
    start = one.torchrun(SLOW, options=["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"])
    start.until(lambda: "\nstep " in start.out())
    start.process.send_signal(signal.SIGUSR1)
    assert start.wait(60)[0] not in (0, None), start.told()
    assert_preempted(one)
    hit("G1")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("G2")
def test_a_second_signal_leaves_at_once(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """Another signal, or the same one after the second in which it counts as an echo."""
    one = case("run")
    for second, code in ((signal.SIGUSR1, 128 + signal.SIGUSR1), (signal.SIGTERM, 128 + signal.SIGTERM)):
        saved = one.pointed() if one.checkpoints.exists() else 0
        start = one.start({"at": STEP, "call": 3, "do": "sleep", "s": 25})
        start.until(lambda: len(start.fired()) == 2)
        start.signal(signal.SIGTERM)
        time.sleep(1.5)
        start.signal(second)
        began = time.monotonic()
        assert start.wait(20) == [code, code], start.told()
        assert time.monotonic() - began < 15
        assert_whole(one, saved + 2)
        hit("G2")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("G2")
def test_the_same_signal_twice_at_once_is_one(
    case: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    one = case("run")
    start = one.start({"at": STEP, "call": 3, "do": "sleep", "s": 1})
    start.until(lambda: len(start.fired()) == 2)
    start.signal(signal.SIGTERM), start.signal(signal.SIGTERM)
    assert start.wait(20) == [75, 75], start.told()
    assert_preempted(one, 3)
    hit("G2")
    one.finish()
    assert_same_end(one, reference)


WHEN = {  # (what goes on, fault, steps done after it; two where the listening thread may be a moment too late)
    "before training": [
        ("reading the data", {"at": "sft.trainer:DataPipeline", "rank": 0}, (0,)),
        ("loading the checkpoint", {"at": "sft.checkpoint.resume:engine_state.load", "rank": 1}, (0,)),
        ("before the first step", {"at": "sft.trainer:Trainer._open_metrics", "rank": 0, "when": "after"}, (0, 1)),
        ("evaluation", {"at": "sft.run.evaluation:evaluate", "rank": 1}, None),
    ],
    "in a save": [
        ("writing", {"at": "sft.checkpoint.saver:engine_state.write", "rank": 1}, (1,)),
        ("publishing", {"at": "sft.checkpoint.folders:write_pointer", "rank": 0}, (1, 2)),
    ],
}


@pytest.mark.row("G3")
@pytest.mark.parametrize("cases", WHEN.values(), ids=WHEN)
def test_a_signal_at_any_time(cut: Callable[..., Case], reference: End, hit: Callable[..., None], cases: list) -> None:
    """Going on from step 6; held-out data are evaluated after step 8."""
    one, at = cut("run"), 6
    for what, fault, steps in cases:
        start = one.start({**fault, "do": "term"})
        assert start.wait(40) == [75, 75] and len(start.fired()) == 1, (what, start.told())
        assert_preempted(one)
        before, at = at, one.status()["step"]
        assert at - before in steps if steps else at == 8, (what, start.told())
        hit("G3")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("G3")
def test_a_signal_before_anything_listens(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """While the ranks meet: they end by it, as any process, and there is nothing to save."""
    one = case("run")
    start = one.start({"at": "sft.mcore.process_groups:parallel_state.initialize_model_parallel", "do": "term"})
    codes = start.wait(40)
    assert 0 not in codes, start.told()
    assert not one.run.exists() or not one.checkpoints.exists()
    hit("G3")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("G3")
def test_a_signal_before_the_first_step_of_a_new_run(
    case: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    one = case("run")
    start = one.start({"at": "sft.run.evaluation:evaluate", "rank": 0, "do": "term"})
    codes = start.wait(40)
    assert codes == [75, 75], start.told()
    assert one.status()["status"] == "preempted" and "\nstep " not in start.out(), start.told()
    assert one.status()["step"] == 0
    hit("G3")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("G4")
def test_the_time_is_up(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """run.exit_after_minutes, and the end of a SLURM job: all ranks after the same step, again and again."""
    one = case("run", "checkpoint.save_every=100")
    start = one.start(SLOW, more=["run.exit_after_minutes=0.02"])
    assert start.wait(40) == [75, 75], start.told()
    assert one.status()["reason"] == "run.exit_after_minutes" and 0 < one.status()["step"] < 12
    assert_preempted(one)
    hit("G4")
    start = one.start(SLOW, more=["run.grace_s=60"], env={"SLURM_JOB_END_TIME": str(int(time.time()) + 62)})
    assert start.wait(40) == [75, 75], start.told()
    assert one.status()["reason"] == "end of the job", one.status()
    assert_preempted(one)
    hit("G4")
    one.finish()
    assert_same_end(one, reference)
    assert json.loads((one.run / "run_state.json").read_text())["starts"] == 1
