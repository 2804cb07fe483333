"""Starts runs as processes: prepares their data, lets a rank server fork their ranks, and reads their output and
files."""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from sft.cli import main
from tests.rank_server import rank_server

GOOD = json.dumps({"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]})
PORTS, LAST_PORT = range(15_000, 32_000), Path(tempfile.gettempdir()) / "sft-tests-last-port"
TIMEOUT_S = 240.0  # of a whole run
RECIPE = """
run: {{dir: {folder}/run, device: cpu, precision: fp32}}
model: {{num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, init_from: random}}
data: {{train: {folder}/chat.jsonl, seq_length: 256}}
parallel: {{cp: 2}}
train: {{num_steps: 2, global_batch_size: 1}}
optim: {{lr: 1e-3}}
"""
# The same run of the model in {folder}/source.
HF_RECIPE = """
run: {{dir: {folder}/run, device: cpu, precision: fp32}}
model: {{hf: {folder}/source}}
data: {{train: {folder}/chat.jsonl, tokenizer: byte, seq_length: 256}}
parallel: {{cp: 2}}
train: {{num_steps: 2, global_batch_size: 1}}
optim: {{lr: 1e-3}}
"""


class Rank:
    """A process such as a rank of a run, forked by the rank server.  Its output is in files of a temporary folder.

    words: its arguments; module: the module that it runs, in the working folder or on the path of modules
    """

    def __init__(self, words: list[str], environ: dict[str, str], module: str = "sft") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rank-")
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        self.pid = rank_server().fork(module, words, environ, out=self._out, err=self._err)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return rank_server().code(self.pid)

    def kill(self) -> None:
        """Kills the rank and the processes that it started."""
        while self.poll() is None:
            for kill in (os.killpg, os.kill):  # just after its fork, it has no group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)

    def output(self) -> tuple[str, str]:
        """The stdout and the stderr of the rank."""
        return self._out.read_text(), self._err.read_text()


def launch(folder: Path, overrides: list[str], world_size: int = 2) -> list[Rank]:
    """Starts the ranks of `sft train` as torchrun would start them, but without torchrun's report, on prepared data."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    # if `sft data prepare` finds a mistake, `sft train` finds it again
    main(["data", "prepare", str(recipe), *overrides])
    words = ["train", str(recipe), *overrides]
    return [Rank(words, {**os.environ, **environ}) for environ in environments(world_size)]


def free_port() -> int:
    """A port that no other process of this machine takes before the caller binds it.

    If a program asks for any port (for example gloo in another test), the kernel gives it a port of the ephemeral
    range.  So this function returns a port below that range, and counts ports up over all tests of every process.
    """
    with LAST_PORT.open("a+") as last:
        fcntl.flock(last, fcntl.LOCK_EX)
        last.seek(0)
        port = int(last.read() or 0)
        while True:
            port = PORTS.start + (port + 1 - PORTS.start) % len(PORTS)
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                break
        last.truncate(0)
        last.write(str(port))
    return port


def environments(world_size: int) -> list[dict[str, str]]:
    """The environment variables that torchrun sets for each rank of one node."""
    port = free_port()
    size = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**size, **master, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def kill(ranks: list[Rank]) -> list[tuple[str, str]]:
    """Kills the ranks and the processes that they started.  Returns (stdout, stderr) of each rank."""
    for rank in ranks:
        rank.kill()
    return [rank.output() for rank in ranks]


def start(folder: Path, overrides: list[str], world_size: int = 2) -> list[tuple[int, str, str]]:
    """Runs all ranks to the end.  Returns (exit code, stdout, stderr) of each rank."""
    return ended(launch(folder, overrides, world_size))


def ended(ranks: list[Rank]) -> list[tuple[int, str, str]]:
    """Waits for all ranks.  Returns (exit code, stdout, stderr) of each rank."""
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while None in (codes := [rank.poll() for rank in ranks]):
            # A rank that waits for others prints little: the output of the other ranks shows the reason.
            assert time.monotonic() < deadline, f"a rank waits for ever: {codes} {kill(ranks)}"
            time.sleep(0.02)
    finally:
        outputs = kill(ranks)
    return [(code, out, err) for code, (out, err) in zip(codes, outputs, strict=True) if code is not None]


TIMED = (
    "tokens-per-second",
    "tokens-per-second-per-rank",
    "tokens-per-second-supervised",
    "tflops-per-rank",
    *("data-wait-share", "data-wait-rank", "passes-time-s", "passes-time-median-s", "passes-rank"),
    "step-time-s",
    "eval-time-s",
)


def records(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without values that depend on the clock."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [untimed(line) for line in lines if line["kind"] in kinds]


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in TIMED}


def tensors(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every tensor of a checkpoint, weights and moments, by key."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(checkpoint)
    stored: dict[str, Any] = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in reader.read_metadata().state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(stored, storage_reader=reader, no_dist=True)
    assert any("exp_avg_sq" in key for key in stored) and len(stored) > 20, sorted(stored)
    return {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in stored.items()}
