"""`sft train --processes`: connections from outside, signals, exit codes, logs, and refusals."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from sft.cli import main
from sft.commands import train
from sft.run import processes
from tests.builders import Hostile
from tests.launching import GOOD, RECIPE

ENDLESS = ["train.num_steps=1000000", "checkpoint.save_every=null", "log.tensorboard=false"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(folder=tmp_path))
    (tmp_path / "chat.jsonl").write_text(f"{GOOD}\n" * 8)
    assert main(["data", "prepare", str(path)]) == 0
    return path


@contextmanager
def running(recipe: Path, *words: str, starter: tuple[str, ...] = ()) -> Iterator["subprocess.Popen[str]"]:
    """Starts `sft train --processes 2`, and waits for its first step."""
    command = [*starter, sys.executable, "-m", "sft", "train", str(recipe), *ENDLESS, "--processes", "2", *words]
    process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True)
    metrics, deadline = recipe.parent / "run" / "metrics.jsonl", time.monotonic() + 200
    try:
        while not (metrics.exists() and '"kind": "train"' in metrics.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        yield process
    finally:
        for one in (
            [*psutil.Process(process.pid).children(), psutil.Process(process.pid)] if process.poll() is None else []
        ):
            one.kill()
        process.communicate()


def listening(pid: int) -> set[tuple[str, int]]:
    """The addresses and ports at which a process listens."""
    found = psutil.Process(pid).net_connections(kind="inet")
    return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def test_no_other_machine_reaches_a_run_and_no_value_of_its_store_is_run(recipe: Path) -> None:
    """A program on this machine writes a malicious rendezvous into the store.  Then SIGTERM ends the run."""
    folder = recipe.parent
    with running(recipe, "--log-dir", str(folder / "logs")) as process:
        ranks = [child.pid for child in psutil.Process(process.pid).children()]
        assert len(ranks) == 2
        sockets = {pid: listening(pid) for pid in (process.pid, *ranks)}
        assert len(sockets[process.pid]) == 1  # the socket of the store
        assert {address for found in sockets.values() for address, _ in found} == {"127.0.0.1"}, sockets
        ((host, port),) = sockets[process.pid]
        store = dist.TCPStore(host, port, is_master=False)
        state = pickle.dumps(Hostile(str(folder / "ran")))
        for key in ("torch.rendezvous.none", f"torch.rendezvous.{environment(ranks[0])['TORCHELASTIC_RUN_ID']}"):
            store.set(key, state)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 75, out + err
    assert not (folder / "ran").exists()
    assert err.count("SIGTERM") + out.count("SIGTERM: the run finishes this step") == 1, (out, err)
    assert "Traceback" not in out + err and out.endswith("start the run again\n")
    assert json.loads((folder / "run/run_state.json").read_text())["status"] == "preempted"
    assert len(list(folder.glob("logs/*/attempt_0/*/stdout.log"))) == 2


def test_a_rank_that_is_killed_ends_the_others(recipe: Path) -> None:
    """Also: closing the terminal does not end a process that `nohup` started."""
    with running(recipe, starter=("nohup",)) as process:
        ranks = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGHUP)
        metrics = recipe.parent / "run" / "metrics.jsonl"
        length, deadline = metrics.stat().st_size, time.monotonic() + 200
        while metrics.stat().st_size == length:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        second = next(rank for rank in ranks if environment(rank.pid)["RANK"] == "1")
        second.kill()
        out, err = process.communicate(timeout=200)
        assert process.returncode == 128 + signal.SIGKILL
        assert err.count("rank 1 was ended by SIGKILL") == 1, err
        assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize(
    "codes, rank", [((0, 0, 0), None), ((0, 1, 2), 1), ((1, -9, 1), 1), ((75, 75, 75), 0), ((1, -6, -9), 1)]
)
def test_of_ranks_that_ended_at_once_the_one_that_was_killed_is_the_first(
    codes: tuple[int, ...], rank: int | None
) -> None:
    """If a rank is killed, another rank may also end before the launcher looks again."""
    ended: Any = [SimpleNamespace(returncode=code) for code in codes]
    assert processes._failed(ended) == rank


def environment(pid: int) -> dict[str, str]:
    return psutil.Process(pid).environ()


@pytest.mark.parametrize(
    "words, variables, message",
    [
        (["--processes", "two"], {}, "--processes two is no number of processes.  Give a number such as 8"),
        (["--processes", "4097"], {}, "--processes 4097 starts all processes on this machine, where at most"),
        (["--processes", "auto"], {}, "--processes auto counts GPUs, but run.device is cpu.  Give a number, such as "),
        (["--processes", "3"], {}, "parallel.cp = 2 does not fit 3 processes"),
        (["--log-dir", "logs"], {}, "--log-dir has an effect only with --processes."),
        (
            ["--processes", "2"],
            {"WORLD_SIZE": "2", "RANK": "0"},
            "but this process is a rank already (WORLD_SIZE=2, RANK",
        ),
    ],
)
def test_what_is_refused_before_any_process_starts(
    recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: list[str], variables: dict[str, str], message: str,
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "start_processes", None)
    assert main(["train", str(recipe), *words]) == 2
    err = capfd.readouterr().err
    assert err.startswith("ConfigError: ") and message in err


def test_the_processes_get_the_words_of_the_command(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(processes, "run_ranks", lambda words, number, **how: started.append((words, number, how)) or 0)
    assert main(["train", str(recipe), "train.num_steps=4", "--processes", "2", "optim.lr=1e-4"]) == 0
    words = ["train", str(recipe), "train.num_steps=4", "optim.lr=1e-4"]
    assert started == [(words, 2, {"grace_s": 100, "log_dir": None})]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert train._number("auto", "auto") == 4
