"""Runs with faults: starts them, waits for them, ends them, and checks that the result equals that of an undisturbed
run.

A `Case` is the folder and the command of a run.  `start` starts it once, as forks of the rank server or, as a user
does, by torchrun; the same command again continues the run.  This module reads the files of a run without the code that
wrote them.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.inject import FAULTS, LOG
from tests.launching import environments, records, tensors
from tests.rank_server import RankServer, default_signals

TOKEN = "SFT_FAULTS_TOKEN"  # environment variable of all processes that belong to one start
RECIPE = """
run: {{dir: runs/none, device: cpu, precision: fp32, timeout_s: 900, progress_timeout_s: 900, grace_s: 30}}
model: {{num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, init_from: random}}
data: {{train: {folder}/chat.jsonl, eval: {folder}/held_out.jsonl, seq_length: 256, cache_dir: {folder}/cache}}
parallel: {{cp: 2}}
train: {{num_steps: 12, global_batch_size: 2, eval_every: 4}}
optim: {{lr: 1e-3}}
checkpoint: {{save_every: 1, async_save: false}}
log: {{tensorboard: false}}
"""
# Names that a finished run may leave in its folder.
KEPT = {"checkpoints", "data.json", "metrics.jsonl", "recipe.yaml", "run_state.json", "seen.jsonl", "tensorboard"}
KEPT |= {"bad_steps", "stacks", "traces"}
STEP = "sft.mcore.engine:Engine.train_step"
# Time limit in seconds, shorter than both timeouts above: a test fails if a process waits for one of these timeouts.
# Unless something is broken, nothing takes that long, even on a busy machine.
END_OF_TEST = 240.0
Fault = dict[str, Any]


@dataclass(frozen=True)
class End:
    """The end state of a run: everything that must not depend on faults on the way."""

    records: list[dict[str, Any]]
    seen: bytes
    tensors: dict[str, str]

    def differences(self, other: "End") -> list[str]:
        """The differences from `other`; empty if both are bitwise equal."""
        found = [f"record {a} | {b}" for a, b in zip(self.records, other.records) if a != b][:3]
        if len(self.records) != len(other.records):
            found.append(f"{len(self.records)} records | {len(other.records)}")
        if self.seen != other.seen:
            found.append(f"seen.jsonl: {self.seen[-400:]!r} | {other.seen[-400:]!r}")
        keys = sorted(set(self.tensors) | set(other.tensors))
        return found + [f"tensor {k}" for k in keys if self.tensors.get(k) != other.tensors.get(k)][:5]


class Case:
    """One run.  `recipe`, with prepared data, is shared by all runs; `overrides` belong to this run."""

    reference: End  # end state of the undisturbed run

    def __init__(self, server: RankServer, recipe: Path, folder: Path, overrides: Sequence[str] = ()) -> None:
        self.server, self.recipe, self.folder = server, recipe, folder
        self.run, self.checkpoints = folder / "run", folder / "run" / "checkpoints"
        self.pointer = self.checkpoints / "latest_checkpointed_iteration.txt"
        self.overrides = [f"run.dir={self.run}", *overrides]
        self.starts: list[Start] = []
        folder.mkdir(exist_ok=True)

    def start(
        self, *faults: Fault, more: Sequence[str] = (), world_size: int = 2, env: dict[str, str] | None = None
    ) -> "Start":
        """Starts forked ranks.  `more`: overrides of this start only."""
        return self._started(Forked, faults, more, world_size, env)

    def torchrun(self, *faults: Fault, more: Sequence[str] = (), options: Sequence[str] = ()) -> "Launched":
        """Starts two ranks with torchrun, as a user does.  `options`: options of torchrun itself."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
        return self.launch([*command, "-m", "tests.faults.inject" if faults else "sft", "train"], *faults, more=more)

    def launch(self, command: Sequence[str], *faults: Fault, more: Sequence[str] = ()) -> "Launched":
        """Starts the run by a command that starts two ranks; the recipe and the overrides are appended to the
        command."""
        return self._started(functools.partial(Launched, command), faults, more, 2, None)

    def finish(self, *faults: Fault, **how: Any) -> "Start":
        """Starts the same command once more, which must reach the end of the run."""
        return self.start(*faults, **how).ends(0)

    def finish_the_same(self, *, beside: str = "$^", **how: Any) -> "Start":
        """Does what `finish` does, and checks that the end state equals that of the undisturbed run."""
        start = self.finish(**how)
        self.assert_same_end(beside=beside)
        return start

    def status(self) -> dict[str, Any]:
        return json.loads((self.run / "run_state.json").read_text())

    def steps(self) -> list[int]:
        """The steps of the checkpoints that have a final name."""
        names = [re.fullmatch(r"iter_(\d{7})", path.name) for path in self.checkpoints.glob("*")]
        return sorted(int(name[1]) for name in names if name)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"iter_{step:07d}"

    def pointed(self) -> int:
        return int(self.pointer.read_text())

    def records(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl in order, without times and without records of starts."""
        return records(self.folder, "train", "eval")

    def end(self) -> End:
        """The end state: the last checkpoint and the files beside it."""
        seen = (self.run / "seen.jsonl").read_bytes()
        return End(records=self.records(), seen=seen, tensors=tensors(self.checkpoint(self.pointed())))

    def assert_whole(self, step: int | None = None) -> None:
        """Asserts that the pointer names a checkpoint whose bytes all agree with its manifest, and which is of `step`,
        if given."""
        pointed = self.pointed()
        folder = self.checkpoint(pointed)
        files = json.loads((folder / "manifest.json").read_text())["files"]
        assert {path.name for path in folder.iterdir()} == {*files, "manifest.json"}
        for name, told in files.items():
            content = (folder / name).read_bytes()
            assert len(content) == told["bytes"] and hashlib.sha256(content).hexdigest() == told["sha256"], name
        assert step is None or pointed == step, (pointed, step)

    def assert_left_nothing(self, *, beside: str = "$^") -> None:
        """Asserts that no process, no file of a save and no unfinished write is left; names in checkpoints/ may match
        `beside`."""
        for start in self.starts:
            assert start.alive() == [], start.told()
        strange = {path.name for path in self.run.iterdir()} - KEPT
        names = [path.name for path in self.checkpoints.iterdir() if path != self.pointer]
        strange |= {name for name in names if not re.fullmatch(rf"iter_\d{{7}}|{beside}", name)}
        assert not strange, strange
        for step in self.steps():
            for name in ("manifest.json", "metadata.json"):
                assert (self.checkpoint(step) / name).exists(), f"half of step {step} is left"

    def assert_same_end(self, *, beside: str = "$^") -> None:
        """Asserts that the run is done, is bitwise equal to the undisturbed run, and has left nothing."""
        self.assert_left_nothing(beside=beside)
        state = self.status()
        assert (state["status"], state["reason"]) == ("done", None), state
        assert state["step"] == state["num_steps"] == state["saved_step"] == self.pointed(), state
        self.assert_whole()
        differences = self.end().differences(self.reference)
        assert not differences, differences

    def _started(self, kind: Any, faults: Any, more: Sequence[str], world_size: int, env: Any) -> Any:
        for before in self.starts:
            before.end()
        words = [str(self.recipe), *self.overrides, *more]
        log = self.folder / f"faults.{len(self.starts)}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", TOKEN: uuid.uuid4().hex, FAULTS: json.dumps(faults), **(env or {})}
        env[LOG] = str(log)
        self.starts.append(kind(self, words, log, env, world_size))
        return self.starts[-1]


MakeCase = Callable[..., Case]
Hit = Callable[..., None]


class Start(ABC):
    """One start of a run."""

    def __init__(self, case: Case, words: list[str], log: Path, env: dict[str, str], world_size: int) -> None:
        self.case, self.log, self.token, self.world_size = case, log, env[TOKEN], world_size
        self.pids: dict[int, str | None] = {}  # pids in order of rank, and when each process was started
        self._is_over = False
        self._launch(words, env)

    @abstractmethod
    def _launch(self, words: list[str], env: dict[str, str]) -> None: ...

    @abstractmethod
    def codes(self) -> list[int | None]:
        """Exit codes of the ranks, or of the launcher alone; None for a process that still runs."""

    def wait(self) -> list[int | None]:
        """Waits until all processes have ended by themselves; checks that none is left."""
        self.until(lambda: None not in self.codes())
        self.until(lambda: not self.alive())
        self._is_over = True
        return self.codes()

    def ends(self, code: int) -> "Start":
        """Waits for the end, and asserts that all processes have exit code `code`."""
        assert set(self.wait()) == {code}, self.told()
        return self

    def says(self, *texts: str) -> "Start":
        """Asserts that rank 0 printed these texts to stdout or stderr."""
        said = self.out() + self.err()
        for text in texts:
            assert text in said, (text, self.told())
        return self

    def until(self, is_so: Any) -> None:
        """Waits until `is_so()`.  After END_OF_TEST seconds, ends the run and fails with its output."""
        deadline = time.monotonic() + END_OF_TEST
        while not is_so():
            if time.monotonic() > deadline:
                told = self.told()
                self.end()
                raise AssertionError(f"not within {END_OF_TEST:g} s: {told}")
            time.sleep(0.01)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Sends a signal to one rank, or to all."""
        for pid in list(self.pids) if rank is None else [list(self.pids)[rank]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Kills all processes that are left."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + END_OF_TEST
        while None in self.codes() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._is_over = True

    def alive(self) -> list[int]:
        """Processes of this start that are left: processes in a session of its ranks, or with its token."""
        if self._is_over:  # the system may have given these pids to other processes
            return []
        mine = [pid for pid, born in self.pids.items() if _born(pid) in (born, None)]
        return [pid for pid, session, token in _processes() if session in mine or token == self.token]

    def fired(self) -> list[Fault]:
        return [json.loads(line) for line in text_of(self.log).splitlines()]

    def out(self, rank: int = 0) -> str:
        """The stdout of a rank, from the line at which it names the recipe."""
        whole = text_of(Path(f"{self.log}.out.{rank}"))
        return whole[whole.find("\nworld_size ") + 1 :]

    def err(self, rank: int = 0) -> str:
        return text_of(Path(f"{self.log}.err.{rank}"))

    def told(self) -> str:
        """The output of all ranks, for the message of a failed test."""
        parts = [f"codes {self.codes()}, struck {self.fired()}"]
        for rank in range(self.world_size):
            parts += [f"--- rank {rank}", self.out(rank)[-2500:], self.err(rank)[-4000:]]
        return "\n".join(parts)


class Forked(Start):
    """A start by the rank server.  The server is no launcher: if one rank ends, the server does not end the others."""

    def _launch(self, words: list[str], env: dict[str, str]) -> None:
        for rank, place in enumerate(environments(self.world_size)):
            out, err = (Path(f"{self.log}.{kind}.{rank}") for kind in ("out", "err"))
            pid = self.case.server.fork("tests.faults.inject", ["train", *words], {**env, **place}, out=out, err=err)
            self.pids[pid] = _born(pid)

    def codes(self) -> list[int | None]:
        return [self.case.server.code(pid) for pid in self.pids]


class Launched(Start):
    """A start by a launcher; the output of all ranks comes through the launcher, into the files of rank 0."""

    def __init__(self, command: Sequence[str], *of_start: Any) -> None:
        self._command = command
        super().__init__(*of_start)

    def _launch(self, words: list[str], env: dict[str, str]) -> None:
        with open(f"{self.log}.out.0", "ab") as out, open(f"{self.log}.err.0", "ab") as err:
            self.process = subprocess.Popen(
                [*self._command, *words], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True, preexec_fn=default_signals,
            )  # fmt: skip

    def codes(self) -> list[int | None]:
        return [self.process.poll()]


def _processes() -> Iterator[tuple[int, int, str | None]]:
    """(pid, session, token) of all living processes."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and fields[0] not in "ZX":
            # environ holds the environment at the start of the process
            token = re.search(rf"\b{TOKEN}=(\w+)", text_of(Path(entry.path) / "environ"))
            yield int(entry.name), int(fields[3]), token[1] if token else None


def _born(pid: int) -> str | None:
    """When a process was started; None if it has ended."""
    fields = _stat(pid)
    return fields[19] if fields else None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: state, parent, group, session, ..."""
    return text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended meanwhile
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
