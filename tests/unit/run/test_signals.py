"""Signals to real processes whose main thread runs C code, as it does during a collective."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from sft.errors import ConfigError
from sft.run import signals
from sft.run.signals import StopSignals, deadline
from tests.unit.fixtures.held import held, threads

ROOT = Path(__file__).resolve().parents[3]
END_OF_TEST = 240.0  # seconds; unless something is broken, no wait takes that long, even on a busy machine


@contextmanager
def ended(pid: int) -> Iterator[None]:
    """Asserts that the process has ended after the block.  By then, another process may have its id."""
    process = os.pidfd_open(pid)
    yield
    assert select.select([process], [], [], END_OF_TEST)[0]
    os.close(process)


# stuck never returns, and no signal interrupts it: it locks a mutex twice; other threads can run Python meanwhile.
HEAD = """
import ctypes, os, signal, sys, threading, time
for number in (signal.SIGHUP, signal.SIGQUIT):  # a test run below nohup hands down that they are ignored
    signal.signal(number, signal.SIG_DFL)
from sft.run import signals
from sft.run.signals import StopSignals, leave_with_parent
mutex = ctypes.create_string_buffer(64)
def stuck():
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
def tell(line):
    print(line, flush=True)
"""
STUCK = """
with StopSignals(grace_s=1000, deadline=None, report=tell):
    print("not flushed", end="")
    os.write(1, b"ready\\n")
    stuck()
"""
FIRST = "SIGUSR1: the run finishes this step, saves and exits; a second signal ends it at once"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program, and waits until it is ready."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, **env: str) -> subprocess.Popen[str]:
        command, env = [sys.executable, "-c", HEAD + program], os.environ | {"PYTHONUNBUFFERED": ""} | env
        process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, cwd=ROOT, env=env)
        started.append(process)
        assert line(process) == "ready"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().rstrip("\n")


def end(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """The exit code of a program, and its output since the last read."""
    late = threading.Timer(END_OF_TEST, process.kill)
    late.start()
    if process.stdin:
        process.stdin.close()
    assert process.stdout and process.stderr
    # `communicate` would miss output that `line` has already buffered
    out, err = process.stdout.read(), process.stderr.read()
    process.wait()
    late.cancel()
    assert "Traceback" not in err, err
    return process.returncode, out.splitlines()


@pytest.mark.parametrize("second, code, name", [(signal.SIGINT, 130, "SIGINT"), (signal.SIGUSR1, 138, "SIGUSR1")])
def test_the_first_is_told_at_once_and_the_second_leaves(
    start: Start, second: signal.Signals, code: int, name: str
) -> None:
    process = start("signals.SECONDS_OF_ECHO = 0.0\n" + STUCK)
    process.send_signal(signal.SIGUSR1)
    assert line(process) == "not flushed" + FIRST
    process.send_signal(second)
    assert end(process) == (code, [f"{name}: exiting at once"])


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_terminal_that_closes_stops_the_run_as_sigterm_does(start: Start, number: signal.Signals) -> None:
    process = start(STUCK)
    process.send_signal(number)
    assert line(process) == f"not flushed{number.name}{FIRST.removeprefix('SIGUSR1')}"
    process.send_signal(signal.SIGTERM)
    assert end(process) == (143, ["SIGTERM: exiting at once"])


def test_what_nohup_ignores_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGQUIT)}
    try:
        with StopSignals(grace_s=60, deadline=None, report=print) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGQUIT)
            assert [signal.getsignal(number) for number in before] == [signal.SIG_IGN] * 2
        assert stop.reason is None
        assert [signal.getsignal(number) for number in before] == [signal.SIG_IGN] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_stdout_is_flushed_before_it_leaves(start: Start) -> None:
    process = start(STUCK.replace("report=tell", "report=lambda line: None"))
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    code, out = end(process)
    assert code in (143, 138) and out == ["not flushed"]  # two signals at the same time may arrive in any order


def test_an_echo_of_a_signal_is_not_a_second_one(start: Start) -> None:
    """SLURM signals torchrun and its workers, and torchrun forwards the signal to the workers."""
    process = start("signals.SECONDS_OF_ECHO = 1000\n" + STUCK)
    process.send_signal(signal.SIGUSR1)
    assert line(process) == "not flushed" + FIRST
    process.send_signal(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143


def test_the_grace_ends(start: Start) -> None:
    process = start(STUCK.replace("1000", "0.2"))
    process.send_signal(signal.SIGUSR1)
    last = "SIGUSR1: the run has not ended within 0.2 s, exiting without a save"
    assert end(process) == (1, ["not flushed" + FIRST, last])


@pytest.mark.parametrize("tell", ["stuck", "broken"])
def test_it_leaves_where_no_line_can_be_said(start: Start, tell: str) -> None:
    program = "signals.SECONDS_TO_PRINT = 0.1\ndef broken(line):\n    raise OSError('no terminal')\n"
    process = start(program + STUCK.replace("1000", "0.2").replace("report=tell", f"report=lambda line: {tell}()"))
    process.send_signal(signal.SIGTERM)
    process.wait(END_OF_TEST)
    assert process.returncode == 1


def test_disarmed(start: Start) -> None:
    """Neither further signals nor the running timer end the process."""
    process = start("""
signals.SECONDS_OF_ECHO = 0
with StopSignals(grace_s=0.3, deadline=(0.0, "late"), report=tell) as it:
    print("ready", flush=True)
    while it._reason is None:
        time.sleep(0.01)
    it.disarm()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    time.sleep(0.6)
    print("then", it.reason)
""")
    process.send_signal(signal.SIGUSR1)
    assert end(process) == (0, [FIRST, "then SIGUSR1"])


def test_what_was_before_comes_back() -> None:
    def ours(number: int, frame: object) -> None:
        pass

    before, interrupt = signal.signal(signal.SIGUSR1, ours), signal.getsignal(signal.SIGINT)
    had = held()
    with StopSignals(grace_s=1, deadline=None, report=print) as it:
        assert signal.getsignal(signal.SIGUSR1) is not ours and len(threads() - had) == 1
    assert signal.signal(signal.SIGUSR1, before) is ours
    assert signal.getsignal(signal.SIGINT) is interrupt
    assert signal.set_wakeup_fd(-1) == -1
    assert held() <= had, it  # the objects still exist, so no file was closed by the garbage collector


def test_a_signal_while_the_time_limit_is_looked_at_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread receives signals, and may run between any two lines of the main thread."""
    with StopSignals(grace_s=1, deadline=(150.0, "end of the job"), report=print) as it:

        def clock() -> float:
            it._reason = "SIGTERM"
            return 100.0

        monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=clock))
        assert (it.reason, it.reason) == ("SIGTERM", "SIGTERM")
        monkeypatch.undo()


def test_time_that_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with StopSignals(grace_s=1, deadline=(150.0, "end of the job"), report=print) as it:
        assert it.reason is None
        now[0] = 150.0
        assert str(it.reason) == "end of the job"
    with StopSignals(grace_s=1, deadline=(150.0, "end of the job"), report=print) as it:
        it.disarm()
        assert it.reason is None  # the run has ended


# Forks


def test_a_forked_child_lives_on_and_does_not_tell_the_parent(start: Start) -> None:
    """torchrun signals all processes of a rank; those that write its checkpoint must continue."""
    process = start("""
with StopSignals(grace_s=1000, deadline=None, report=tell) as it:
    child = os.fork()
    if child == 0:
        print("ready", flush=True)
        sys.stdin.readline()
        os._exit(7)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(child, number)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    time.sleep(0.2)
    print(it.reason, flush=True)
    print(os.waitpid(child, 0)[1] >> 8)
""")
    assert line(process) == "None"
    assert process.stdin
    process.stdin.write("\n")
    assert end(process) == (0, ["7"])


@pytest.mark.parametrize("last", ["pass", "os._exit(0)"])  # the run has ended, or was killed
def test_forked_processes_end_by_signals_once_the_parent_does_not_listen(start: Start, last: str) -> None:
    process = start(f"""
with StopSignals(grace_s=1000, deadline=None, report=tell) as it:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild:
            os.write(writer, f"{{grandchild}}\\n".encode())
        time.sleep(100)
        print("slept", flush=True)
        os._exit(0)
    print("ready", child, os.read(reader, 99).decode(), sep="\\n", end="", flush=True)
    {last}
""")
    child, grandchild = int(line(process)), int(line(process))
    process.wait()
    os.kill(child, signal.SIGTERM)
    os.kill(grandchild, signal.SIGTERM)
    assert end(process) == (0, [])  # returns when no process holds its stdout; a process that slept would print


def test_every_process_of_a_run_forks_with_signals_blocked(start: Start) -> None:
    """Python loses signals that a process receives between its fork and its hooks; blocked signals are delivered after
    the hooks."""
    process = start("""
def look():
    return sorted(number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(signals.SIGNALS))
def tell_of_a_fork():
    signals._before_fork()  # what os.fork calls, in the order in which it does
    blocked = look()
    signals._in_parent()
    tell((blocked, look()))
print("ready", flush=True)
tell_of_a_fork()
with StopSignals(grace_s=1000, deadline=None, report=tell):
    tell_of_a_fork()
    if os.fork() == 0:
        tell_of_a_fork()
        if os.fork() == 0:
            tell_of_a_fork()
            os._exit(0)
        os.wait()
        os._exit(0)
    os.wait()
tell_of_a_fork()
""")
    without, within = "([], [])", "(['SIGHUP', 'SIGINT', 'SIGQUIT', 'SIGTERM', 'SIGUSR1'], [])"
    assert end(process) == (0, [without, within, within, within, without])


def test_a_child_of_a_killed_run_ends_although_another_was_forked_just_now(start: Start) -> None:
    process = start("""
with StopSignals(grace_s=1000, deadline=None, report=tell) as it:
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            time.sleep(1000)
            os._exit(0)
        children.append(child)
        kept = os.dup(it._receiver.fileno())  # the second child has it still, as between its fork and its first line
    print("ready", *children, sep="\\n", flush=True)
    os._exit(0)
""")
    children = [int(line(process)), int(line(process))]
    process.wait()
    with ended(children[0]):
        os.kill(children[0], signal.SIGTERM)
    os.kill(children[1], signal.SIGKILL)
    assert end(process) == (0, [])


def test_a_child_that_leaves_the_context_changes_nothing(start: Start) -> None:
    process = start("""
with StopSignals(grace_s=1000, deadline=None, report=tell) as it:
    child = os.fork()
    if child == 0:
        sys.exit(3)  # unwinds the context
    assert os.waitpid(child, 0)[1] >> 8 == 3
    print("ready", flush=True)
    stuck()
""")
    process.send_signal(signal.SIGUSR1)
    assert line(process) == FIRST


# The end of the available time


@pytest.mark.parametrize(
    "minutes, job_end, expected",
    [
        (None, None, None),
        (None, "5300", (370.0, "end of the job")),  # 300 s from now, minus 30
        (2.0, "5300", (220.0, "run.exit_after_minutes")),
        (10.0, "5300", (370.0, "end of the job")),
        (None, "5001", (71.0, "end of the job")),  # too late for another step
    ],
)
def test_deadlines(
    minutes: float | None, job_end: str | None, expected: tuple[float, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {} if job_end is None else {"SLURM_JOB_END_TIME": job_end}
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 5000.0))
    assert deadline(minutes, 30.0, environ) == expected


@pytest.mark.parametrize("text", ["", "-5", "1e9", "2026-01-01T00:00:00", "5000"])
def test_a_job_end_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 5000.0))
    with pytest.raises(ConfigError, match=f"SLURM_JOB_END_TIME = '{text}' is not the end of .* .now it is 5000"):
        deadline(1.0, 30.0, {"SLURM_JOB_END_TIME": text})


# The launcher


def test_a_worker_does_not_outlive_a_killed_launcher(start: Start) -> None:
    program = """
if os.fork() == 0:
    leave_with_parent()
    print("ready", flush=True)
stuck()
"""
    process = start(program, TORCHELASTIC_RUN_ID="none")
    worker = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    with ended(worker):
        process.kill()


@pytest.mark.parametrize(
    "parents, command, leaves",
    [
        ([50, 50], b"", False),
        ([50, 1], b"", True),  # the process ended between the question and the answer
        ([50, 40], b"", True),  # and another process adopted its children
        ([1, 1], b"/sbin/init\0", True),  # the process had ended before
        ([1, 1], b"/usr/bin/python\0/usr/bin/torchrun\0--nnodes=1\0", False),  # the first process of a container
    ],
)
def test_a_launcher_that_was_gone_before(
    monkeypatch: pytest.MonkeyPatch, parents: list[int], command: bytes, leaves: bool
) -> None:
    class Libc:
        def prctl(self, *arguments: int) -> int:
            assert arguments == (1, 9, 0, 0, 0)
            return 0

    answers = list(parents)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(signals.ctypes, "CDLL", lambda name, use_errno: Libc())
    monkeypatch.setattr(signals.os, "getppid", lambda: answers.pop(0))
    monkeypatch.setattr(signals.os, "_exit", sys.exit)
    monkeypatch.setattr(signals.Path, "read_bytes", lambda path: command)
    if leaves:
        with pytest.raises(SystemExit):
            signals.leave_with_parent()
    else:
        signals.leave_with_parent()


def test_without_torchrun_nothing_is_asked_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(signals.ctypes, "CDLL", lambda *_, **__: pytest.fail("no launcher started this process"))
    signals.leave_with_parent()
