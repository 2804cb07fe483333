"""The outcomes of tests of a deliberate fault: which count as noticed, and that no process is left."""

import signal
from pathlib import Path

import psutil
import pytest

from tests.mutations.warm_pytest import Outcome, run_pytest

TESTS = """
import os, signal, time

def test_it_passes():
    pass

def test_it_fails():
    assert False

def test_it_crashes():
    os.kill(os.getpid(), signal.SIGSEGV)

def test_it_hangs():
    time.sleep(600)

def test_it_starts_processes_without_end():  # but for the limit of 60, each of them in a session of its own
    for _ in range(60):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    "name, code, is_noticed, by",
    [
        ("it_passes", 0, False, "exit code 0 of pytest"),
        ("it_fails", 1, True, "test_a.py::test_it_fails"),
        ("it_crashes", -signal.SIGSEGV, True, "killed by SIGSEGV"),
        ("it_hangs", None, True, "hung for 3 s"),
        ("it_starts_processes_without_end", None, True, "started more than 20 processes"),
        ("no_such_test", 4, False, None),
    ],
)
def test_how_tests_end(tmp_path: Path, name: str, code: int | None, is_noticed: bool, by: str | None) -> None:
    (tmp_path / "test_a.py").write_text(TESTS)
    limit_s = 3 if name == "it_hangs" else 200
    outcome = run_pytest(tmp_path, [f"test_a.py::test_{name}"], limit_s=limit_s, most_processes=20)
    assert (outcome.code, outcome.noticed) == (code, is_noticed), outcome.output
    assert by is None or outcome.by == by
    assert not [one for one in psutil.process_iter() if _folder(one) == str(tmp_path)]


def _folder(process: psutil.Process) -> str | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else process.cwd()
    except psutil.Error:
        return None


def test_a_run_without_tests_has_noticed_nothing() -> None:
    assert [Outcome(code, 0.0, "").noticed for code in (0, 1, 2, 3, 4, 5, -9, None)] == [
        *(False, True, False, False, False, False, True, True)
    ]
