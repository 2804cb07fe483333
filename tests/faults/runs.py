"""Runs to disturb: how one is started, waited for and ended, and what is left of it.

A `Case` is a run's folder and its command.  `start` starts it once, as forks of the nursery or, as a user does, by
torchrun; the same command again goes on.  What a finished run has to look like is `ends.py`.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.inject import FAULTS, LOG

TOKEN = "SFT_FAULTS_TOKEN"  # in the environment of all that belongs to one start
_OPTIONS = "SFT_FAULTS_TORCHRUN"
RECIPE = """
run: {{dir: runs/none, device: cpu, precision: fp32, timeout_s: 20, step_timeout_s: 30, grace_s: 30}}
model: {{num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4}}
data: {{train: {folder}/chat.jsonl, eval: {folder}/held_out.jsonl, seq_length: 256, cache_dir: {folder}/cache}}
parallel: {{cp: 2}}
train: {{num_steps: 12, global_batch_size: 2, eval_every: 4}}
optim: {{lr: 1e-3}}
checkpoint: {{save_every: 1}}
log: {{tensorboard: false}}
"""
Fault = dict[str, Any]


class Nursery:
    """The process that forks ranks; may be asked from several threads."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.faults.nursery"]
        self._process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, start_new_session=True)
        self._lock = threading.Lock()
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, **what: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


class Case:
    """One run.  `recipe` is shared by all, with prepared data; `overrides` are this one's."""

    def __init__(self, nursery: Nursery, recipe: Path, folder: Path, overrides: Sequence[str] = ()) -> None:
        self.nursery, self.recipe, self.folder = nursery, recipe, folder
        self.run, self.checkpoints = folder / "run", folder / "run" / "checkpoints"
        self.overrides = [f"run.dir={self.run}", *overrides]
        self.starts: list[Start] = []
        folder.mkdir(exist_ok=True)

    def start(
        self, *faults: Fault, more: Sequence[str] = (), world_size: int = 2, env: dict[str, str] | None = None
    ) -> "Start":
        """Forked ranks.  `more`: overrides of this start alone."""
        return self._started(Forked, faults, more, world_size, env)

    def torchrun(self, *faults: Fault, more: Sequence[str] = (), options: Sequence[str] = ()) -> "Start":
        """As a user starts it, on two processes.  `options` of torchrun itself."""
        return self._started(Launched, faults, more, 2, {_OPTIONS: " ".join(options)})

    def finish(self, *, faults: Sequence[Fault] = (), **how: Any) -> "Start":
        """The same command once more; it has to come to the end of the run."""
        start = self.start(*faults, **how)
        assert start.wait() == [0] * len(start.codes()), start.told()
        return start

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "run_state.json").read_text())
        return found

    def steps(self) -> list[int]:
        """Of the checkpoints with a final name."""
        found = [re.fullmatch(r"iter_(\d{7})", path.name) for path in self.checkpoints.glob("*")]
        return sorted(int(match[1]) for match in found if match)

    def pointed(self) -> int:
        return int((self.checkpoints / "latest_checkpointed_iteration.txt").read_text())

    def _started(self, kind: Any, faults: Any, more: Sequence[str], world_size: int, env: Any) -> "Start":
        for before in self.starts:
            before.end()
        words = ["train", str(self.recipe), *self.overrides, *more]
        log = self.folder / f"faults.{len(self.starts)}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", TOKEN: uuid.uuid4().hex, FAULTS: json.dumps(faults), **(env or {})}
        env[LOG] = str(log)
        start: Start = kind(self, words, log, env, world_size)
        self.starts.append(start)
        return start


class Start:
    """One start of a run."""

    def __init__(self, case: Case, words: list[str], log: Path, env: dict[str, str], world_size: int) -> None:
        self.case, self.log, self.token, self.world_size = case, log, env[TOKEN], world_size
        self.pids: dict[int, str | None] = {}  # and when it was started; in order of rank
        self._is_over = False
        self._launch(words, env)

    def _launch(self, words: list[str], env: dict[str, str]) -> None:
        raise NotImplementedError

    def codes(self) -> list[int | None]:
        """Exit codes; of the ranks, or of the launcher alone."""
        raise NotImplementedError

    def wait(self, timeout_s: float = 90.0) -> list[int | None]:
        """For all to end by themselves, and to leave nothing."""
        self.until(lambda: None not in self.codes(), timeout_s)
        self.until(lambda: not self.alive(), 10)
        self._is_over = True
        return self.codes()

    def until(self, is_so: Any, timeout_s: float = 60.0) -> None:
        """Until `is_so()`; a run that does not get there is ended, and the test fails with what it said."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline:
                told = self.told()
                self.end()
                raise AssertionError(f"not within {timeout_s:g} s: {told}")
            time.sleep(0.01)

    def signal(self, number: int, rank: int | None = None) -> None:
        """To one rank, or all."""
        for pid in list(self.pids) if rank is None else [list(self.pids)[rank]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """All of it, whatever is left."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while None in self.codes() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._is_over = True

    def alive(self) -> list[int]:
        """Processes of this start that are left: in a session of its ranks, or with its token."""
        if self._is_over:  # what has these numbers now is something else
            return []
        mine = [pid for pid, born in self.pids.items() if _born(pid) in (born, None)]
        return [pid for pid, session, token in _processes() if session in mine or token == self.token]

    def fired(self) -> list[Fault]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def out(self, rank: int = 0) -> str:
        """From where the recipe has been told."""
        whole = _text(Path(f"{self.log}.out.{rank}"))
        return whole[whole.find("\nworld_size ") + 1 :]

    def err(self, rank: int = 0) -> str:
        return _text(Path(f"{self.log}.err.{rank}"))

    def told(self) -> str:
        """All that was said, for a failed test."""
        parts = [f"codes {self.codes()}, struck {self.fired()}"]
        for rank in range(self.world_size):
            parts += [f"--- rank {rank}", self.out(rank)[-2500:], self.err(rank)[-4000:]]
        return "\n".join(parts)


class Forked(Start):
    """By the nursery, which is no launcher: nobody ends the other ranks when one is gone."""

    def _launch(self, words: list[str], env: dict[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        for rank in range(self.world_size):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world_size, "MASTER_PORT": port}
            place |= {"LOCAL_WORLD_SIZE": self.world_size, "MASTER_ADDR": "127.0.0.1"}
            files = {kind: f"{self.log}.{kind}.{rank}" for kind in ("out", "err")}
            mine = {**env, **{name: str(value) for name, value in place.items()}}
            pid = self.case.nursery.ask(argv=words, env=mine, **files)
            self.pids[pid] = _born(pid)

    def codes(self) -> list[int | None]:
        return [self.case.nursery.ask(of=pid) for pid in self.pids]


class Launched(Start):
    """By torchrun; what the ranks print comes through it, into the files of rank 0."""

    def _launch(self, words: list[str], env: dict[str, str]) -> None:
        module = "sft" if env[FAULTS] == "[]" else "tests.faults.inject"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launcher += env.pop(_OPTIONS).split()
        with open(f"{self.log}.out.0", "ab") as out, open(f"{self.log}.err.0", "ab") as err:
            self.process = subprocess.Popen(
                [*launcher, "-m", module, *words], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip

    def codes(self) -> list[int | None]:
        return [self.process.poll()]


def _processes() -> Iterator[tuple[int, int, str | None]]:
    """(pid, session, token) of all that live."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and fields[0] not in "ZX":
            yield int(entry.name), int(fields[3]), _environ(int(entry.name)).get(TOKEN)


def _born(pid: int) -> str | None:
    """When a process was started; None: it is gone."""
    fields = _stat(pid)
    return fields[19] if fields else None


def _stat(pid: int) -> list[str]:
    """state, parent, group, session, ..."""
    return _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _environ(pid: int) -> dict[str, str]:
    """As it was when the process was started."""
    pairs = (pair.partition("=") for pair in _text(Path(f"/proc/{pid}/environ")).split("\0"))
    return {name: value for name, _, value in pairs}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # gone meanwhile
        return ""


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
