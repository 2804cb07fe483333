"""P: processes that die, one or all, at any instant."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.ends import POINTER, End, assert_same_end, assert_whole, end_of
from tests.faults.matrix import Matrix
from tests.faults.runs import Case

STEP = "sft.mcore.engine:Engine.train_step"
END = "sft.run.lifecycle:Lifecycle.report_published"
UPDATE = "sft.mcore.engine:build.update"


@pytest.mark.row("P1", "T1")
def test_one_rank_killed_between_steps(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """The other one leaves by itself, without waiting for a timeout (20 s here)."""
    one = case("run")
    for rank, step in ((1, 4), (0, 9)):
        start = one.start({"at": END, "step": step, "when": "after", "rank": rank, "do": "kill"})
        codes = start.wait(15)
        assert codes[rank] == -9 and codes[1 - rank] not in (0, None), start.told()
        assert len(start.fired()) == 1
        hit("P1"), hit("T1")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.quick
@pytest.mark.row("P2", "T1", "T8")
def test_all_ranks_killed_inside_a_step(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """In the forward pass, between backward and update, in the update; the epoch ends with step 7."""
    one = case("run", "checkpoint.async_save=true")
    places = [
        ("sft.mcore.engine:lm_loss", 3, "before"),
        ("sft.mcore.engine:finalize_model_grads", 6, "after"),
        (UPDATE, 7, "before"),
        (UPDATE, 8, "after"),
        (STEP, 10, "after"),
    ]
    for at, step, when in places:
        start = one.start({"at": at, "step": step, "when": when, "rank": 1, "do": "kill-all"})
        assert start.wait(15) == [-9, -9], start.told()
        assert len(start.fired()) == 1
        hit("P2")
        hit("T8" if step in (6, 7, 8) else "T1")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("P3", "P4", "P5")
def test_one_rank_fails(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """By an exception, memory, or leaving as if all were well."""
    one = case("run")
    start = one.start({"at": STEP, "step": 3, "rank": 1, "do": "error"})
    assert start.wait(15) == [1, 1], start.told()
    state = one.status()
    assert state["status"] == "failed-retryable" and state["reason"] == "rank 1: RuntimeError: injected", state
    assert "RuntimeError: injected" in state["traceback"] and "RuntimeError: injected" in start.err(1)
    hit("P3")

    before = one.steps()
    start = one.start({"at": UPDATE, "step": 3, "rank": 0, "do": "memory"})
    assert start.wait(15) == [1, 1], start.told()
    assert one.status()["reason"].startswith("rank 0: MemoryError"), one.status()
    assert one.steps() == before == [1, 2] and len(list(one.checkpoints.iterdir())) == 3
    hit("P5")

    start = one.start({"at": STEP, "step": 5, "rank": 1, "do": "exit-0"})
    codes = start.wait(15)
    assert codes[1] == 0 and codes[0] == 1, start.told()
    assert one.status()["status"] == "failed-retryable"
    hit("P4")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("P4")
def test_rank_0_leaves_as_if_all_were_well(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    one = case("run")
    start = one.torchrun({"at": STEP, "step": 5, "rank": 0, "do": "exit-0"})
    assert start.wait() == [1], start.told()
    assert one.status()["status"] == "failed-retryable", one.status()
    hit("P4")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("P6")
def test_the_launcher_is_killed(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """Its ranks leave with it: they would meet the next start in their folder."""
    one = case("run")
    start = one.torchrun({"at": STEP, "call": 3, "do": "sleep", "s": 4, "every": True})
    start.until(lambda: len(start.fired()) >= 2)
    start.process.kill()
    start.process.wait()
    start.until(lambda: not start.alive(), 10)
    assert one.status()["status"] != "done", start.told()
    hit("P6")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("P7")
def test_three_starts_without_progress_are_enough(case: Callable[..., Case], hit: Callable[..., None]) -> None:
    def verdict() -> int:
        command = [sys.executable, "-m", "sft", "status", str(one.recipe), f"run.dir={one.run}"]
        return subprocess.run(command, capture_output=True).returncode

    one = case("run", "checkpoint.save_every=5")
    one.start({"at": STEP, "step": 6, "rank": 0, "do": "error"}).wait(15)
    assert verdict() == 75  # it came from 0 to 5
    for number in (1, 2, 3):
        start = one.start({"at": STEP, "step": 6, "rank": 0, "do": "error"})
        assert start.wait(15) == [1, 1]
        assert one.status()["starts"] == number
        assert verdict() == (2 if number == 3 else 75)
        hit("P7")


# (seed, overrides): a run of 60 steps with a save after each, killed 25 times
CHAINS = [(1, []), (2, ["checkpoint.async_save=true", "checkpoint.keep_last=3"])]
KILLS = 25
LONG = ["train.num_steps=60", "train.eval_every=7"]


@pytest.mark.row("P1", "P2", "S1")
@pytest.mark.timeout(900)
def test_kills_at_random_instants(case: Callable[..., Case], hit: Callable[..., None], matrix: Matrix) -> None:
    """One rank or all; wherever it is.  The writes are slowed down, so that half of the kills meet a save."""
    straight = case("straight", *LONG, "checkpoint.save_every=60")
    straight.finish()
    reference = end_of(straight)
    chains = [case(f"chain{seed}", *LONG, *overrides) for seed, overrides in CHAINS]
    with ThreadPoolExecutor(len(chains)) as threads:
        found = list(threads.map(_killed_often, chains, [seed for seed, _ in CHAINS]))
    for one, instants in zip(chains, found, strict=True):
        one.finish()
        assert_same_end(one, reference)
        for where, victim in instants:
            hit("S1" if where != "between saves" else "P2" if victim is None else "P1")
    met = [where for instants in found for where, _ in instants]
    told = ", ".join(f"{met.count(where)} {where}" for where in sorted(set(met)))
    matrix.notes.append(f"random kills (in rows P1, P2 and S1): {told}")


SLOW = [
    {"at": "sft.checkpoint.saver:engine_state.write", "do": "sleep", "s": 0.06, "every": True},
    {"at": "sft.checkpoint.folders:flush", "do": "sleep", "s": 0.03, "every": True},
    {"at": "sft.checkpoint.folders:write_pointer", "do": "sleep", "s": 0.06, "every": True},
]


def _killed_often(one: Case, seed: int) -> list[tuple[str, int | None]]:
    """Where each kill met the run, and which rank (None: all)."""
    draw = random.Random(seed)
    met: list[tuple[str, int | None]] = []
    while len(met) < KILLS:
        start = one.start(*SLOW)
        early = draw.random() < 0.15  # also while it loads
        if not early:
            start.until(lambda: "\nstep " in start.out() or None not in start.codes())
        time.sleep(draw.uniform(0.0, 0.6))
        # One that is alone before they have met waits for the other until the timeout: the launcher's to end.
        victim = None if early else draw.choice([0, 1, None])
        if None not in start.codes():
            assert start.codes() == [0, 0], start.told()
            return met
        start.signal(signal.SIGKILL, victim)
        codes = start.wait(20)
        assert -9 in codes and 0 not in codes, start.told()
        assert start.alive() == [], start.told()
        met.append((_where(one), victim))
        if (one.checkpoints / POINTER).exists():
            assert_whole(one)
    return met


def _where(one: Case) -> str:
    names = [path.name for path in one.checkpoints.iterdir()] if one.checkpoints.exists() else []
    if any(".tmp-" in name for name in names):
        return "while writing"
    if one.steps() and (not (one.checkpoints / POINTER).exists() or one.pointed() != one.steps()[-1]):
        return "between rename and pointer"
    return "between saves"
