"""Copies the checkpoints of a run to an object store, and fetches them from there (checkpoint.remote).

A checkpoint is first published in run.dir/checkpoints, then copied, each rank the files that it wrote.  A copy that was
interrupted is finished at the next start from the same folder: files that arrived are not sent again.  A start with an
empty run.dir, or with an older checkpoint, fetches the newest one.

If nodes have disks of their own, only the object store has complete checkpoints.  Every start fetches the newest one to
each disk, and the first save removes it from there.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from sft.checkpoint import folders, manifest
from sft.checkpoint.remote_folder import RemoteFolder
from sft.checkpoint.train_state import TrainState
from sft.config import CheckpointConfig
from sft.console import Console, size
from sft.errors import CheckpointError, ConfigError, StorageError
from sft.files.file_digest import Entry
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.parallel.disk import Disk


class RemoteCopies:
    """Copies and fetches checkpoints.  Every method is collective, except `resumed` and `remove_fetched`.

    disk: the disk on which this rank sees run.dir
    is_ours: returns whether this run still holds its locks; rank 0 calls it
    """

    def __init__(
        self, config: CheckpointConfig, url: str, console: Console, is_ours: Callable[[], bool], disk: Disk
    ) -> None:
        self._config, self._console, self._is_ours, self._disk = config, console, is_ours, disk
        self.folder = RemoteFolder(url)
        self._fetched: set[int] = set()  # steps that this start has fetched
        self._resumed_step: int | None = None  # step where the run continued; None once later checkpoints are given up

    def resumed(self, step: int) -> None:
        """Record that the run continues after `step`: the next copy gives up the checkpoints of later steps."""
        self._resumed_step = step

    def remove_fetched(self, folder: Path) -> None:
        """Remove the checkpoints that this start has fetched to this rank's disk."""
        for step in self._fetched:
            shutil.rmtree(folder / folders.name_of(step), ignore_errors=True)

    def copy(
        self,
        checkpoint: Path,
        own: Mapping[str, Entry],
        state: TrainState,
        group: dist.ProcessGroup,
        *,
        is_published: bool = True,
    ) -> None:
        """Copy a checkpoint, then remove old copies.

        own: the files that this rank sends
        state: names the best checkpoint, which stays
        is_published: whether the checkpoint is complete in run.dir, too
        Raises StorageError if the store does not take it, and CheckpointError if another run took the place over.
        """
        started, step = time.monotonic(), state.step
        try:
            files = {name for of_rank in all_gather_objects(lambda: list(own), group) for name in of_rank}
            arrived = broadcast_from_rank0(partial(self._begin, step, files), group)
            sent = all_gather_objects(partial(self.folder.send, step, checkpoint, own, arrived), group)
            broadcast_from_rank0(partial(self._publish, step, checkpoint, state.best_step), group)
        except (ConfigError, StorageError) as error:  # also a permission that was withdrawn during the run
            what_is_left = f"{checkpoint} is complete, but was not copied: " if is_published else ""
            raise StorageError(f"{what_is_left}{error}") from error
        self._resumed_step = None
        took_s = time.monotonic() - started
        self._console.say(f"copied step {step} to {self.folder.path(step)} ({size(sum(sent))} in {took_s:.1f} s)")

    def catch_up(self, checkpoint: Path, state: TrainState, group: dist.ProcessGroup) -> None:
        """Copy the checkpoint from which the run resumed, if an earlier start could not."""
        if broadcast_from_rank0(partial(self.folder.is_complete, state.step), group):
            return
        if (entries := broadcast_from_rank0(partial(manifest.read, checkpoint), group)) is not None:
            self.copy(checkpoint, {name: entries.files[name] for name in _share(entries, group)}, state, group)

    def fetch_newer(self, folder: Path, group: dist.ProcessGroup) -> None:
        """Fetch the newest checkpoint if `folder`, the run's folder of checkpoints, has none of this or a later step.

        On disks of their own, fetch it in any case, because its files may be on several of them.
        A checkpoint is fetched at most once in a start, so that a disk that damages files does not fetch for ever.
        Raises CheckpointError if checkpoint.resume is never, if the copy is damaged, and if only one of several disks
        has the newest checkpoint.
        """
        step = broadcast_from_rank0(partial(self._newer, folder), group)
        if step is None:
            return
        if step not in self._fetched:
            self._fetched.add(step)
            self._fetch(step, folder, group)
        elif not self._disk.is_shared:
            raise CheckpointError(f"the copy of {self.folder.path(step)} in {folder} was damaged after it was fetched.")

    def _fetch(self, step: int, folder: Path, group: dist.ProcessGroup) -> None:
        """Every rank fetches a share of the files, and compares their SHA-256 with the manifest."""
        started = time.monotonic()
        temporary = broadcast_from_rank0(partial(folders.temporary_of, folder, step), group)
        try:
            self._disk.on_each(partial(temporary.mkdir, parents=True), group)
            self._disk.on_each(partial(self.folder.read_manifest, step, temporary), group)
            entries = broadcast_from_rank0(partial(manifest.read, temporary), group)
            assert entries is not None
            own = manifest.shares(entries, len(self._disk.ranks))[self._disk.index]
            measure = partial(manifest.bytes_in, temporary)
            with self._console.watch(f"fetching {self.folder.path(step)}", entries.num_bytes, "bytes", measure):
                all_gather_objects(partial(self.folder.receive, step, own, entries.files, temporary), group)
            self._disk.on_each(partial(folders.publish, temporary, step), group)
        except BaseException:
            if self._disk.is_writer:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        took_s = time.monotonic() - started
        self._console.say(f"fetched {self.folder.path(step)} ({size(entries.num_bytes)} in {took_s:.1f} s)")

    def _newer(self, folder: Path) -> int | None:
        self.folder.refuse_never(self._config)
        if self._disk.is_shared:
            return self.folder.newer(folder)
        newest, own = self.folder.newest(), folders.candidates(folder)
        if own and (newest is None or int(own[0].name[5:]) > newest):
            raise CheckpointError(
                f"{own[0]} is later than all checkpoints in checkpoint.remote = {self.folder.url}, and other nodes do "
                "not see it.  Train on this node alone until it is copied there, or rename it, and the run continues "
                f"{'from its start' if newest is None else f'after step {newest}'}."
            )
        return newest

    def _begin(self, step: int, files: set[str]) -> dict[str, int]:
        self._refuse_lost()
        return self.folder.begin(step, files)

    def _publish(self, step: int, checkpoint: Path, best_step: int | None) -> None:
        self._refuse_lost()
        self.folder.publish(step, checkpoint, give_up_after=self._resumed_step)
        keep_last, keep_every = self._config.keep_last, self._config.keep_every
        self.folder.remove_old(step, keep_last=keep_last, keep_every=keep_every, keep_steps={best_step})

    def _refuse_lost(self) -> None:
        if not self._is_ours():
            raise CheckpointError(
                f"another run took over run.dir or {self.folder.url} while this run hung, so this run copies no more "
                "checkpoints there."
            )


def _share(entries: manifest.Manifest, group: dist.ProcessGroup) -> list[str]:
    """The names of the files that this rank copies."""
    return manifest.shares(entries, dist.get_world_size(group))[dist.get_rank(group)]
