"""Rows P of the fault matrix: processes that die, one or all, at any instant."""

import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.matrix import Matrix
from tests.faults.runs import STEP, Case, Hit, MakeCase

END = "sft.run.lifecycle:Lifecycle.after_step"
# so slow that the planner chooses small CP groups
DYNAMIC_CP = ["parallel.dynamic_cp=true", "parallel.intra_node_gb_s=1e-6"]
UPDATE = "sft.mcore.engine:build.update"


@pytest.mark.row("P1", "T1")
def test_one_rank_killed_between_steps(case: MakeCase, hit: Hit) -> None:
    """The other rank exits by itself, without waiting for a timeout (900 s here)."""
    one = case()
    for rank, step in ((1, 4), (0, 9)):
        start = one.start({"at": END, "step": step, "when": "after", "rank": rank, "do": "kill"})
        codes = start.wait()
        assert codes[rank] == -9 and codes[1 - rank] not in (0, None) and len(start.fired()) == 1, start.told()
        hit("P1"), hit("T1")
    one.finish_the_same()


@pytest.mark.quick
@pytest.mark.row("P2", "T1", "T8")
def test_all_ranks_killed_inside_a_step(case: MakeCase, hit: Hit) -> None:
    """Kills in the forward pass, between backward and update, and in the update; the epoch ends with step 7.

    Attention runs once, with the numbers of a run without recomputation."""
    one = case("checkpoint.async_save=true", "train.recompute=attention_kept")
    places = [
        ("sft.mcore.engine:lm_loss", 3, "before"),
        ("sft.mcore.engine:finalize_model_grads", 6, "after"),
        (UPDATE, 7, "before"),
        (UPDATE, 8, "after"),
        (STEP, 10, "after"),
    ]
    for at, step, when in places:
        one.start({"at": at, "step": step, "when": when, "rank": 1, "do": "kill-all"}).ends(-9)
        hit("P2")
        hit("T8" if step in (6, 7, 8) else "T1")
    one.finish_the_same()


@pytest.mark.row("P2", "T1")
def test_a_run_with_dynamic_cp_continues(case: MakeCase, hit: Hit) -> None:
    """The packs have both CP sizes, and each step has the samples that it has with fixed cp."""
    one, whole = case(*DYNAMIC_CP), case(*DYNAMIC_CP)
    fixed, one.reference = whole.reference, whole.finish() and whole.end()
    assert whole.end().seen == fixed.seen
    sizes = [record["by cp size"] for record in whole.records() if record["kind"] == "train"]
    assert {size for step in sizes for size in step if step[size]["packs"]} == {"1", "2"}
    one.start({"at": STEP, "step": 5, "when": "after", "rank": 1, "do": "kill-all"}).ends(-9)
    hit("P2"), hit("T1")
    one.finish_the_same()


@pytest.mark.row("P3", "P4", "P5")
def test_one_rank_fails(case: MakeCase, hit: Hit) -> None:
    """A rank raises an exception, runs out of memory, or exits with code 0."""
    one = case()
    start = one.start({"at": STEP, "step": 3, "rank": 1, "do": "error"}).ends(1)
    state = one.status()
    assert state["status"] == "failed-retryable" and state["reason"] == "rank 1: RuntimeError: injected", state
    assert "RuntimeError: injected" in state["traceback"] and "RuntimeError: injected" in start.err(1)
    hit("P3")

    one.start({"at": UPDATE, "step": 3, "rank": 0, "do": "memory"}).ends(1)
    assert one.status()["reason"].startswith("rank 0: MemoryError"), one.status()
    assert one.steps() == [1, 2] and len(list(one.checkpoints.iterdir())) == 3
    hit("P5")

    start = one.start({"at": STEP, "step": 5, "rank": 1, "do": "exit-0"})
    assert start.wait() == [1, 0] and one.status()["status"] == "failed-retryable", start.told()
    one.torchrun({"at": STEP, "step": 7, "rank": 0, "do": "exit-0"}).ends(1)
    assert one.status()["status"] == "failed-retryable", one.status()
    hit("P4", 2)
    one.finish_the_same()


@pytest.mark.row("P6")
def test_the_launcher_is_killed(case: MakeCase) -> None:
    """The ranks end with their launcher: otherwise, they would disturb the next start in the same folder."""
    one = case()
    start = one.torchrun({"at": STEP, "call": 3, "do": "sleep", "s": 4, "every": True})
    start.until(lambda: len(start.fired()) >= 2)
    start.process.kill()
    start.process.wait()
    start.until(lambda: not start.alive())
    assert one.status()["status"] != "done", start.told()
    one.finish_the_same()


@pytest.mark.row("P7")
def test_three_starts_without_progress_are_enough(case: MakeCase, hit: Hit) -> None:
    one = case("checkpoint.save_every=5")
    command = [sys.executable, "-m", "sft", "status", str(one.recipe), f"run.dir={one.run}"]
    for number, verdict in ((0, 75), (1, 75), (2, 75), (3, 2)):  # the first start moved from step 0 to step 5
        one.start({"at": STEP, "step": 6, "rank": 0, "do": "error"}).ends(1)
        assert one.status()["starts"] == max(number, 1)
        assert subprocess.run(command, capture_output=True).returncode == verdict
        hit("P7", int(number > 0))


# (seed, overrides): a run of 60 steps with a save after each, killed 25 times
CHAINS = [(1, []), (2, ["checkpoint.async_save=true", "checkpoint.keep_last=3"])]
KILLS = 25
LONG = ["train.num_steps=60", "train.eval_every=7"]


@pytest.mark.row("P1", "P2", "S1")
def test_kills_at_random_instants(case: MakeCase, hit: Hit, matrix: Matrix) -> None:
    """Kills one rank or all ranks, wherever the run is.  Writes are slowed down, so that half of the kills strike
    during a save."""
    straight = case(*LONG, "checkpoint.save_every=60")
    straight.finish()
    chains = [case(*LONG, *overrides) for _, overrides in CHAINS]
    with ThreadPoolExecutor(len(chains)) as threads:
        instants = list(threads.map(_killed_often, chains, [seed for seed, _ in CHAINS]))
    for one in chains:
        one.reference = straight.end()
        one.finish_the_same()
    for where, victim in sum(instants, []):
        hit("S1" if where != "between saves" else "P2" if victim is None else "P1")
    met = [where for where, _ in sum(instants, [])]
    told = ", ".join(f"{met.count(where)} {where}" for where in sorted(set(met)))
    matrix.notes.append(f"random kills (in rows P1, P2 and S1): {told}")


SLOW = [
    {"at": "sft.checkpoint.saver:engine_state.write", "do": "sleep", "s": 0.06, "every": True},
    {"at": "sft.checkpoint.folders:flush", "do": "sleep", "s": 0.03, "every": True},
    {"at": "sft.checkpoint.folders:write_pointer", "do": "sleep", "s": 0.06, "every": True},
]


def _killed_often(one: Case, seed: int) -> list[tuple[str, int | None]]:
    """For each kill: where the run was, and which rank was killed (None: all)."""
    draw = random.Random(seed)
    met: list[tuple[str, int | None]] = []
    while len(met) < KILLS:
        start = one.start(*SLOW)
        early = draw.random() < 0.15  # then the kill may also strike while the run loads
        if not early:
            start.until(lambda: "\nstep " in start.out() or None not in start.codes())
        time.sleep(draw.uniform(0.0, 0.6))
        # A rank that is alone before the ranks have met would wait for the timeout; a launcher would end it.
        victim = None if early else draw.choice([0, 1, None])
        if None not in start.codes():
            assert start.codes() == [0, 0], start.told()
            return met
        start.signal(signal.SIGKILL, victim)
        codes = start.wait()
        assert -9 in codes and 0 not in codes, start.told()
        met.append((_where(one), victim))
        if one.pointer.exists():
            one.assert_whole()
    return met


def _where(one: Case) -> str:
    names = [path.name for path in one.checkpoints.iterdir()] if one.checkpoints.exists() else []
    if any(".tmp-" in name for name in names):
        return "while writing"
    if one.steps() and (not one.pointer.exists() or one.pointed() != one.steps()[-1]):
        return "between rename and pointer"
    return "between saves"
