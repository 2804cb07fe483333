"""One start of a run, seen from outside: it locks the folder, receives signals, and reports how it ended.

Joins the lock, the signals, the watchdog and run_state.json over all ranks.  Decides after each step whether a save is
due and whether the run stops: a signal to one rank stops all ranks after the same step.  Does not know what a
checkpoint holds.
"""

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from sft.config import Config
from sft.console import Console
from sft.errors import ConfigError
from sft.parallel.collectives import all_reduce_max, broadcast_from_rank0
from sft.parallel.position import Position
from sft.run import status
from sft.run.lock import RunLock
from sft.run.signals import StopSignals, deadline
from sft.run.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True)
class Due:
    """What is due after a step."""

    save: bool
    stop: str | None  # why the run stops


class Published(Protocol):
    """The newest published checkpoint, as a saver knows it."""

    published: int | None  # its step
    took_s: float | None  # from the start of its save until it was published


class Lifecycle:
    """A context around everything that happens in the run's folder.

    step    the last one done
    step_s  seconds that it took
    """

    def __init__(self, config: Config, folder: Path, position: Position, console: Console) -> None:
        self._run, self._checkpoint = config.run, config.checkpoint
        self._folder, self._position, self._console = folder, position, console
        self._contexts = ExitStack()
        self._lock: RunLock | None = None
        self.step, self.step_s = 0, 0.0
        self._num_steps: int | None = None
        self._start_id: str | None = None
        self._saved_at = time.monotonic()
        self._reported_save: int | None = None

    def __enter__(self) -> "Lifecycle":
        run = self._run
        broadcast_from_rank0(self._lock_folder, self._position.control)
        try:
            ends = deadline(run.exit_after_minutes, run.grace_s, os.environ)
            self._signals = self._contexts.enter_context(
                StopSignals(grace_s=run.grace_s, deadline=ends, report=self._console.say)
            )
            self._watchdog = self._contexts.enter_context(
                Watchdog(run.step_timeout_s, self._folder, self._position.rank, on_hang=self._report_hang)
            )
        except BaseException:
            self._contexts.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._report_failure(error)
        self._contexts.__exit__(kind, error, traceback)

    def begin(self, step: int) -> None:
        """The run will continue after `step`.  From here on run_state.json says how this start ends.  Collective."""
        self.step = step
        before = broadcast_from_rank0(lambda: status.begin(self._folder, step=step), self._position.control)
        self._start_id = before.start_id
        if before.starts > 1:
            self._console.say(f"start {before.starts} in a row from step {step}, without a new checkpoint between")
        self._earlier = before.step_s, before.save_s

    def restored(self, step: int, num_steps: int) -> None:
        """The state after `step` is in memory.  Reports step and save times of earlier starts."""
        self.step, self._num_steps = step, num_steps
        if line := _grace_line(*self._earlier, self._run.grace_s):
            self._console.say(line)

    def phase(self, name: str) -> None:
        """The phase `name` begins; run.step_timeout_s limits how long it may take."""
        self._watchdog.phase(name)

    def stop_reason(self) -> str | None:
        """Why the run is to stop, or None.  Collective."""
        return self._stop_and_late(is_late=False)[0]

    def after_step(self, step: int) -> Due:
        """Whether a save is due after `step` and its evaluation, and whether the run stops.

        Collective: every rank gets the same answer.
        """
        config, is_last = self._checkpoint, step == self._num_steps
        minutes = config.save_every_minutes
        is_late = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        stop, save = self._stop_and_late(is_late=is_late and self._position.rank == 0)
        save |= config.save_every is not None and step % config.save_every == 0
        save |= config.save_last if is_last else stop is not None
        return Due(save=save, stop=stop)

    def save_ended(self) -> None:
        """Training goes on after a save; checkpoint.save_every_minutes counts from here."""
        self._saved_at = time.monotonic()

    def report_published(self, saver: Published) -> None:
        """Writes a newly published checkpoint into run_state.json.  A background save may have ended at any time."""
        step = saver.published
        if self._position.rank != 0 or step is None or step == self._reported_save:
            return
        if self._reported_save is None and (line := _grace_line(self.step_s, saver.took_s, self._run.grace_s)):
            self._console.say(line)
        self._reported_save = step
        status.progress(self._folder, step=step, step_s=self.step_s, save_s=saver.took_s, start_id=self._start_id)

    def holds_folder(self) -> bool:
        """Whether this run still holds the lock of its folder.  For rank 0, which took it."""
        return self._lock is None or self._lock.held()

    def end(self, kind: status.Kind, step: int, reason: str | None) -> None:
        """The last call.  Collective: no rank returns before run_state.json says how the run ended."""
        self._signals.disarm()
        self._watchdog.idle()
        self._position.control.barrier().wait()
        broadcast_from_rank0(
            lambda: status.end(
                self._folder, kind, step=step, num_steps=self._num_steps, reason=reason, start_id=self._start_id
            ),
            self._position.control,
        )

    def _stop_and_late(self, *, is_late: bool) -> tuple[str | None, bool]:
        """Why the run stops, and whether rank 0 finds that a save is late; in one all-reduce."""
        stop, late = all_reduce_max([self._signals.reason is not None, is_late], self._position.control)
        return (self._signals.reason or "another rank was asked to") if stop else None, bool(late)

    def _lock_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._contexts.enter_context(RunLock(self._folder, report=self._console.say))
        except OSError as error:
            raise ConfigError(f"run.dir = {self._folder} cannot be written: {error}.") from error

    def _report_hang(self, message: str) -> None:
        """Called by the watchdog's thread; this process ends next."""
        where = f"{self._folder}/stacks has the stacks of all ranks; a rank without a file hung itself"
        self._report_failure(TrainingHangs(f"{message.splitlines()[0]} (run.step_timeout_s).  {where}"))

    def _report_failure(self, error: BaseException) -> None:
        try:
            status.fail(self._folder, error, rank=self._position.rank, step=self.step, start_id=self._start_id)
        except OSError as unwritable:
            self._console.say(f"warning: {self._folder}/{status.FILE} cannot be written: {unwritable}")


def _grace_line(step_s: float | None, save_s: float | None, grace_s: float) -> str | None:
    """Whether a step and a save fit into the time between a signal and the end; None where a time is unknown."""
    if step_s is None or save_s is None:
        return None
    line = f"stopping takes a step ({step_s:.1f} s) and a save ({save_s:.1f} s); run.grace_s is {grace_s} s"
    return line if step_s + save_s <= grace_s else f"WARNING: {line}: too short, the last steps would be lost"


class TrainingHangs(RuntimeError):
    """Not a mistake of the user: another start may succeed."""
