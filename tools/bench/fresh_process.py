"""Runs a command in a new process, and measures how much a process grows, without the imports of its libraries."""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tools.bench.harness import Refused

ROOT = Path(__file__).resolve().parents[2]


def run(command: str, *words: object) -> None:
    """Runs the command `module:function` with these words as its arguments.  Raises Refused with the output of a
    command that fails."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.run(
        [sys.executable, "-P", "-m", "tools.bench.fresh_process", command, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        output = (process.stderr or process.stdout).strip()
        raise Refused(f"{command} ended with {process.returncode}: {output}")


def main(command: str, *words: str) -> int:
    """Runs in the new process.  Returns the exit status of the command."""
    module, _, name = command.partition(":")
    function: Callable[[], int] = getattr(importlib.import_module(module), name)
    sys.argv = [command, *words]
    return function()


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
