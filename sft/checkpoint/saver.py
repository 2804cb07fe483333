"""Saves the state of a run as a published checkpoint, in the background with checkpoint.async_save.

A save writes files under a temporary name, flushes them to disk, computes digests, writes the manifest, renames the
folder, writes the pointer, and then removes older checkpoints.  Until the pointer is written, it names the previous
checkpoint, which stays complete.  All ranks learn the outcome of each stage of a save before any rank begins the next
stage.

If nodes have disks of their own, each disk has the files that its ranks write.  They are copied to checkpoint.remote,
which alone has the complete checkpoint, and are then removed.

A failed save is reported, and training continues.  Three failures in a row, or a failure of the last save, end the run.
"""

import shutil
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path

from sft.checkpoint import folders, held_out_pass, manifest
from sft.checkpoint.manifest import Manifest
from sft.checkpoint.remote import RemoteCopies
from sft.checkpoint.train_state import Conditions, TrainState
from sft.config import CheckpointConfig
from sft.console import Console, size
from sft.errors import CheckpointError, StorageError
from sft.files.atomic_files import why_not_written
from sft.mcore import device
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.checkpoint_io.copy_buffers import CopyBuffers
from sft.mcore.checkpoint_io.save_plans import SavePlans
from sft.mcore.checkpoint_io.torch_dist_files import Snapshot
from sft.mcore.engine import Engine
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import all_gather_objects, all_reduce_max, broadcast_from_rank0
from sft.parallel.disk import Disk

MAX_FAILURES = 3  # failed saves in a row
_SPACE_FACTOR = 1.02  # free disk space per byte of tensors and objects; includes .metadata and the manifest
_SPACE_MARGIN = 1 << 20  # bytes
_LAST_WAIT_S = 60.0


class Saver:
    """Saves the checkpoints of one run.  `add_pass`, `save` and `drain` are collective.

    Only rank 0 calls the following functions.  It calls the last two in the thread that writes the checkpoint.
    is_ours       returns whether this run still holds the lock of its folder
    on_published  receives the step of a published checkpoint and the seconds that its save took
    in_use        returns the steps whose checkpoints must not be removed, because an export needs them
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        conditions: Conditions,
        groups: ProcessGroups,
        console: Console,
        is_ours: Callable[[], bool],
        on_published: Callable[[int, float], None],
        in_use: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._config, self.folder, self._conditions, self._groups = config, folder, conditions, groups
        self._console, self._is_ours, self._on_published = console, is_ours, on_published
        self._in_use = in_use
        self.disk = Disk.shared(groups.control)  # the trainer sets it if nodes have disks of their own
        self.copies: RemoteCopies | None = None  # the trainer sets it if checkpoint.remote is given
        # None without checkpoint.async_save, and after a rank had too little memory for a copy
        self._buffers = CopyBuffers() if config.async_save else None
        self._plans = SavePlans()
        self._job: _Job | None = None
        self._failures = 0
        self._saved_step: int | None = None
        self.lost: set[int] = set()  # steps whose saves failed
        self._resumed_step: int | None = 0  # step where the run continued; None once later checkpoints are renamed

    def resumed(self, step: int, *, is_ours: bool) -> None:
        """Record that the run continues after `step`.  is_ours: whether the checkpoint is in this run's folder"""
        self._resumed_step = step
        if self.copies is not None:
            self.copies.resumed(step)
        self._saved_step = step if is_ours else None

    def prepare(self, engine: Engine, step: int, num_steps: int) -> None:
        """Begin to allocate the memory for copies, so that the first background save does not wait for it.

        Called after each step of training, because the first step must get its memory before the copy does.  Does
        nothing if the memory is already allocated, or if no save is due before the last step, whose save makes no copy.
        Collective.
        """
        if self._buffers is None or self._buffers.is_prepared or not self._config.copies_state:
            return
        period, minutes = self._config.save_every, self._config.save_every_minutes
        if minutes is not None or (period is not None and (step // period + 1) * period < num_steps):
            self._buffers.prepare(engine_state.snapshot(engine, {}, self._plans).shards)

    def holds(self, step: int) -> bool:
        """Whether the state after `step` is saved in the run's folder, or is being saved."""
        return self._saved_step == step

    def add_pass(self, state: TrainState) -> None:
        """Record in the saved checkpoint of `state.step` that the held-out sets were evaluated after this step."""
        checkpoint = self.folder / folders.name_of(state.step)
        broadcast_from_rank0(partial(held_out_pass.write, checkpoint, state), self._groups.control)
        if self.copies is not None:
            broadcast_from_rank0(partial(self.copies.folder.add_pass, state.step, checkpoint), self._groups.control)

    def save(self, engine: Engine, state: TrainState, *, wait: bool) -> None:
        """Save the state after `state.step`.  With `wait`, or without checkpoint.async_save, wait for publication.

        Raises CheckpointError or StorageError if the run must end.
        """
        if self._saved_step == state.step:
            if wait:
                self.drain(must_succeed=True)
            return
        self.drain()
        started = time.monotonic()
        try:
            snapshot, temporary, background = self._prepare(engine, state, may_copy=not wait)
        except (CheckpointError, StorageError, OSError) as error:
            self._failed(state.step, error, must_succeed=wait)
            return
        self._saved_step = state.step
        self._job = _Job(partial(self._write, snapshot, temporary, state, started), state.step)
        if background:
            self._job.start()
            stall_s = time.monotonic() - started
            self._console.say(f"saving step {state.step} in the background; training waited {stall_s:.1f} s")
        else:
            measure = partial(manifest.bytes_in, temporary)
            with self._console.watch(f"saving step {state.step}", snapshot.num_bytes, "bytes", measure):
                self._job.run()
            self.drain(must_succeed=wait)

    def drain(self, *, must_succeed: bool = False) -> None:
        """Wait for the background save.  Raises like `save`; with `must_succeed`, any failed save ends the run."""
        if self._job is None:
            return
        job, self._job = self._job, None
        if (error := job.result()) is None:
            self._failures = 0
        else:
            self._saved_step = None
            self._failed(job.step, error, must_succeed=must_succeed)

    def wait_briefly(self) -> None:
        """Wait up to 60 s for a background save, when the run ends with an error.  Not collective; never raises."""
        if self._job is not None and self._job.is_alive():
            self._job.join(_LAST_WAIT_S)

    def _prepare(self, engine: Engine, state: TrainState, *, may_copy: bool) -> tuple[Snapshot, Path, bool]:
        """The snapshot, its temporary folder, and whether the snapshot is a copy, which can be saved in the background.

        Raises CheckpointError if a weight is not finite, StorageError if the disk has no room.
        """
        if all_reduce_max([not engine_state.is_finite(engine)], self._groups.control)[0]:
            raise CheckpointError("a weight is not finite; such a state is never saved.")
        plain = {"iteration": state.step, "sft": {"state": asdict(state), **asdict(self._conditions)}}
        snapshot = engine_state.snapshot(engine, plain, self._plans)
        is_copy = False
        if may_copy and self._buffers is not None:
            try:
                snapshot, is_copy = snapshot.copied(self._buffers, self._groups.control), True
            except StorageError as error:
                self._buffers = None
                self._console.say(f"WARNING: {error}  From now on training waits for saves (checkpoint.async_save).")
        num_bytes = all_gather_objects(lambda: snapshot.num_bytes, self._groups.control)

        def name() -> Path:
            self._refuse_lost_folder()
            return folders.temporary_of(self.folder, state.step)

        temporary = broadcast_from_rank0(name, self._groups.control)
        make = partial(self._make_temporary, temporary, sum(num_bytes[rank] for rank in self.disk.ranks))
        self.disk.on_each(make, self._groups.control)
        return snapshot, temporary, is_copy

    def _make_temporary(self, temporary: Path, num_bytes: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.copies is not None and not self.disk.is_shared:
            self.copies.remove_fetched(self.folder)
        free, needed = shutil.disk_usage(self.folder).free, num_bytes * _SPACE_FACTOR + _SPACE_MARGIN
        if free < needed:
            raise StorageError(f"it needs {size(needed)}, and the disk has {size(free)} left.")
        temporary.mkdir()

    def _refuse_lost_folder(self) -> None:
        if not self._is_ours():
            if not self.folder.parent.is_dir():
                raise StorageError(
                    f"{self.folder.parent} no longer exists: it was renamed or removed during the run, so no "
                    "checkpoint is saved.  Give it its name back, and start the run again: it resumes."
                )
            raise CheckpointError(
                f"another run took over {self.folder} while this run hung, so this run saves no more checkpoints "
                "there."
            )

    def _write(self, snapshot: Snapshot, temporary: Path, state: TrainState, started: float) -> None:
        """Write and publish a checkpoint.

        May run in a thread during training.  So it communicates only in `groups.saving`, which training does not use.
        """
        group = self._groups.saving
        device.enter(self._groups.device)
        try:
            all_gather_objects(snapshot.refuse_nonfinite, group)
            written = engine_state.write(snapshot, temporary, group, self._plans)
            digests = all_gather_objects(partial(self._entries, temporary, written), group)
            files = {name: entry for of_rank in digests for name, entry in of_rank.items()}
            broadcast_from_rank0(partial(self._complete, temporary, state, files), group)
            if self.disk.is_shared:
                final = broadcast_from_rank0(partial(self._publish, temporary, state), group)
            else:
                assert self.copies is not None, "refused before the run began"
                self.copies.copy(temporary, digests[self._groups.rank], state, group, is_published=False)
        finally:  # also an interrupt must leave no temporary folder
            if self.disk.is_writer:
                shutil.rmtree(temporary, ignore_errors=True)
        took_s = time.monotonic() - started
        if self.disk.is_shared:
            num_bytes = sum(entry.num_bytes for entry in files.values())
            self._console.say(f"saved {final} ({size(num_bytes)} in {took_s:.1f} s)")
            if self.copies is not None:
                self.copies.copy(final, digests[self._groups.rank], state, group)
        if self._groups.rank == 0:
            self._on_published(state.step, took_s)

    def _entries(self, folder: Path, written: dict[str, manifest.Entry]) -> dict[str, manifest.Entry]:
        """Sizes and digests of the shards that this rank wrote; on rank 0 also those of all other files."""
        others = [name for name in manifest.names_in(folder) if not name.startswith("__")]
        own = others if self._groups.rank == 0 else []
        return written | {name: manifest.entry_of(folder / name) for name in own}

    def _complete(self, temporary: Path, state: TrainState, files: dict[str, manifest.Entry]) -> None:
        self._refuse_lost_folder()
        if missing := sorted(set(manifest.names_in(temporary)) - set(files)):
            raise CheckpointError(f"no rank wrote {missing[0]}.")
        facts = {
            "step": state.step,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "state": asdict(state),
            **asdict(self._conditions),
        }
        manifest.write(temporary, Manifest(files=files, facts=facts))

    def _publish(self, temporary: Path, state: TrainState) -> Path:
        if self._resumed_step is not None:
            for renamed in folders.rename_abandoned(self.folder, after=self._resumed_step, keep=state.step):
                self._console.say(
                    f"{renamed.name}: renamed, because the run was resumed from step {self._resumed_step}"
                )
            self._resumed_step = None
        final = folders.publish(temporary, state.step)
        folders.remove_old(
            self.folder,
            state.step,
            keep_last=self._config.keep_last,
            keep_every=self._config.keep_every,
            keep_steps={state.best_step, *self._in_use()},
            report=self._console.say,
        )
        return final

    def _failed(self, step: int, error: BaseException, *, must_succeed: bool) -> None:
        self._failures += 1
        self.lost.add(step)
        reason = why_not_written(self.folder, error) if isinstance(error, OSError) else error
        message = f"the checkpoint of step {step} was not saved: {reason}"
        if must_succeed or self._failures >= MAX_FAILURES:
            count = f"  Failed saves in a row: {self._failures}." if self._failures > 1 else ""
            kind = StorageError if isinstance(error, StorageError | OSError) else CheckpointError
            raise kind(f"{message}{count}  The previous checkpoint is complete.") from error
        self._console.say(f"WARNING: {message}  Training goes on; the next save tries again.")


class _Job(threading.Thread):
    def __init__(self, work: Callable[[], None], step: int) -> None:
        super().__init__(name=f"saving step {step}", daemon=True)
        self.step, self._work = step, work
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # some errors of torch do not derive from Exception
            self._error = error

    def result(self) -> BaseException | None:
        if self.is_alive():
            self.join()
        if self._error is not None and not isinstance(self._error, CheckpointError | StorageError | OSError):
            raise self._error
        return self._error
