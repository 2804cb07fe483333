"""Saving: from the trainer's state to a published checkpoint, while training goes on if the recipe says so.

Decides the order in which things happen, so that at any instant a kill leaves the checkpoint before whole and chosen:
write under a temporary name, the disk has it, digests, manifest, one rename, the pointer, and only then do older ones
go.  Ranks agree on every outcome before anyone acts on it.

A save that fails (a full disk, most often) is told and training goes on; three in a row, or the last one, end the run.
"""

import shutil
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from sft.checkpoint import folders, manifest
from sft.checkpoint.manifest import Manifest
from sft.checkpoint.train_state import Conditions, TrainState
from sft.config import CheckpointConfig
from sft.console import Console, size
from sft.errors import CheckpointError, StorageError
from sft.mcore import device
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.checkpoint_io.torch_dist_files import Copies
from sft.mcore.engine import Engine
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import all_gather_objects, all_reduce_max, broadcast_from_rank0

MAX_FAILURES = 3  # saves in a row
_ROOM = 1.02  # of the bytes that are known: .metadata and the manifest come on top
_SMALL = 1 << 20
_LINGER_S = 60.0


class Saver:
    """Saves the checkpoints of one run.  All methods are collective.

    is_ours: whether this run still holds its folder; asked on rank 0
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        now: Conditions,
        groups: ProcessGroups,
        console: Console,
        is_ours: Any,
    ) -> None:
        self._config, self.folder, self._now, self._groups = config, folder, now, groups
        self._console, self._is_ours = console, is_ours
        self._copies = Copies()
        self._job: _Job | None = None
        self._failures = 0
        self._saved_step: int | None = None
        self._resumed_step: int | None = 0  # None: nothing else can be in the folder any more
        self.stall_s: float | None = None  # how long the last save held training up
        self.took_s: float | None = None  # and how long it took until it was published
        self.published: int | None = None  # the newest step that was

    def resumed(self, step: int, *, is_ours: bool) -> None:
        """The run goes on after `step`.  `is_ours`: from this folder, so that saving it again would add nothing."""
        self._resumed_step = step
        self._saved_step = step if is_ours else None

    def save(self, engine: Engine, state: TrainState, *, wait: bool) -> None:
        """Save the state after `state.step`.  With `wait`, or without checkpoint.async_save, it is published on return.

        Raises CheckpointError or StorageError where training should not go on.
        """
        if self._saved_step == state.step:
            if wait:
                self.drain(must=True)
            return
        self.drain()
        started, background = time.monotonic(), self._config.async_save and not wait
        try:
            taken, written = self._begin(engine, state, copy=background)
        except (CheckpointError, StorageError, OSError) as error:
            self._failed(state.step, error, must=wait)
            return
        self._saved_step = state.step
        self._job = _Job(partial(self._write, taken, written, state, started), state.step)
        if background:
            self._job.start()
            self.stall_s = time.monotonic() - started
            self._console.say(f"saving step {state.step} in the background; training waited {self.stall_s:.1f} s")
        else:
            measure = partial(_bytes_in, written)
            with self._console.watch(f"saving step {state.step}", taken.part.num_bytes, "bytes", measure):
                self._job.run()
            self.drain(must=wait)
            self.stall_s = time.monotonic() - started

    def drain(self, *, must: bool = False) -> None:
        """Wait until nothing is being saved.  Raises as `save` if that failed too often, or `must` not fail."""
        if self._job is None:
            return
        job, self._job = self._job, None
        error = job.result()
        if error is None:
            self._failures = 0
        else:
            self._saved_step = None
            self._failed(job.step, error, must=must)

    def linger(self) -> None:
        """The run ends by an error: a save that was under way may still be published.  Not collective, never raises."""
        if self._job is not None and self._job.is_alive():
            self._job.join(_LINGER_S)

    def _begin(self, engine: Engine, state: TrainState, *, copy: bool) -> tuple[engine_state.Snapshot, Path]:
        """What is to be written and where; refuses what must not or cannot be."""
        if all_reduce_max([not engine_state.is_finite(engine)], self._groups.control)[0]:
            raise CheckpointError("a weight is not a number; such a state is never saved.")
        plain = {"iteration": state.step, "sft": {"state": asdict(state), **self._now.plain()}}
        taken = engine_state.snapshot(engine, plain)
        if copy:
            taken = taken.copied(self._copies, self._groups.control)
        num_bytes = sum(all_gather_objects(lambda: taken.part.num_bytes, self._groups.control))
        return taken, broadcast_from_rank0(lambda: self._room_for(num_bytes, state.step), self._groups.control)

    def _room_for(self, num_bytes: int, step: int) -> Path:
        self._refuse_lost_folder()
        self.folder.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(self.folder).free, num_bytes * _ROOM + _SMALL
        if free < needed:
            raise StorageError(f"it needs {size(needed)}, and the disk has {size(free)} left.")
        return folders.temporary(self.folder, step)

    def _refuse_lost_folder(self) -> None:
        if not self._is_ours():
            raise CheckpointError(
                f"another run has taken {self.folder} over while this one hung; it keeps what it has."
            )

    def _write(self, taken: engine_state.Snapshot, written: Path, state: TrainState, started: float) -> None:
        """From here on only the group for saving is used: the main thread may be elsewhere."""
        group = self._groups.saving
        device.enter(self._groups.device)
        try:
            all_gather_objects(taken.part.refuse_what_is_no_number, group)
            engine_state.write(taken, written, group)
            told = all_gather_objects(partial(self._digests, written), group)
            files = {name: entry for rank in told for name, entry in rank.items()}
            final = broadcast_from_rank0(partial(self._publish, written, state, files), group)
        except BaseException:
            if self._groups.rank == 0:
                shutil.rmtree(written, ignore_errors=True)
            raise
        self.took_s, self.published = time.monotonic() - started, state.step
        num_bytes = sum(entry.num_bytes for entry in files.values())
        self._console.say(f"saved {final} ({size(num_bytes)} in {self.took_s:.1f} s)")

    def _digests(self, written: Path) -> dict[str, manifest.Entry]:
        """Of the files that this rank wrote; they are still in memory."""
        mine = f"__{self._groups.rank}_"
        is_first = self._groups.rank == 0
        return {
            name: manifest.entry_of(written / name)
            for name in manifest.names_in(written)
            if name.startswith(mine) or (is_first and not name.startswith("__"))
        }

    def _publish(self, written: Path, state: TrainState, files: dict[str, manifest.Entry]) -> Path:
        self._refuse_lost_folder()
        if missing := sorted(set(manifest.names_in(written)) - set(files)):
            raise CheckpointError(f"nobody wrote {missing[0]}.")
        facts = {"step": state.step, "time": _utc(), "layout": self._now.layout, "versions": self._now.versions}
        manifest.write(written, Manifest(files=files, facts=facts))
        if self._resumed_step is not None:
            for moved in folders.give_up(self.folder, above=self._resumed_step, but=state.step):
                self._console.say(f"{moved.name}: the run went back to step {self._resumed_step} and on from there")
            self._resumed_step = None
        final = folders.publish(written, state.step)
        folders.retire(
            self.folder,
            state.step,
            keep_last=self._config.keep_last,
            keep_every=self._config.keep_every,
            kept=[] if state.best_step is None else [state.best_step],
            tell=self._console.say,
        )
        return final

    def _failed(self, step: int, error: BaseException, *, must: bool) -> None:
        self._failures += 1
        told = f"the checkpoint of step {step} was not saved: {error}"
        if must or self._failures >= MAX_FAILURES:
            again = f"  {self._failures} in a row." if self._failures > 1 else ""
            kind = StorageError if isinstance(error, StorageError | OSError) else CheckpointError
            raise kind(f"{told}{again}  The one before it is whole.") from error
        self._console.say(f"warning: {told}  Training goes on; the next save tries again.")


class _Job(threading.Thread):
    """One save; what went wrong with it is kept."""

    def __init__(self, work: Any, step: int) -> None:
        super().__init__(name=f"saving step {step}", daemon=True)
        self.step, self._work = step, work
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # some of torch's do not derive from Exception
            self._error = error

    def result(self) -> BaseException | None:
        if self.is_alive():
            self.join()
        if self._error is not None and not isinstance(self._error, CheckpointError | StorageError | OSError):
            raise self._error
        return self._error


def _bytes_in(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in manifest.names_in(folder))


def _utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
