"""A fork of the rank server is as a command of its own: session, environment, folder, output and exit code."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.rank_server import RankServer, rank_server

DEADLINE_S = 240.0
SAYS = """
import os, sys
print(sorted(os.environ), os.getcwd(), os.getsid(0) == os.getpid(), sys.stdin.read(), flush=True)
print("an error", file=sys.stderr, flush=True)
os._exit(3)
"""


def code_of(server: RankServer, pid: int) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while (code := server.code(pid)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return code


def test_a_fork_has_what_its_caller_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out, err = tmp_path / "out", tmp_path / "err"
    pid = rank_server().fork("timeit", ["-n1", "-r1", SAYS], {"RANK": "1"}, out=out, err=err)
    assert code_of(rank_server(), pid) == 3 == rank_server().code(pid)
    assert out.read_text() == f"['RANK'] {tmp_path} True \n" and err.read_text() == "an error\n"


def test_a_fork_that_is_killed(tmp_path: Path) -> None:
    words = ["-n1", "-r1", "import time; time.sleep(9999)"]
    pid = rank_server().fork("timeit", words, {}, out=tmp_path / "out", err=tmp_path / "err")
    assert rank_server().code(pid) is None
    os.kill(pid, signal.SIGKILL)
    assert code_of(rank_server(), pid) == -9
