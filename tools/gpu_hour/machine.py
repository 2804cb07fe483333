"""Writes versions and hardware of this machine, and the state of the code, as one line of JSON.

    python -m tools.gpu_hour.machine --json FILE

This runs in a separate process, because torch allocates GPU memory in a process that asks for the GPU's name.
"""

import argparse
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from tools.bench import machine
from tools.bench.harness import append

ROOT = Path(__file__).resolve().parents[2]
CODE = ("sft", "tools", "tests/gpu", "recipes")  # the folders on which the measurements depend


def facts() -> dict[str, Any]:
    has_gpu = torch.cuda.is_available()
    return {
        **machine.header(torch.device("cuda" if has_gpu else "cpu")),
        "num_gpus": torch.cuda.device_count() if has_gpu else 0,
        "commit": commit(ROOT),
        "source": digest(ROOT),
        "topology": topology(),
    }


def digest(root: Path) -> str:
    """A hash of the code of CODE in the working tree, committed or not."""
    paths = sorted(path for folder in CODE for path in (root / folder).rglob("*") if path.suffix in (".py", ".yaml"))
    total = hashlib.sha256()
    for path in paths:
        total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return total.hexdigest()[:16]


def commit(root: Path) -> str:
    """The commit, such as `5695716`, or `5695716-dirty` if there are changes that are not committed."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=20).strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def topology() -> str:
    """How the GPUs are connected; empty without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return ""
    process = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30)
    return process.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_hour.machine", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="append the line to this file")
    options = parser.parse_args()
    measured = facts()
    append(options.json, measured)
    print(f"{machine.text(measured)}\n{measured['num_gpus']} GPUs, commit {measured['commit']}\n{measured['topology']}")


if __name__ == "__main__":
    main()
