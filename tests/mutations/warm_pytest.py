"""Runs pytest in processes that have already imported the large libraries, so each starts in 1 s instead of 6.

A server imports the libraries once, and forks a process for each call.  The server does not import `sft`, `tools` and
`tests`: the forked process imports them from the copy of the repository that it tests.
"""

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OURS = {"sft", "tools", "tests", "__mp_main__"}
FAILED, PASSED = 1, 0  # exit codes of pytest

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.mutations.libraries"])


@dataclass(frozen=True)
class Outcome:
    code: int | None  # exit code of pytest; None: the tests hung
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        return self.code == PASSED

    @property
    def noticed(self) -> bool:
        """Whether a test failed or hung.  An error before the tests ran does not count."""
        return self.code in (FAILED, None)

    @property
    def failures(self) -> str:
        """The output from the first failure on, at most 4,000 characters."""
        start = re.search(r"^=+ (?:FAILURES|ERRORS) =+$", self.output, re.MULTILINE)
        return self.output[start.start() :][:4000] if start else self.output[-4000:]

    @property
    def by(self) -> str:
        """The test that failed first."""
        if self.code is None:
            return f"hung for {self.seconds:.0f} s"
        failure = re.search(r"^(?:FAILED|ERROR) (\S+)", self.output, re.MULTILINE)
        return failure[1] if failure else f"exit code {self.code} of pytest"


def run_pytest(copy: Path, tests: Sequence[str], *, limit_s: float) -> Outcome:
    """Runs tests in `copy`.  They import `sft` from the copy, even if another `sft` is installed."""
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        process = _server.Process(target=_in_copy, args=(str(copy), list(tests), output.name))
        process.start()
        process.join(limit_s)
        code = process.exitcode
        if code is None and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        return Outcome(code, time.monotonic() - started, output.read())


def _in_copy(copy: str, tests: list[str], output: str) -> None:
    """Runs pytest in the forked process.

    Writes no bytecode: Python would use the bytecode of a file that was changed in the same second and kept its size.
    Ends by os._exit, because threads and pools of the tests could keep the process alive.
    """
    os.setsid()
    os.chdir(copy)
    os.environ.update(PYTHONPATH=copy, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    sys.dont_write_bytecode = True
    sys.path.insert(0, copy)
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    code = pytest.main(["-x", "-q", "--tb=short", "--assert=plain", "-p", "no:cacheprovider", *tests])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))
