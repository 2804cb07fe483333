"""Runs as processes, as a user starts them: their data, their ranks, and what they leave."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sft.cli import main

GOOD = json.dumps({"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]})
PORTS, LAST_PORT = range(15_000, 32_000), Path(tempfile.gettempdir()) / "sft-tests-last-port"
RECIPE = """
run: {{dir: {folder}/run, device: cpu, precision: fp32}}
model: {{num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, init_from: random}}
data: {{train: {folder}/chat.jsonl, seq_length: 256}}
parallel: {{cp: 2}}
train: {{num_steps: 2, global_batch_size: 1}}
optim: {{lr: 1e-3}}
"""


def launch(folder: Path, overrides: list[str], world_size: int = 2) -> list[subprocess.Popen]:
    """`python -m sft train` as torchrun would start it, without torchrun's own report, on prepared data."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    main(["data", "prepare", str(recipe), *overrides])  # a mistake it finds is found once more
    command = [sys.executable, "-m", "sft", "train", str(recipe), *overrides]
    return [
        subprocess.Popen(command, env={**os.environ, **env}, stdout=-1, stderr=-1, text=True, start_new_session=True)
        for env in environments(world_size)
    ]


def free_port() -> int:
    """A port that nothing on this machine takes before the caller does.

    The kernel gives ports of the ephemeral range to whoever asks for any: to gloo in another test between the choice of
    a port and its use.  So a port below that range, and each test of every process takes the next one.
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
    """What torchrun sets for each rank of one node."""
    port = free_port()
    size = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**size, **master, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def kill(processes: list[subprocess.Popen]) -> list[tuple[str, str]]:
    """The ranks and what they started; returns what each rank printed."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return [process.communicate() for process in processes]


def start(folder: Path, overrides: list[str], world_size: int = 2) -> list[tuple[int, str, str]]:
    """A run to its end: (exit code, out, err) per rank."""
    processes = launch(folder, overrides, world_size)
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    except subprocess.TimeoutExpired:  # the rank that waits says little: the others' words tell why
        raise AssertionError(f"a rank waits for ever: {kill(processes)}") from None
    finally:
        kill(processes)
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, outputs)]


TIMED = (
    "tokens-per-second",
    "tokens-per-second-per-rank",
    "tokens-per-second-supervised",
    "tflops-per-rank",
    "data-wait-share",
    "step-time-s",
    "eval-time-s",
)


def records(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMED} for line in lines if line["kind"] in kinds]
