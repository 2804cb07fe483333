"""Measures seconds and memory of a command in a new process, without the imports of the command's libraries."""

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
    """Seconds of a command.  total: peak bytes of its process; peak: total minus the bytes after the imports"""

    seconds: float
    peak: int
    total: int


def measured(folder: Path, command: str, *words: object) -> ProcessTook:
    """Runs the command `module:function` with these words as its arguments.

    The new process writes its numbers to a file in `folder`.  Raises Refused with the output if the command fails.
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
    """Runs in the new process.  Runs the command, writes its seconds and bytes to `result`, returns its exit status."""
    module, _, name = command.partition(":")
    function: Callable[[], int] = getattr(importlib.import_module(module), name)
    sys.argv = [command, *words]
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the process
    before, start = memory()[0], time.perf_counter()
    status = function()
    seconds, total = time.perf_counter() - start, memory()[1]
    Path(result).write_text(json.dumps(ProcessTook(seconds, total - before, total)), encoding="utf-8")
    return status


def growth(work: Callable[[], object]) -> dict[str, float]:
    """Seconds of `work`, and the bytes by which this process grew during it at most."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the process
    before, start = memory()[0], time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - start, "peak": memory()[1] - before}


def memory() -> tuple[int, int]:
    """(current, peak) memory of this process in bytes.  getrusage would include the peak of the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":") for line in lines if line.startswith("Vm"))
    return int(values["VmRSS"].split()[0]) << 10, int(values["VmHWM"].split()[0]) << 10


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
