"""Runs to disturb: how one is started, waited for and ended, and what has to be left of it: as if nothing had happened.

A `Case` is a run's folder and its command.  `start` starts it once, as forks of the rank server or, as a user does, by
torchrun; the same command again goes on.  The files of a run are read by themselves, without the code that wrote them.
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
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.faults.inject import FAULTS, LOG
from tests.launching import environments, records
from tests.rank_server import RankServer, default_signals

TOKEN = "SFT_FAULTS_TOKEN"  # in the environment of all that belongs to one start
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
# What a run that is over may leave in its folder.
KEPT = {"checkpoints", "data.json", "metrics.jsonl", "recipe.yaml", "run_state.json", "seen.jsonl", "tensorboard"}
KEPT |= {"bad_steps", "stacks", "traces"}
STEP = "sft.mcore.engine:Engine.train_step"
# Seconds; shorter than both timeouts above, so that what waits for one of them fails.  Nothing takes that long unless
# something is broken, not even on a busy machine.
END_OF_TEST = 240.0
Fault = dict[str, Any]


@dataclass(frozen=True)
class End:
    """Of a run: everything that must not depend on what happened on the way."""

    records: list[dict[str, Any]]
    seen: bytes
    tensors: dict[str, str]

    def differences(self, other: "End") -> list[str]:
        """Nothing where they are bitwise the same."""
        found = [f"record {a} | {b}" for a, b in zip(self.records, other.records) if a != b][:3]
        if len(self.records) != len(other.records):
            found.append(f"{len(self.records)} records | {len(other.records)}")
        if self.seen != other.seen:
            found.append(f"seen.jsonl: {self.seen[-400:]!r} | {other.seen[-400:]!r}")
        keys = sorted(set(self.tensors) | set(other.tensors))
        return found + [f"tensor {k}" for k in keys if self.tensors.get(k) != other.tensors.get(k)][:5]


class Case:
    """One run.  `recipe` is shared by all, with prepared data; `overrides` are this one's."""

    reference: End  # of the run that nobody disturbed

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
        """Forked ranks.  `more`: overrides of this start alone."""
        return self._started(Forked, faults, more, world_size, env)

    def torchrun(self, *faults: Fault, more: Sequence[str] = (), options: Sequence[str] = ()) -> "Launched":
        """As a user starts it, on two processes.  `options` of torchrun itself."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
        return self.launch([*command, "-m", "tests.faults.inject" if faults else "sft", "train"], *faults, more=more)

    def launch(self, command: Sequence[str], *faults: Fault, more: Sequence[str] = ()) -> "Launched":
        """By a command that starts two ranks; the recipe and the overrides are its last words."""
        return self._started(functools.partial(Launched, command), faults, more, 2, None)

    def finish(self, *faults: Fault, **how: Any) -> "Start":
        """The same command once more; it has to come to the end of the run."""
        return self.start(*faults, **how).ends(0)

    def finish_the_same(self, *, beside: str = "$^", **how: Any) -> "Start":
        """And to the end of the run that nobody disturbed."""
        start = self.finish(**how)
        self.assert_same_end(beside=beside)
        return start

    def status(self) -> dict[str, Any]:
        return json.loads((self.run / "run_state.json").read_text())

    def steps(self) -> list[int]:
        """Of the checkpoints with a final name."""
        names = [re.fullmatch(r"iter_(\d{7})", path.name) for path in self.checkpoints.glob("*")]
        return sorted(int(name[1]) for name in names if name)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"iter_{step:07d}"

    def pointed(self) -> int:
        return int(self.pointer.read_text())

    def records(self) -> list[dict[str, Any]]:
        """metrics.jsonl in its order, without what the clock says and without the starts."""
        return records(self.folder, "train", "eval")

    def end(self) -> End:
        """Of the last checkpoint and what lies beside it."""
        tensors = _tensors(self.checkpoint(self.pointed()))
        return End(records=self.records(), seen=(self.run / "seen.jsonl").read_bytes(), tensors=tensors)

    def assert_whole(self, step: int | None = None) -> None:
        """The pointer names a checkpoint of which every byte is what its manifest says; of that step, if given."""
        pointed = self.pointed()
        folder = self.checkpoint(pointed)
        files = json.loads((folder / "manifest.json").read_text())["files"]
        assert {path.name for path in folder.iterdir()} == {*files, "manifest.json"}
        for name, told in files.items():
            content = (folder / name).read_bytes()
            assert len(content) == told["bytes"] and hashlib.sha256(content).hexdigest() == told["sha256"], name
        assert step is None or pointed == step, (pointed, step)

    def assert_left_nothing(self, *, beside: str = "$^") -> None:
        """No process, no file of a save or a write under way; names in checkpoints/ may match `beside`."""
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
        """Done, bitwise as the run that nobody disturbed, and nothing left."""
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


def _tensors(folder: Path) -> dict[str, str]:
    """SHA-256 of every tensor of a checkpoint, weights and moments, by key."""
    reader = FileSystemReader(folder)
    tensors: dict[str, Any] = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in reader.read_metadata().state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    assert any("exp_avg_sq" in key for key in tensors) and len(tensors) > 20, sorted(tensors)
    return {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in tensors.items()}


class Start(ABC):
    """One start of a run."""

    def __init__(self, case: Case, words: list[str], log: Path, env: dict[str, str], world_size: int) -> None:
        self.case, self.log, self.token, self.world_size = case, log, env[TOKEN], world_size
        self.pids: dict[int, str | None] = {}  # and when it was started; in order of rank
        self._is_over = False
        self._launch(words, env)

    @abstractmethod
    def _launch(self, words: list[str], env: dict[str, str]) -> None: ...

    @abstractmethod
    def codes(self) -> list[int | None]:
        """Exit codes of the ranks, or of the launcher alone; None while it runs."""

    def wait(self) -> list[int | None]:
        """For all to end by themselves, and to leave nothing."""
        self.until(lambda: None not in self.codes())
        self.until(lambda: not self.alive())
        self._is_over = True
        return self.codes()

    def ends(self, code: int) -> "Start":
        """By itself, all of it with this exit code."""
        assert set(self.wait()) == {code}, self.told()
        return self

    def says(self, *texts: str) -> "Start":
        """On rank 0, to stdout or stderr."""
        said = self.out() + self.err()
        for text in texts:
            assert text in said, (text, self.told())
        return self

    def until(self, is_so: Any) -> None:
        """Until `is_so()`; a run that does not get there is ended, and the test fails with what it said."""
        deadline = time.monotonic() + END_OF_TEST
        while not is_so():
            if time.monotonic() > deadline:
                told = self.told()
                self.end()
                raise AssertionError(f"not within {END_OF_TEST:g} s: {told}")
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
        deadline = time.monotonic() + END_OF_TEST
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
        return [json.loads(line) for line in text_of(self.log).splitlines()]

    def out(self, rank: int = 0) -> str:
        """From where the recipe has been told."""
        whole = text_of(Path(f"{self.log}.out.{rank}"))
        return whole[whole.find("\nworld_size ") + 1 :]

    def err(self, rank: int = 0) -> str:
        return text_of(Path(f"{self.log}.err.{rank}"))

    def told(self) -> str:
        """All that was said, for a failed test."""
        parts = [f"codes {self.codes()}, struck {self.fired()}"]
        for rank in range(self.world_size):
            parts += [f"--- rank {rank}", self.out(rank)[-2500:], self.err(rank)[-4000:]]
        return "\n".join(parts)


class Forked(Start):
    """By the rank server, which is no launcher: nobody ends the other ranks when one is gone."""

    def _launch(self, words: list[str], env: dict[str, str]) -> None:
        for rank, place in enumerate(environments(self.world_size)):
            out, err = (Path(f"{self.log}.{kind}.{rank}") for kind in ("out", "err"))
            pid = self.case.server.fork("tests.faults.inject", ["train", *words], {**env, **place}, out=out, err=err)
            self.pids[pid] = _born(pid)

    def codes(self) -> list[int | None]:
        return [self.case.server.code(pid) for pid in self.pids]


class Launched(Start):
    """By a launcher; what the ranks print comes through it, into the files of rank 0."""

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
    """(pid, session, token) of all that live."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and fields[0] not in "ZX":
            token = re.search(rf"\b{TOKEN}=(\w+)", text_of(Path(entry.path) / "environ"))  # as when it was started
            yield int(entry.name), int(fields[3]), token[1] if token else None


def _born(pid: int) -> str | None:
    """When a process was started; None: it is gone."""
    fields = _stat(pid)
    return fields[19] if fields else None


def _stat(pid: int) -> list[str]:
    """state, parent, group, session, ..."""
    return text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def text_of(path: Path) -> str:
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
