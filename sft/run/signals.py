"""Stops a run before its last step, because of a signal or a time limit.

After the first signal, the run finishes the step and saves.  After a second signal, the process exits at once.  The
lifecycle reads `reason`, and stops all ranks after the same step.

The main thread may wait in a collective for minutes, and Python's signal handlers cannot run meanwhile.  So a thread
receives every signal through Python's wakeup file descriptor, to which the C handler writes.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from sft.errors import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# `nohup` starts a process that ignores SIGHUP, and a shell starts one in the background that ignores SIGQUIT.
_STAY_IGNORED = (signal.SIGHUP, signal.SIGQUIT)
# SLURM signals every process of a job, and torchrun forwards its signal.  Such a repetition is not a second signal.
SECONDS_OF_ECHO = 1.0
SECONDS_TO_PRINT = 2.0  # limit for printing a line or flushing, because the thread that holds the stream may hang

_END = 0  # byte that ends the receiving thread; not a signal
_PROBE = 255  # byte that a forked child sends to check whether its parent still listens
_PR_SET_PDEATHSIG = 1

_active: "StopSignals | None" = None
_is_handling = False  # whether the handlers of a context are installed, by this process or by one that forked it
_forking = threading.local()  # the signal mask of the forking thread before the fork


class StopSignals:
    """Receives the signals that stop a run.  A context for the main thread; only one may be active.

    grace_s   seconds from the first signal until the process exits without a save, with exit code 1
    deadline  the monotonic time at which the run stops, and the reason (`deadline`); None: no time limit
    report    prints a line

    After a second signal, the process exits at once with exit code 128 + number of the signal.

    torchrun sends signals to all processes of a rank, including children that a library forked.  The children ignore
    signals while the context lasts and the parent lives.  After the end of the context or of the parent, a signal ends
    a child as usual.
    """

    def __init__(self, *, grace_s: float, deadline: tuple[float, str] | None, report: Callable[[str], None]) -> None:
        self._grace_s, self._deadline, self._report = grace_s, deadline, report
        self._pid = os.getpid()
        self._child_pid: int | None = None  # this process, if the parent forked it inside the context
        self._reason: str | None = None
        self._is_disarmed = False

    def __enter__(self) -> "StopSignals":
        global _active, _is_handling
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {number: signal.signal(number, self._handle) for number in received()}
        _active, _is_handling = self, True
        return self

    def __exit__(self, *error: object) -> None:
        global _active, _is_handling
        if os.getpid() != self._pid:  # a forked child that ends with an exception
            return
        _active, _is_handling = None, False
        for number, handler in self._handlers_before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._sender.setblocking(True)
        self._sender.send(bytes([_END]))
        self._thread.join()
        self._receiver.shutdown(socket.SHUT_RDWR)  # a child that was forked just now may still have the socket open
        self._receiver.close()
        self._sender.close()

    @property
    def reason(self) -> str | None:
        """The reason to stop, in a few words; None if the run goes on."""
        if self._reason is None and self._deadline is not None and not self._is_disarmed:
            ends_at, why = self._deadline
            if time.monotonic() >= ends_at:  # otherwise no assignment, because the thread may set `_reason`
                self._reason = self._reason or why
        return self._reason

    def ask(self, reason: str) -> None:
        """Make the run stop as after a first signal, without a time limit."""
        self._reason = self._reason or reason

    def disarm(self) -> None:
        """Ignore signals and the time limit from now on.  Called when the run ends by itself."""
        self._is_disarmed = True

    def _listen(self) -> None:
        first, received_at = 0, 0.0
        while True:
            is_timed = first and not self._is_disarmed
            self._receiver.settimeout(max(0.001, received_at + self._grace_s - time.monotonic()) if is_timed else None)
            try:
                received = self._receiver.recv(64)
            except TimeoutError:
                if not self._is_disarmed:
                    line = f"{_name(first)}: the run has not ended within {self._grace_s:g} s, exiting without a save"
                    return self._leave_now(1, line)
                continue
            for number in received:
                if number == _END:
                    return
                if number not in SIGNALS or self._is_disarmed:
                    continue
                if not first:
                    first, received_at = number, time.monotonic()
                    self._reason = self._reason or _name(number)
                    line = "the run finishes this step, saves and exits; a second signal ends it at once"
                    _bounded(lambda: self._report(f"{_name(first)}: {line}"))
                elif number != first or time.monotonic() - received_at > SECONDS_OF_ECHO:
                    return self._leave_now(128 + number, f"{_name(number)}: exiting at once")

    def _leave_now(self, code: int, line: str) -> None:
        for action in (lambda: self._report(line), lambda: sys.stdout.flush(), lambda: sys.stderr.flush()):
            _bounded(action)
        os._exit(code)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python's handler of the signals.  Does nothing in the parent, where `_listen` handles them.  Ends a forked
        child, unless its parent still listens."""
        if os.getpid() != self._pid and not self._parent_listens():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _parent_listens(self) -> bool:
        # After the parent has ended, a process that it forked just before may still have the receiver open.
        if os.getpid() == self._child_pid and os.getppid() != self._pid:
            return False
        try:
            self._sender.send(bytes([_PROBE]))
        except BlockingIOError:  # the buffer is full: the parent exists
            return True
        except OSError:
            return False
        return True


def received() -> list[signal.Signals]:
    """The signals that stop a run of this process."""
    return [number for number in SIGNALS if not _stays_ignored(number)]


def _stays_ignored(number: signal.Signals) -> bool:
    return number in _STAY_IGNORED and signal.getsignal(number) is signal.SIG_IGN


def _before_fork() -> None:
    """Block signals until `_in_child` or `_in_parent` has run after the fork.

    Otherwise, a signal to the new child would arrive in the parent's socket.  Python also drops signals that a new
    process receives before its hooks run, so a child of a child would ignore a signal that should end it.
    """
    if _is_handling:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _in_parent() -> None:
    if (mask := _forking.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    """Disconnect a child from the parent's socket, because the child's signals do not concern the run."""
    global _active
    if _active is not None:
        signal.set_wakeup_fd(-1)
        _active._receiver.close()
        _active._child_pid = os.getpid()
        _active = None
    _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


def deadline(exit_after_minutes: float | None, grace_s: float, environ: Mapping[str, str]) -> tuple[float, str] | None:
    """The monotonic time at which to stop, and the reason; None if nothing limits the run.

    The time is `exit_after_minutes` from now, or `grace_s` before the end of the SLURM job if that is earlier.
    """
    limits = []
    if exit_after_minutes is not None:
        limits.append((time.monotonic() + 60 * exit_after_minutes, "run.exit_after_minutes"))
    if (text := environ.get("SLURM_JOB_END_TIME")) is not None:
        now = time.time()
        if not text.strip().isdecimal() or int(text) <= now:
            raise ConfigError(
                f"SLURM_JOB_END_TIME = {text!r} is not the end of a running job: it must be a future time in seconds "
                f"since 1970 (now it is {int(now)}).  Unset the variable if it was set for another job."
            )
        limits.append((time.monotonic() + int(text) - now - grace_s, "end of the job"))
    return min(limits, default=None)


def leave_with_parent() -> None:
    """Make the kernel end this process when its launcher ends.  Works under torchrun on Linux; elsewhere does nothing.

    Otherwise, ranks would continue to train without a launcher, and the next start would be refused.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    _end_with_parent()
    # If the launcher ended before the call, the parent is process 1.  In a container, process 1 may be the launcher.
    if os.getppid() != parent or (parent == 1 and not _is_launcher(1)):
        print("the launcher has ended, so this process exits", file=sys.stderr, flush=True)
        os._exit(1)


def leave_with(parent: int) -> None:
    """Make the kernel end this process when `parent`, the process that started it, ends.  On Linux only."""
    if sys.platform.startswith("linux"):
        _end_with_parent()
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def _end_with_parent() -> None:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _is_launcher(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    names = (b"torchrun", b"torch.distributed", b"torch/distributed", b"--processes")
    return any(name in word for word in words for name in names)


def _bounded(action: Callable[[], object]) -> None:
    """Run `action` for a limited time, so that a line that cannot be printed does not prevent the exit."""

    def attempt() -> None:
        with suppress(Exception):  # a closed stream, a full disk
            action()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(SECONDS_TO_PRINT)


def _name(number: int) -> str:
    return signal.Signals(number).name
