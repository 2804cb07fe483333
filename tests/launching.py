"""Runs as processes, as a user starts them: their data, their ranks, and what they leave."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from sft.cli import main

GOOD = json.dumps({"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]})
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


def environments(world_size: int) -> list[dict[str, str]]:
    """What torchrun sets for each rank of one node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**size, **master, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def kill(processes: list[subprocess.Popen]) -> None:
    """The ranks and what they started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.communicate()


def start(folder: Path, overrides: list[str], world_size: int = 2) -> list[tuple[int, str, str]]:
    """A run to its end: (exit code, out, err) per rank."""
    processes = launch(folder, overrides, world_size)
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
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
