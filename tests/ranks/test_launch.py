"""The commands in a manifest of `sft launch kubernetes`, on two nodes of this machine, of which one is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft.cli import main
from tests.launching import GOOD, RECIPE, free_port

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0
STEPS, SAVE_EVERY = 30, 5


def manifest(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The documents for the run of RECIPE on two nodes of one process, which mount `folder`."""
    (folder / "chat.jsonl").write_text(f"{GOOD}\n" * 30)
    (folder / "local.yaml").write_text(RECIPE.format(folder=folder))
    options = f"--gpus 2 --gpus-per-node 1 --kind jobset --image sft --volume shared:{folder}".split()
    overrides = [f"train.num_steps={STEPS}", f"checkpoint.save_every={SAVE_EVERY}", "run.grace_s=20"]
    assert main(["launch", "kubernetes", str(folder / "local.yaml"), *overrides, *options]) == 0
    return [*yaml.safe_load_all(capsys.readouterr().out)]


@contextmanager
def started(documents: list[dict[str, Any]], folder: Path) -> Iterator[list[subprocess.Popen]]:
    """The processes of both pods.  Kubernetes sets the index, and would mount the recipe and know the first pod."""
    recipe, job_set = documents
    (folder / "recipe.yaml").write_text(recipe["data"]["recipe.yaml"])
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    given |= {"RECIPE": str(folder / "recipe.yaml"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given |= {"PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    pods = [
        subprocess.Popen(
            container["command"], cwd=container["workingDir"],
            env={**os.environ, **given, "JOB_COMPLETION_INDEX": index},
            stdout=(folder / f"pod-{index}.log").open("ab"), stderr=subprocess.STDOUT, start_new_session=True,
        )
        for index in "01"
    ]  # fmt: skip
    try:
        yield pods
    finally:
        for pod in pods:
            with suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()


def codes(pods: list[subprocess.Popen]) -> list[int]:
    return [pod.wait(timeout=TIMEOUT_S) for pod in pods]


def wait_for(path: Path, pods: list[subprocess.Popen]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < end and all(pod.poll() is None for pod in pods), path.parent
        time.sleep(0.02)


def log(folder: Path) -> str:
    return (folder / "pod-0.log").read_text()[-4000:]


def kill_all_of(pod: subprocess.Popen) -> None:
    """Kills every process of a pod, also those that torchrun gave sessions of their own, as a lost node does."""
    import psutil

    for process in [*psutil.Process(pod.pid).children(recursive=True), psutil.Process(pod.pid)]:
        process.kill()


@pytest.mark.grid
def test_a_lost_node_and_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = manifest(tmp_path, capsys)
    with started(documents, tmp_path) as pods:
        wait_for(tmp_path / f"run/checkpoints/iter_{SAVE_EVERY:07}/manifest.json", pods)
        kill_all_of(pods[1])
        assert codes(pods) == [75, -signal.SIGKILL], log(tmp_path)
    with started(documents, tmp_path) as pods:
        assert codes(pods) == [0, 0], log(tmp_path)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "train"] == [*range(1, STEPS + 1)]
    starts = [record["step"] for record in records if record["kind"] == "start"]
    assert len(starts) == 2 and SAVE_EVERY <= starts[1] < STEPS


@pytest.mark.grid
def test_a_stop_signal_to_one_pod_stops_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Kubernetes evicts a pod: both save the same step, and end with the exit code that starts the job again."""
    documents = manifest(tmp_path, capsys)
    with started(documents, tmp_path) as pods:
        wait_for(tmp_path / f"run/checkpoints/iter_{SAVE_EVERY:07}/manifest.json", pods)
        pods[1].send_signal(signal.SIGTERM)
        assert codes(pods) == [75, 75], log(tmp_path)
    state = json.loads((tmp_path / "run/run_state.json").read_text())
    assert state["status"] == "preempted"
    assert (tmp_path / f"run/checkpoints/iter_{state['step']:07}/manifest.json").exists()


@pytest.mark.grid
def test_a_mistake_ends_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first pod ends the job by its exit code; Kubernetes then stops the other one, which waits for it."""
    documents = manifest(tmp_path, capsys)
    (tmp_path / "chat.jsonl").write_text("{}\n")
    with started(documents, tmp_path) as pods:
        assert codes(pods[:1]) == [2], log(tmp_path)
        pods[1].send_signal(signal.SIGTERM)
        assert codes(pods[1:]) != [0]
