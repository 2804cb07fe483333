"""launch/slurm.sbatch on a real SLURM: all ways in which a job can end, and whether SLURM requeues it."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching import records
from tests.slurm.cluster import (
    MEMORY_MB,
    ONE_NODE,
    ROOT,
    STEPS,
    TWO_NODES,
    Cluster,
    Job,
    command_lines,
    skip_without_slurm,
    submit,
    trained,
    until,
)


def saved(job: Job) -> list[str]:
    return sorted(path.name for path in job.folder.glob("run/checkpoints/iter_*"))


def until_it_trains(job: Job, beyond: int = 0) -> None:
    until(lambda: trained(job)[-1:] > [beyond + 2], 120, f"step {beyond + 3} of job {job.id}", job.told)


def ranks(job: Job) -> list[int]:
    """The process ids of the ranks; the command line of torchrun also contains these words, but does not begin with
    them."""
    words = f"-m sft train {job.folder}/recipe.yaml "
    return [pid for pid, line in command_lines().items() if words in line and line.split()[1:3] == ["-u", "-m"]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    skip_without_slurm()
    running = Cluster(tmp_path_factory.mktemp("slurm"))
    yield running
    left = running.stop()
    assert not left, f"jobs left processes running: {left}"


@pytest.fixture(scope="module")
def uninterrupted(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = submit(cluster, tmp_path_factory.mktemp("uninterrupted"))
    job.wait("COMPLETED")
    assert job.field("ExitCode") == "0:0"
    assert f",mem={MEMORY_MB}M," in job.field("TRES")  # all memory of the node
    assert trained(job) == list(range(1, STEPS + 1))
    return job.folder


def assert_comes_back(job: Job, uninterrupted: Path) -> int:
    """Asserts that the job comes back once, from a checkpoint, and ends as an uninterrupted run.  Returns the step of
    the checkpoint."""
    job.wait("PENDING", restarts=1)
    (checkpoint,) = saved(job)
    job.start_now()
    job.wait("COMPLETED", restarts=1)
    assert records(job.folder, "train") == records(uninterrupted, "train")
    return int(checkpoint.removeprefix("iter_"))


@pytest.mark.parametrize("options", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
def test_a_signalled_run_saves_comes_back_and_ends_as_if_nothing_had_happened(
    cluster: Cluster, uninterrupted: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    job = submit(cluster, tmp_path, options)
    until_it_trains(job)
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)  # --signal=B:USR1@120 sends the same signal
    step = assert_comes_back(job, uninterrupted)
    assert 2 < step < STEPS
    for told in ("SLURM_RESTART_COUNT 0, rank logs in", "SLURM_RESTART_COUNT 1, rank logs in", f"resumed step {step}"):
        assert told in job.told()
    logs = list(tmp_path.glob(f"logs/{job.id}/start-*/node-*/*/attempt_0/*/stdout.log"))
    assert len(logs) == 4  # two ranks, two starts


def test_a_run_in_an_image_needs_nothing_of_the_hosts_python(
    cluster: Cluster, uninterrupted: Path, tmp_path: Path
) -> None:
    host, image = tmp_path / "host", tmp_path / "image"
    host.mkdir()
    for name in ("python", "python3", "torchrun", "sft"):
        (host / name).write_text(f"#!/bin/sh\necho the host has no {name} >&2\nexit 97\n")
        (host / name).chmod(0o755)
    inside = f"PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}"
    image.write_text(f'#!/bin/sh\n[ "$1" = run ] && shift && {inside} exec "$@"\n')
    image.chmod(0o755)
    outside = {"PATH": f"{host}:{cluster.env['PATH']}", "PYTHONPATH": "", "SFT_RUN_PREFIX": f"{image} run"}
    job = submit(cluster, tmp_path, TWO_NODES, **outside)
    job.wait("COMPLETED")
    assert "the host has no" not in job.told()
    assert records(job.folder, "train") == records(uninterrupted, "train")


def test_scancel_is_the_end(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path)
    until_it_trains(job)
    cluster.call("scancel", job.id)
    job.wait("CANCELLED")
    assert "this script does not requeue it" in job.told()
    assert len(saved(job)) == 1  # it saved nevertheless: KillWait left enough time


def test_a_run_that_is_preempted_comes_back(cluster: Cluster, uninterrupted: Path, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path)
    until_it_trains(job)
    (tmp_path / "urgent").mkdir()
    urgent = Job(cluster, tmp_path / "urgent", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true")
    urgent.wait("COMPLETED")
    assert_comes_back(job, uninterrupted)


def test_a_run_whose_time_is_up_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    """Simulates a save that takes longer than the time between SLURM's signal and the limit: the signal here has no
    effect."""
    job = submit(cluster, tmp_path, (*ONE_NODE, "--time=1", "--signal=B:URG@10"), "train.num_steps=100000")
    job.wait("PENDING", restarts=1, seconds=240)
    assert "DUE TO TIME LIMIT" in job.told() and "SIGUSR1" not in job.told()
    cluster.call("scancel", job.id)
    job.wait("CANCELLED", restarts=1)


def test_a_node_that_loses_its_torchrun_takes_the_run_down_and_back(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, TWO_NODES)
    until_it_trains(job)
    words = ("/torchrun --nnodes 2 ", str(job.folder))
    launchers = [pid for pid, line in command_lines().items() if all(word in line for word in words)]
    assert len(launchers) == 2
    os.kill(max(launchers), signal.SIGKILL)
    job.wait("PENDING", restarts=1)
    until(lambda: not ranks(job), 30, "the end of all ranks", job.told)
    cluster.call("scancel", job.id)


@pytest.mark.parametrize(
    "override, starts",
    [("parallel.cp=3", 0), ("data.train=no/such.jsonl", 1)],
    ids=["told by the check", "told by the ranks"],
)
def test_a_wrong_recipe_fails_once(cluster: Cluster, tmp_path: Path, override: str, starts: int) -> None:
    job = submit(cluster, tmp_path, ONE_NODE, override)
    job.wait("FAILED")
    assert job.field("ExitCode") == "2:0"
    assert "ConfigError: " in job.told()
    assert len(list(tmp_path.glob(f"logs/{job.id}/start-*"))) == starts


def test_a_run_that_never_gets_anywhere_is_started_three_times(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path)
    for restarts in range(3):
        until(lambda: trained(job) and len(ranks(job)) == 2, 120, f"start {restarts + 1}", job.told)
        for rank in ranks(job):
            os.kill(rank, signal.SIGKILL)
        if restarts < 2:
            job.wait("PENDING", restarts=restarts + 1)
            (tmp_path / "run/metrics.jsonl").unlink()
            job.start_now()
    job.wait("FAILED", restarts=2)
    assert job.field("ExitCode") == "2:0"
    assert not saved(job)


def test_a_job_that_slurm_refuses_to_requeue_says_so(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, (*ONE_NODE, "--no-requeue"))
    until_it_trains(job)
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    job.wait("FAILED")
    assert job.field("ExitCode") == "75:0"
    assert "SLURM refuses to requeue it; submit it again to continue" in job.told()
    assert len(saved(job)) == 1
