"""G: a run that is asked to stop: all ranks save once, after the same step, and the same command goes on."""

import signal
import time

import pytest

from tests.faults.runs import STEP, Case, Hit, MakeCase

SLOW = {"at": STEP, "do": "sleep", "s": 0.3, "every": True}


def assert_preempted(one: Case, step: int | None = None) -> None:
    state = one.status()
    assert state["status"] == "preempted" and state["step"] == state["saved_step"], state
    assert step is None or state["step"] == step, state
    one.assert_whole(state["step"])


@pytest.mark.quick
@pytest.mark.row("G1")
def test_signals_to_one_worker(case: MakeCase, hit: Hit) -> None:
    """In step 3, 6 and 9: saved once, though no save is due then."""
    one = case("checkpoint.save_every=100")
    for do, rank, step in (("term", 1, 3), ("usr1", 0, 6), ("int", 1, 9)):
        start = one.start({"at": STEP, "step": step, "rank": rank, "do": do}).ends(75)
        assert_preempted(one, step)
        assert start.says("the same command resumes the run").out().count("saved ") == 1
        hit("G1")
    assert one.steps() == [3, 6, 9]
    one.finish_the_same()


@pytest.mark.row("G1")
def test_signals_to_the_launcher(case: MakeCase, hit: Hit) -> None:
    """torchrun hands SIGTERM and SIGINT on to the workers, which have until its own timeout (30 s); SIGUSR1, which
    SLURM sends, where it is told to."""
    one = case("checkpoint.save_every=100")
    as_slurm = ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    for number, options in ((signal.SIGTERM, []), (signal.SIGINT, []), (signal.SIGUSR1, as_slurm)):
        start = one.torchrun(SLOW, options=options)
        start.until(lambda: "\nstep " in start.out())
        start.process.send_signal(number)
        assert start.wait() != [0], start.told()
        assert_preempted(one)
        hit("G1")
    assert len(one.steps()) == 3
    one.finish_the_same()


@pytest.mark.row("G2")
def test_a_second_signal_leaves_at_once(case: MakeCase, hit: Hit) -> None:
    """Another signal, or the same one after the second in which it counts as an echo."""
    one = case()
    for saved, second in ((0, signal.SIGUSR1), (2, signal.SIGTERM)):
        start = one.start({"at": STEP, "call": 3, "do": "sleep", "s": 25})
        start.until(lambda: len(start.fired()) == 2)
        start.signal(signal.SIGTERM)
        time.sleep(1.5)
        start.signal(second)
        start.ends(128 + second)
        one.assert_whole(saved + 2)
        hit("G2")
    start = one.start({"at": STEP, "call": 3, "do": "sleep", "s": 1})
    start.until(lambda: len(start.fired()) == 2)
    start.signal(signal.SIGTERM), start.signal(signal.SIGTERM)
    start.ends(75)
    assert_preempted(one, 7)
    hit("G2")
    one.finish_the_same()


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
def test_a_signal_at_any_time(cut: MakeCase, hit: Hit, cases: list) -> None:
    """Going on from step 6; held-out data are evaluated after step 8."""
    one, at = cut(), 6
    for what, fault, steps in cases:
        start = one.start({**fault, "do": "term"}).ends(75)
        assert len(start.fired()) == 1, (what, start.told())
        assert_preempted(one)
        before, at = at, one.status()["step"]
        assert at - before in steps if steps else at == 8, (what, start.told())
        hit("G3")
    one.finish_the_same()


@pytest.mark.row("G3")
def test_a_signal_before_there_is_anything_to_save(case: MakeCase, hit: Hit) -> None:
    """While the ranks meet, they end by it, as any process; before the first step, as later on."""
    one = case()
    start = one.start({"at": "sft.mcore.process_groups:parallel_state.initialize_model_parallel", "do": "term"})
    assert 0 not in start.wait(), start.told()
    assert not one.checkpoints.exists()
    start = one.start({"at": "sft.run.evaluation:evaluate", "rank": 0, "do": "term"}).ends(75)
    state = one.status()
    assert (state["status"], state["step"]) == ("preempted", 0) and "\nstep " not in start.out(), start.told()
    hit("G3", 2)
    one.finish_the_same()


@pytest.mark.row("G4")
def test_the_time_is_up(case: MakeCase, hit: Hit) -> None:
    """run.exit_after_minutes, and the end of a SLURM job: all ranks after the same step, again and again."""
    one = case("checkpoint.save_every=100")
    reasons = {"run.exit_after_minutes": "run.exit_after_minutes=0.02", "end of the job": "run.grace_s=60"}
    for reason, override in reasons.items():
        end = {"SLURM_JOB_END_TIME": str(int(time.time()) + 62)}
        one.start(SLOW, more=[override], env=end).ends(75)
        assert one.status()["reason"] == reason and 0 < one.status()["step"] < 12, one.status()
        assert_preempted(one)
        hit("G4")
    one.finish_the_same()
    assert one.status()["starts"] == 1
