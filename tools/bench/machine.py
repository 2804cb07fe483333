"""Makes the header of a benchmark: date, command, hardware, driver and versions."""

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from sft.checkpoint.train_state import installed


def header(device: torch.device) -> dict[str, Any]:
    """The header as values for JSON; `text` formats it."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%MZ", time.gmtime()),
        "command": shlex.join(sys.orig_argv),
        "versions": {"python": platform.python_version(), **installed()},
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "host_gib": round(_host_bytes() / 2**30, 1),
        "device": f"cpu, {torch.get_num_threads()} threads",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return facts


def text(facts: Mapping[str, Any]) -> str:
    """The header as three lines of text."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    gpu = f", {facts['memory_gib']} GiB, driver {facts['driver']}, CUDA {facts['cuda']}" if "driver" in facts else ""
    host = f"{facts['cores']} cores, load {facts['load']}, {facts['host_gib']} GiB of host memory"
    return f"{facts['date']}  {facts['command']}\n{versions}\n{facts['device']}{gpu}, {host}"


def file_system(folder: Path) -> str:
    """The type of the file system that holds the folder, such as ext4."""
    return subprocess.check_output(["df", "--output=fstype", folder], text=True).split()[-1]


def _host_bytes() -> int:
    """Bytes of host memory that this process may use."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = Path(path).read_text(encoding="utf-8").strip() if Path(path).is_file() else ""
        limits += [int(limit)] if limit.isdecimal() else []
    return min(limits)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(command, text=True, timeout=20).splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
