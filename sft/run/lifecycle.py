"""Manages one start of a run: locks the folder, receives signals, and records how the start ended.

`Lifecycle` combines the lock, the signals, the watchdog and run_state.json over all ranks.  After each step it decides
whether a save is due and whether the run stops.  A signal to one rank stops all ranks after the same step.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sft.config import CheckpointConfig, Config
from sft.console import Console
from sft.errors import ConfigError, SftError
from sft.files.atomic_files import unusable
from sft.parallel.collectives import all_gather_objects, all_reduce_max, broadcast_from_rank0
from sft.parallel.disk import find_disk
from sft.parallel.position import Position
from sft.run import remote_status, status
from sft.run.lock import RunLock
from sft.run.refused_start import recorded
from sft.run.remote_lock import RemoteLock
from sft.run.signals import StopSignals, deadline
from sft.run.watchdog import Watchdog


class Lifecycle:
    """A context that lasts while this process uses the run's folder.

    disk         the disk on which this rank sees the folder
    step         the last completed step
    step_s       seconds that this step took
    ask_to_stop  makes all ranks stop after the current step, as after a stop signal; called by any rank with the reason
    """

    def __init__(
        self, config: Config, folder: Path, position: Position, console: Console, next_step: Callable[[], int]
    ) -> None:
        """next_step: returns the step after which the run will continue; rank 0 calls it after it has locked the
        folder"""
        self._run, self._checkpoint = config.run, config.checkpoint
        self._folder, self._position, self._console, self._next_step = folder, position, console, next_step
        self._locks: list[RunLock | RemoteLock] = []
        self._start_id: str | None = None
        self._done: status.Status | None = None  # of a run that was done, until this start has loaded its state
        self._has_saved = False
        self.step, self.step_s = 0, 0.0
        self.saved_at = time.monotonic()  # checkpoint.save_every_minutes counts from here

    def __enter__(self) -> "Lifecycle":
        """Lock the folder, and record the start.  Collective.  From then on, run_state.json records how the start ends.

        Raises ConfigError if another run is alive in the folder, or if the folder cannot be used.
        """
        run, control = self._run, self._position.control
        with ExitStack() as contexts:
            broadcast_from_rank0(lambda: self._lock_folder(contexts), control)
            self.disk = find_disk(self._folder, control)
            is_other = self.disk.is_writer and not self.disk.has_rank0  # rank 0 has locked its disk
            all_gather_objects(lambda: self._lock_folder(contexts) if is_other else None, control)
            ends = deadline(run.exit_after_minutes, run.grace_s, os.environ)
            stop = StopSignals(grace_s=run.grace_s, deadline=ends, report=self._console.result)
            self._signals = contexts.enter_context(stop)
            self.ask_to_stop = stop.ask
            self._watchdog = contexts.enter_context(
                Watchdog(run.progress_timeout_s, self._folder, self._position.rank, on_hang=self._report_hang)
            )
            contexts.push(self._report_error)

            def next_step() -> int:
                if not self.disk.is_shared:
                    _refuse_own_disks(self._folder, self._checkpoint)
                return self._next_step()

            begin = partial(_begin, self._folder, next_step, self._checkpoint.remote)
            with recorded(self._folder, is_locked=True, is_writer=is_other):
                start, before = broadcast_from_rank0(begin, control)
            if not self.disk.is_shared:  # a rank that fails adds its error to the status on its disk
                self.disk.on_each(partial(status.copy, self._folder, start), control)
            self._contexts = contexts.pop_all()
        self.step, self._start_id, self._earlier = start.step, start.start_id, (start.step_s, start.save_s)
        self._done = before if before is not None and before.status == "done" else None
        if start.starts > 1:
            self._console.say(f"start {start.starts} in a row from step {self.step}: no new checkpoint since the first")
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.__exit__(*error)

    def restored(self, step: int, num_steps: int) -> None:
        """Called when the state after `step` is loaded.  Prints a warning if run.grace_s is too short."""
        self.step, self._num_steps, self._done = step, num_steps, None
        if line := _grace_warning(*self._earlier, self._run.grace_s, self._checkpoint):
            self._console.say(line)

    def phase(self, name: str) -> None:
        """Begin the phase `name`.  run.progress_timeout_s limits the time until the next call of phase or progress."""
        self._watchdog.phase(name)

    def progress(self, part: str) -> None:
        """Begin a part of the phase, such as a pass of a microbatch."""
        self._watchdog.progress(part)

    def stop_reason(self) -> str | None:
        """The reason to stop the run, or None.  Collective."""
        return self._stop_and_late(is_late=False)[0]

    def after_step(self, step: int) -> tuple[bool, str | None]:
        """Whether a save is due after `step` and its evaluation, and the reason to stop the run, or None.

        Collective: every rank gets the same answer.
        """
        config, is_last = self._checkpoint, step >= self._num_steps
        minutes = config.save_every_minutes
        is_late = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        stop, save = self._stop_and_late(is_late=is_late and self._position.rank == 0)
        save |= config.save_every is not None and step % config.save_every == 0
        save |= config.save_last if is_last else stop is not None
        return save, stop

    def report_published(self, step: int, save_s: float) -> None:
        """Write into run_state.json that the checkpoint of `step` is published.  Called on rank 0, by any thread.

        save_s: seconds that this save took
        """
        warning = _grace_warning(self.step_s, save_s, self._run.grace_s, self._checkpoint)
        if not self._has_saved and warning is not None:
            self._console.say(warning)
        self._has_saved = True
        with self._warn_if_unwritable():
            status.progress(self._folder, self._start_id, step=step, step_s=self.step_s, save_s=save_s)
            remote_status.push(self._folder, self._checkpoint.remote)

    def holds_folder(self) -> bool:
        """Whether this run still holds the locks of its folder and of checkpoint.remote.  Called on rank 0, which took
        them."""
        return all(lock.held() for lock in self._locks)

    def end(self, kind: status.Kind, step: int, reason: str | None) -> None:
        """Record that the run ended after `step`.  Called last.  Collective: no rank returns before the file is
        written.

        kind: done or preempted; reason: why the run stopped before its end, or None
        """
        self._signals.disarm()
        self._watchdog.idle()
        self._position.control.barrier().wait()
        steps = {"step": step, "num_steps": self._num_steps}

        def write() -> None:
            status.end(self._folder, self._start_id, kind, **steps, reason=reason)
            remote_status.push(self._folder, self._checkpoint.remote)

        broadcast_from_rank0(write, self._position.control)

    def _stop_and_late(self, *, is_late: bool) -> tuple[str | None, bool]:
        """The reason to stop the run or None, and whether a save is overdue on rank 0.  One all-reduce."""
        stop, late = all_reduce_max([self._signals.reason is not None, is_late], self._position.control)
        return (self._signals.reason or "another rank was asked to stop") if stop else None, bool(late)

    def _lock_folder(self, contexts: ExitStack) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._locks.append(contexts.enter_context(RunLock(self._folder, report=self._console.say)))
        except OSError as error:
            raise unusable(f"run.dir = {self._folder} cannot be written", self._folder, error) from error
        if self._position.rank == 0 and (url := self._checkpoint.remote) is not None:
            with recorded(self._folder, is_locked=True):
                self._locks.append(contexts.enter_context(RemoteLock(url, report=self._console.say)))

    def _report_hang(self, message: str) -> None:
        """Record a hang as a failure.  Called by the watchdog's thread before it ends the process."""
        where = f"{self._folder}/stacks has the stacks of the ranks that hang; look first at a rank without a file"
        hang = TrainingHangs(f"{message.splitlines()[0]} (run.progress_timeout_s).  {where}")
        self._report_error(TrainingHangs, hang, None)

    def _report_error(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            with self._warn_if_unwritable():
                rank = self._position.rank
                status.fail(self._folder, self._start_id, error, rank=rank, step=self.step, finished=self._done)
                remote_status.push(self._folder, self._checkpoint.remote)

    @contextmanager
    def _warn_if_unwritable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._console.say(f"WARNING: {self._folder}/{status.FILE} cannot be written: {error}")
        except SftError as error:  # of checkpoint.remote
            self._console.say(f"WARNING: {error}")


def _begin(
    folder: Path, next_step: Callable[[], int], remote: str | None = None
) -> tuple[status.Status, status.Status | None]:
    """Record the start; if `next_step` raises an SftError, record that the start was refused.  Called on rank 0.

    Returns the status of the start, and that of the start before, or None.
    """
    with recorded(folder, is_locked=True):
        remote_status.pull(folder, remote)
        step = next_step()
    before = status.read(folder)
    start = status.begin(folder, step=step)
    remote_status.push(folder, remote, is_new=True)
    return start, before


def _refuse_own_disks(folder: Path, checkpoint: CheckpointConfig) -> None:
    """Raise ConfigError if a run whose nodes have disks of their own needs a folder that all nodes see."""
    if checkpoint.remote is None:
        needs = (
            "a checkpoint would be in parts on several disks.  Set checkpoint.remote=s3://BUCKET/PATH, through which "
            "nodes with disks of their own share checkpoints"
        )
    elif checkpoint.export_hf != "none":
        needs = (
            f"checkpoint.export_hf = {checkpoint.export_hf} reads whole checkpoints there.  Set "
            "checkpoint.export_hf=none, and export a copy of the last checkpoint after the run (sft export)"
        )
    else:
        return
    raise ConfigError(
        f"run.dir = {folder} is on another disk on each node, and {needs}; or give a run.dir on a disk that all nodes "
        "see."
    )


def _grace_warning(
    step_s: float | None, save_s: float | None, grace_s: float, checkpoint: CheckpointConfig
) -> str | None:
    """A warning if a step and saves do not fit into run.grace_s; None if they do, or if a duration is unknown.

    With checkpoint.async_save, there may be two saves: a background save may have just begun when the run must stop.
    """
    if step_s is None or save_s is None:
        return None
    stop_s = step_s + save_s * (2 if checkpoint.async_save else 1)
    if stop_s <= grace_s:
        return None
    saves = f"up to two saves ({save_s:.1f} s each)" if checkpoint.async_save else f"a save ({save_s:.1f} s)"
    line = f"stopping takes a step ({step_s:.1f} s) and {saves}; run.grace_s is {grace_s} s"
    return f"WARNING: {line}.  This is too short: the last steps would be lost"


class TrainingHangs(RuntimeError):
    """The error that is recorded if a phase took too long.  It is no mistake of the user; another start may succeed."""
