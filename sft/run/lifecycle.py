"""One start of a run, as the world outside sees it: it holds the folder, hears signals, and says how it ended.

Puts the parts of `lifecycle` together over all ranks: what one rank is asked, all do after the same step.  Does not
know what a step or a checkpoint is.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from sft.config import RunConfig
from sft.console import Console
from sft.errors import ConfigError
from sft.parallel.collectives import all_reduce_max, broadcast_from_rank0
from sft.parallel.position import Position
from sft.run import status
from sft.run.lock import RunLock
from sft.run.signals import StopSignals, deadline
from sft.run.watchdog import Watchdog


class Lifecycle:
    """A context around everything that happens in the run's folder.

    `step` is the last one done, for what is said when something fails; whoever trains moves it on.
    """

    def __init__(self, config: RunConfig, folder: Path, position: Position, console: Console) -> None:
        self._config, self._folder, self._position, self._console = config, folder, position, console
        self._held = ExitStack()
        self._lock: RunLock | None = None
        self.step = 0
        self._id: str | None = None

    def __enter__(self) -> "Lifecycle":
        config = self._config
        broadcast_from_rank0(self._take_folder, self._position.control)
        try:
            ends = deadline(config.exit_after_minutes, config.grace_s, os.environ)
            self._stop = self._held.enter_context(
                StopSignals(grace_s=config.grace_s, deadline=ends, tell=self._console.say)
            )
            self._watchdog = self._held.enter_context(
                Watchdog(config.step_timeout_s, self._folder, self._position.rank, on_hang=self._hangs)
            )
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._failed(error)
        self._held.__exit__(kind, error, traceback)

    def begin(self, step: int) -> None:
        """The run is to go on after `step`; from now on it is told how it ends."""
        self.step = step
        before = broadcast_from_rank0(lambda: status.begin(self._folder, step=step), self._position.control)
        self._id = before.start_id
        if before.starts > 1:
            self._console.say(f"start {before.starts} in a row from step {step}, without a new checkpoint between")
        self._took = before.step_s, before.save_s

    def go_on(self, step: int) -> None:
        """The state after `step` is there.  Tells what the starts before knew of how long it takes to stop."""
        self.step = step
        self.tell_grace(*self._took)

    def tell_grace(self, step_s: float | None, save_s: float | None) -> None:
        """Whether a step and a save fit into the time between a signal and the end."""
        if step_s is None or save_s is None:
            return
        needed, given = step_s + save_s, self._config.grace_s
        line = f"to stop takes a step ({step_s:.1f} s) and a save ({save_s:.1f} s); run.grace_s gives {given} s"
        self._console.say(line if needed <= given else f"WARNING: {line}: too little, the last steps would be lost")

    def phase(self, name: str) -> None:
        """From now on `name` is going on; run.step_timeout_s is the longest that it may take."""
        self._watchdog.phase(name)

    def agreed(self, *flags: bool) -> tuple[str | None, list[bool]]:
        """Why the run is to stop, or None; and which of `flags` are set on any rank.  Collective."""
        asked, *found = all_reduce_max([self._stop.reason is not None, *flags], self._position.control)
        reason = (self._stop.reason or "another rank was asked to") if asked else None
        return reason, [bool(flag) for flag in found]

    def is_ours(self) -> bool:
        """Whether this run still holds its folder.  For rank 0."""
        return self._lock is None or self._lock.held()

    def saved(self, step: int, *, step_s: float, save_s: float | None) -> None:
        """A checkpoint of `step` was published.  For rank 0."""
        status.progress(self._folder, step=step, step_s=step_s, save_s=save_s, start_id=self._id)

    def end(self, kind: status.Kind, step: int, num_steps: int, reason: str | None) -> None:
        """Nothing more is done.  Collective, so that no rank leaves before it was written down."""
        self._stop.settle()
        self._watchdog.idle()
        self._position.control.barrier().wait()
        broadcast_from_rank0(
            lambda: status.end(self._folder, kind, step=step, num_steps=num_steps, reason=reason, start_id=self._id),
            self._position.control,
        )

    def _take_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._held.enter_context(RunLock(self._folder, tell=self._console.say))
        except OSError as error:
            raise ConfigError(f"run.dir = {self._folder} cannot be written: {error}.") from error

    def _hangs(self, told: str) -> None:
        """From the watchdog's thread; this process ends next."""
        where = f"{self._folder}/stacks has the stacks of all ranks; one without stood still itself"
        self._failed(TrainingHangs(f"{told.splitlines()[0]} (run.step_timeout_s).  {where}"))

    def _failed(self, error: BaseException) -> None:
        try:
            status.fail(self._folder, error, rank=self._position.rank, step=self.step, start_id=self._id)
        except OSError as unwritable:
            self._console.say(f"warning: {self._folder}/{status.FILE} cannot be written: {unwritable}")


class TrainingHangs(RuntimeError):
    """Not an error of the user: another start may do."""
