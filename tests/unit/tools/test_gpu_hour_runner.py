"""tools/gpu_hour: limits, failures, kills and continued starts, with steps of a second."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.gpu_hour_steps import ESCAPING, ROW, started, step
from tools.gpu_hour import runner

FACTS = {"date": "2026-11-23 04:00Z", "device": "H100", "source": "0123456789abcdef", "load": 3.0, "commit": "5695716"}


def test_it_goes_on_after_a_failure_and_says_why(tmp_path: Path) -> None:
    steps = [
        step("fails", "print('E rank'); raise ValueError('no such kernel')"),
        step("absent", ROW, packages=("deep-ep",)),
        step("works", ROW),
    ]
    record, written = started(tmp_path / "out", steps)
    results = {name: (result.status, result.reason) for name, result in record.results.items()}
    assert results == {
        "fails": ("failed", "exit code 1: ValueError: no such kernel"),
        "absent": ("skipped", "deep-ep is not installed here (docs/start/install.md)"),
        "works": ("done", ""),
    }
    assert written == ["fails", "", "absent", "", "works", ""]
    assert "no such kernel" in (tmp_path / "out/fails/output.txt").read_text()


def test_torchruns_own_report_is_no_reason() -> None:
    reason, verdict = "ConfigError: parallel.cp = 3 does not fit.", "leak: FAIL: document 3 changed document 5"
    frame = "W1 torch/distributed/elastic/multiprocessing/api.py:9\nChildFailedError: sft FAILED: 1\n=====\n"
    assert runner.failure(f"[rank3]: {reason}\n{frame}") == reason
    assert runner.failure(f"$ python\n{verdict}\nmore\n{frame}") == verdict
    assert runner.failure(f"E       {reason}\n1 failed in 3 s\n") == reason  # as pytest prints it
    assert runner.failure("one\n\n===\n") == "one" and runner.failure("") == "no output"


def pids(output: Path) -> list[int]:
    return [int(line) for line in output.read_text().splitlines() if line.isdecimal()] if output.exists() else []


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_step_ends_at_its_limit_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 1)
    limited = step("hangs", f"{ROW}; {ESCAPING} time.sleep(600)", limit_s=4)
    record, _ = started(tmp_path / "out", [limited, step("next", ROW)])
    assert record.results["hangs"].status == "stopped" and record.results["next"].status == "done"
    assert record.results["hangs"].reason == "its limit of 4 s"
    (pid,) = pids(tmp_path / "out/hangs/output.txt")
    assert not is_alive(pid)
    # output of the step before the failure is kept
    assert (tmp_path / "out/hangs/rows.jsonl").read_text() == '{"case": "a"}\n'


def test_results_of_another_machine_or_code_are_not_mixed(tmp_path: Path) -> None:
    started(tmp_path / "out", [step("works", ROW)])
    with pytest.raises(runner.Unusable) as refused:
        runner.Record.of(tmp_path / "out", {"device": "H200"})
    assert "(device: H100, now H200)" in str(refused.value) and "--fresh" in str(refused.value)
    assert runner.identity(FACTS) == {"device": "H100", "source": "0123456789abcdef"}


KILLED = """
import sys
from pathlib import Path
from tests.unit.gpu_hour_steps import ESCAPING, ROW, started, step
from tools.gpu_hour import runner
from tools.gpu_hour.__main__ import end_by_signals

runner.GRACE_S = 1
end_by_signals()
started(Path(sys.argv[1]), [
    step("first", f"(OUT.parent / 'count').open('a').write('x'); {ROW}"),
    step("second", f"{ROW}; {ESCAPING} time.sleep(0 if (OUT.parent / 'repeated').exists() else 600)"),
    step("third", ROW),
])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_start_keeps_what_it_has_and_the_next_one_continues(tmp_path: Path, number: signal.Signals) -> None:
    out, environment = tmp_path / "out", {**os.environ, "PYTHONPATH": str(runner.ROOT)}
    command = [sys.executable, "-c", KILLED, str(out)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not pids(out / "second/output.txt"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    (pid,) = pids(out / "second/output.txt")
    process.send_signal(number)
    process.wait(240)
    assert is_alive(pid) == (number == signal.SIGKILL)  # no handler could end its child
    stored = json.loads((out / "record.json").read_text())["results"]
    assert list(stored) == ["first"] and stored["first"]["status"] == "done"

    assert runner.end_processes(out) == (2 if number == signal.SIGKILL else 0)  # the next start calls this first
    (out / "repeated").touch()
    subprocess.run(command, env=environment, check=True, timeout=240)
    stored = json.loads((out / "record.json").read_text())["results"]
    assert [result["status"] for result in stored.values()] == 3 * ["done"]
    assert (out / "count").read_text() == "x"


@pytest.mark.parametrize("has_environment", [True, False])
def test_a_signal_inside_the_lock_of_a_wait_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_environment: bool
) -> None:
    """subprocess takes a lock before it asks for the exit code; an exception at this point leaves the lock taken.

    Popen may return before the kernel shows the environment of the new process.
    """
    processes, raised = list[Any](), list[BaseException]()

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            processes.append(self)
            if timeout is None:
                return super().wait()
            self._waitpid_lock.acquire()  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    def run() -> None:
        try:
            runner._run_command([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, tmp_path / "log", 1e9)
        except KeyboardInterrupt as error:
            raised.append(error)

    if not has_environment:
        monkeypatch.setattr(runner, "_is_of", lambda process, out: False)
    monkeypatch.setattr(runner.subprocess, "Popen", Interrupted)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert len(raised) == 1 and not thread.is_alive() and not is_alive(processes[0].pid)
