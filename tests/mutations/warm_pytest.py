"""Runs pytest in processes that have already imported the large libraries, so each starts in 1 s instead of 6.

A server imports the libraries once, and forks a process for each call.  The server does not import `sft`, `tools` and
`tests`: the forked process imports them from the copy of the repository that it tests.
"""

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

MOST_PROCESSES = 400  # of one pytest; the largest run of a test has some dozens
SECONDS_BETWEEN_LOOKS = 0.3
OURS = {"sft", "tools", "tests", "__mp_main__"}
FAILED, PASSED = 1, 0  # exit codes of pytest
_PR_SET_CHILD_SUBREAPER = 36

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.mutations.libraries"])


@dataclass(frozen=True)
class Outcome:
    """code: exit code of pytest; -11: it was killed by signal 11; None: it was ended, for the reason `why_ended`."""

    code: int | None
    seconds: float
    output: str
    why_ended: str = ""

    @property
    def passed(self) -> bool:
        return self.code == PASSED

    @property
    def noticed(self) -> bool:
        """Whether a test failed, hung or crashed.  An error before the tests ran does not count."""
        return self.code is None or self.code == FAILED or self.code < 0

    @property
    def failures(self) -> str:
        """The output from the first failure on, at most 4,000 characters."""
        start = re.search(r"^=+ (?:FAILURES|ERRORS) =+$", self.output, re.MULTILINE)
        return self.output[start.start() :][:4000] if start else self.output[-4000:]

    @property
    def by(self) -> str:
        """The test that failed first."""
        if self.code is None:
            return self.why_ended
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        failure = re.search(r"^(?:FAILED|ERROR) (\S+)", self.output, re.MULTILINE)
        return failure[1] if failure else f"exit code {self.code} of pytest"


def run_pytest(copy: Path, tests: Sequence[str], *, limit_s: float, most_processes: int = MOST_PROCESSES) -> Outcome:
    """Runs tests in `copy`.  They import `sft` from the copy, even if another `sft` is installed.

    Ends them with all their processes after `limit_s` seconds, and if they have more than `most_processes` at once.
    """
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        process = _server.Process(target=_in_copy, args=(str(copy), list(tests), output.name))
        process.start()
        why_ended = ""
        while process.exitcode is None and not why_ended:
            process.join(SECONDS_BETWEEN_LOOKS)
            if time.monotonic() - started > limit_s:
                why_ended = f"hung for {limit_s:.0f} s"
            elif len(_processes_of(process.pid)) > most_processes:
                why_ended = f"started more than {most_processes} processes"
        if why_ended:
            _kill_all_of(process.pid)
            process.join()
        code = None if why_ended else process.exitcode
        return Outcome(code, time.monotonic() - started, output.read(), why_ended)


def _processes_of(pid: int | None) -> list[psutil.Process]:
    """The descendants of a process that have not ended."""
    with suppress(psutil.NoSuchProcess):
        return [one for one in psutil.Process(pid).children(recursive=True) if _is_alive(one)]
    return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill_all_of(pid: int | None) -> None:
    """Kill a process and its descendants, the process last: a descendant without a parent becomes a child of it.

    A list of processes may miss one whose parent ends meanwhile.  So two lists in a row must be empty.
    """
    first, num_empty = psutil.Process(pid), 0
    _send([first], signal.SIGSTOP)  # it would end with its child
    while num_empty < 2:
        others = _processes_of(pid)
        num_empty = 0 if others else num_empty + 1
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a process that is stopped starts no other one
            _send(others, number)
    _send([first], signal.SIGKILL)


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _end_with(child: int) -> NoReturn:
    """Wait for all processes that lose their parent, until `child` ends, and end in the same way."""
    pid = 0
    while pid != child:
        pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _in_copy(copy: str, tests: list[str], output: str) -> None:
    """Runs pytest in the forked process.

    Writes no bytecode: Python would use the bytecode of a file that was changed in the same second and kept its size.
    Ends by os._exit, because threads and pools of the tests could keep the process alive.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # processes without a parent stay descendants
    if (child := os.fork()) != 0:
        _end_with(child)
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
