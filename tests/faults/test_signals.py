"""Rows G of the fault matrix: if a run is asked to stop, all ranks save once, after the same step.

The same command then continues the run.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.runs import STEP, Case, Hit, MakeCase, Start, text_of

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = ["train.num_steps=1000000"]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SLOW = {"at": STEP, "do": "sleep", "s": 0.3, "every": True}


def assert_preempted(one: Case, step: int | None = None) -> None:
    state = one.status()
    assert state["status"] == "preempted" and state["step"] == state["saved_step"], state
    assert step is None or state["step"] == step, state
    one.assert_whole(state["step"])


@pytest.mark.quick
@pytest.mark.row("G1")
def test_signals_to_one_worker(case: MakeCase, hit: Hit) -> None:
    """Sends the signal in every second step: one save follows, though no save is due at this step."""
    one = case("checkpoint.save_every=100")
    for do, rank, step in (("term", 1, 2), ("usr1", 0, 4), ("int", 1, 6), ("hup", 0, 8), ("quit", 1, 10)):
        start = one.start({"at": STEP, "step": step, "rank": rank, "do": do}).ends(75)
        assert_preempted(one, step)
        assert start.says("the same command resumes the run").out().count("saved ") == 1
        hit("G1")
    assert one.steps() == [2, 4, 6, 8, 10]
    one.finish_the_same()


def by_torchrun(one: Case, number: int) -> Start:
    """Starts torchrun with the option that forwards SIGUSR1, the signal of SLURM.  The exit code of torchrun is 1."""
    as_slurm = ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    return one.torchrun(more=ENDLESS, options=as_slurm if number == signal.SIGUSR1 else [])


def by_processes(one: Case, number: int) -> Start:
    return one.launch([sys.executable, "-m", "sft", "train"], more=[*ENDLESS, "--processes", "2"])


def by_script(one: Case, number: int) -> Start:
    return one.launch([str(ROOT / "launch/local.sh"), "2"], more=ENDLESS)


QUICK = [(by_torchrun, signal.SIGHUP), (by_processes, signal.SIGQUIT), (by_script, signal.SIGHUP)]
LAUNCHES = [
    pytest.param(*pair, id=f"{pair[0].__name__}-{pair[1].name}", marks=[pytest.mark.quick] if pair in QUICK else [])
    for pair in itertools.product((by_torchrun, by_processes, by_script), SIGNALS)
]


@pytest.mark.row("G1")
@pytest.mark.parametrize("launch, number", LAUNCHES)
def test_signals_to_the_launcher(
    case: MakeCase, monkeypatch: pytest.MonkeyPatch, launch: Callable, number: signal.Signals
) -> None:
    """A terminal sends its signals to all processes of the command; other signals reach the launcher alone."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    one = case("checkpoint.save_every=null")
    start = launch(one, number)
    start.until(lambda: '"kind": "train"' in text_of(one.run / "metrics.jsonl"))
    send = os.killpg if number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT) else os.kill
    send(start.process.pid, number)
    start.ends(1 if launch is by_torchrun else 75).says(f"{number.name}: the run finishes this step, saves and exits")
    assert_preempted(one)
    step = one.status()["step"]
    again = one.start({"at": STEP, "rank": 0, "do": "kill-all"}, more=ENDLESS).ends(-9)
    again.says(f"resumed step {step} from {one.checkpoint(step)}")
    assert one.steps() == [step]


@pytest.mark.row("G2")
def test_a_second_signal_leaves_at_once(case: MakeCase, hit: Hit) -> None:
    """The second signal is another one, or the same one after the second in which a repeated signal counts as an
    echo."""
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


WHEN = {  # (activity, fault, number of finished steps; two numbers if the listening thread may be a moment too late)
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
    """The run resumes from step 6; it evaluates held-out data after step 8."""
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
    """While the ranks meet, the signal ends them, as it ends any process; before the first step, they stop as later
    on."""
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
    """run.exit_after_minutes, and the end of a SLURM job: all ranks stop after the same step, again and again."""
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
