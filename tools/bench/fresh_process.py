"""What a command takes in a process of its own: seconds and memory, both without importing its libraries."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tools.bench.harness import Refused

ROOT = Path(__file__).resolve().parents[2]


class ProcessTook(NamedTuple):
    """seconds; peak: bytes beyond the libraries; total: bytes with them"""

    seconds: float
    peak: int
    total: int


def measured(folder: Path, command: str, *words: object) -> ProcessTook:
    """What a command, `module:function`, takes with these words as its command line.

    Raises Refused with its output where it fails.  `folder` is where it leaves its numbers.
    """
    result, paths = folder / "took.json", [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.run(
        [sys.executable, "-P", "-m", "tools.bench.fresh_process", str(result), command, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        output = (process.stderr or process.stdout).strip()
        raise Refused(f"{command} ended with {process.returncode}: {output}")
    return ProcessTook(*json.loads(result.read_text(encoding="utf-8")))


def main(result: str, command: str, *words: str) -> int:
    """In the process: run the command, and write what it took to the file `result`; its exit status."""
    module, _, name = command.partition(":")
    function: Callable[[], int] = getattr(importlib.import_module(module), name)
    sys.argv = [command, *words]
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before, start = memory()[0], time.perf_counter()
    status = function()
    seconds, total = time.perf_counter() - start, memory()[1]
    Path(result).write_text(json.dumps(ProcessTook(seconds, total - before, total)), encoding="utf-8")
    return status


def memory() -> tuple[int, int]:
    """(now, at most) of this process, bytes.  getrusage would count what the parent held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":") for line in lines if line.startswith("Vm"))
    return int(values["VmRSS"].split()[0]) << 10, int(values["VmHWM"].split()[0]) << 10


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
