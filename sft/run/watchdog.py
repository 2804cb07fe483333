"""Ends a rank that hangs, after writing the stacks of its threads.  The launcher then ends the other ranks.

If a phase lasts too long, the stacks of all threads are written to a file per rank and to stderr.  The lifecycle calls
`phase` and `progress`, and passes `on_hang`, which records the hang in run_state.json.

A Python thread watches the phases.  This thread cannot run while the main thread holds the interpreter lock in C code.
Then a thread of `faulthandler`, which does not need the interpreter, writes the stacks and ends the process.
"""

import faulthandler
import os
import sys
import tempfile
import threading
import time
import traceback as traces
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

from sft.files.atomic_files import unusable

SECONDS_BETWEEN_CHECKS = 1.0  # a tenth of the timeout, if that is less
SECONDS_MORE_FOR_FAULTHANDLER = 10.0  # added to the timeout and `linger_s`, because `on_hang` may hang as well

_active: "Watchdog | None" = None


class Watchdog:
    """Ends this process with exit code 1 when a phase, or a part of it, lasts longer than `timeout_s` (None: never).

    The stacks are appended to `folder`/stacks/rank_00003.txt, and printed on stderr.  `on_hang` gets the same text,
    whose first line names rank, phase, seconds and time.  The process then waits `linger_s` seconds, so that other
    ranks that hang for the same reason can write their stacks.  Entering the context raises ConfigError if the folder
    cannot be written, and StorageError if the disk is full or fails.
    """

    def __init__(
        self,
        timeout_s: float | None,
        folder: Path,
        rank: int,
        *,
        on_hang: Callable[[str], None],
        leave: Callable[[int], NoReturn] = os._exit,
        linger_s: float = 5.0,
    ) -> None:
        self._timeout_s, self._rank, self._linger_s = timeout_s, rank, linger_s
        self._path = folder / "stacks" / f"rank_{rank:05d}.txt"
        self._on_hang, self._leave = on_hang, leave
        self._pid = os.getpid()
        self._name = ""  # name of the phase
        self._phase: tuple[str, float] | None = None  # name and start time of the current phase, or part of it
        self._file: TextIO | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._check, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        global _active
        if self._timeout_s is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            except OSError as error:
                raise unusable(f"run.dir: {self._path} cannot be written", self._path.parent, error) from error
            self._thread.start()
            _active = self
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        if self._file is None or os.getpid() != self._pid:
            return
        _active = None
        self.idle()
        self._is_over.set()
        self._thread.join()
        self._file.close()
        with suppress(OSError):  # the folder still has files of other ranks
            if self._path.stat().st_size == 0:
                self._path.unlink()
                self._path.parent.rmdir()

    def phase(self, name: str) -> None:
        """Begin the phase `name`, which may last at most `timeout_s` from now on."""
        self._name = name
        self._begin(name)

    def progress(self, part: str) -> None:
        """Begin a part of the phase, which may last at most `timeout_s` from now on.  Any thread may call it."""
        self._begin(f"{self._name}: {part}")

    def _begin(self, name: str) -> None:
        if self._timeout_s is not None and os.getpid() == self._pid:
            self._phase = name, time.monotonic()
            self._arm()

    def idle(self) -> None:
        """End the phase.  Until the next phase begins, no time limit applies."""
        if self._timeout_s is not None and os.getpid() == self._pid:
            self._phase = None
            faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> None:
        """Make faulthandler end the process if the Python thread has not ended it in time."""
        if self._phase is not None and self._timeout_s is not None and self._file is not None:
            end = self._phase[1] + self._timeout_s + self._linger_s + SECONDS_MORE_FOR_FAULTHANDLER
            seconds = max(0.001, end - time.monotonic())
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def _check(self) -> None:
        assert self._timeout_s is not None
        while not self._is_over.wait(min(SECONDS_BETWEEN_CHECKS, self._timeout_s / 10)):
            phase = self._phase
            if phase is not None and time.monotonic() - phase[1] > self._timeout_s:
                return self._end(*phase)

    def _end(self, phase: str, since: float) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        text = f"rank {self._rank}: '{phase}' has not ended after {time.monotonic() - since:.0f} s, {now}\n{_stacks()}"
        to_stderr, to_file = (partial(print, file=stream, flush=True) for stream in (sys.stderr, self._file))
        outputs: tuple[Callable[[str], None], ...] = (to_stderr, to_file, self._on_hang)
        for output in outputs:
            try:
                output(text)
            except Exception:  # a full disk or a closed stream: the process must still end
                with suppress(Exception):
                    traces.print_exc()
        time.sleep(self._linger_s)
        self._leave(1)


def _stacks() -> str:
    """The stacks of all threads."""
    try:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return file.read()
    except OSError as error:
        return f"the stacks cannot be written: {error}"


def _before_fork() -> None:
    """Cancel faulthandler's timer, because a forked child would wait at its exit for the timer's thread, which it
    lacks."""
    if _active is not None:
        faulthandler.cancel_dump_traceback_later()


def _in_parent() -> None:
    if _active is not None:
        _active._arm()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent)
