"""Finds out which ranks of a run see the same folder, because nodes may have disks of their own.

Every decision about files is made by rank 0, or by the object store, and sent to the other ranks.  A rank reads files
of the run only if a rank on its own disk has written or fetched them.  So the nodes of a run need no shared disk, as
long as its checkpoints are in an object store.
"""

import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch.distributed as dist

from sft.errors import StorageError
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0

T = TypeVar("T")

_PREFIX = ".disk-"
# On other kinds of file systems, a file that another node wrote may appear late.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"}
_WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The disk on which this rank sees a folder.

    ranks      the ranks that see the same folder, lowest first
    index      the position of this rank in `ranks`
    is_shared  whether these are all ranks of the run
    """

    ranks: tuple[int, ...]
    index: int
    is_shared: bool

    @property
    def is_writer(self) -> bool:
        """Whether this rank makes and removes the folders of its disk: rank 0, if the disk is shared."""
        return self.index == 0

    @property
    def has_rank0(self) -> bool:
        return self.ranks[0] == 0

    def on_each(self, work: Callable[[], T], group: dist.ProcessGroup) -> list[T | None]:
        """Call `work` on one rank of each disk.  Returns its results by rank.  Collective.

        If `work` raises an error on one disk, every rank raises an error.  `group` holds all ranks.
        """
        return all_gather_objects(lambda: work() if self.is_writer else None, group)

    @staticmethod
    def shared(group: dist.ProcessGroup) -> "Disk":
        """The disk of all ranks.  `group` holds all ranks."""
        return Disk(ranks=tuple(range(dist.get_world_size(group))), index=dist.get_rank(group), is_shared=True)


def find_disk(folder: Path, group: dist.ProcessGroup, *, wait_s: float = _WAIT_S) -> Disk:
    """The disk of `folder`, which is made where it is missing.  Collective.

    One rank of each node writes an empty file, and every rank looks which of these files it sees.
    wait_s: how long a rank waits for a file of another node, on a file system that nodes may share
    Raises StorageError if ranks do not agree, because a file appeared late.
    """
    rank = dist.get_rank(group)
    is_first = all_gather_objects(lambda: os.environ.get("LOCAL_RANK", "0") == "0", group)
    firsts = [number for number, first in enumerate(is_first) if first]
    if len(firsts) < 2:
        return Disk.shared(group)
    start = broadcast_from_rank0(lambda: uuid.uuid4().hex[:12], group)
    files = {first: folder / f"{_PREFIX}{start}-{first}" for first in firsts}
    try:
        all_gather_objects(lambda: _mark(files[rank]) if is_first[rank] else None, group)
        visible = all_gather_objects(lambda: _visible(files, 0.0 if _is_local(folder) else wait_s), group)
    finally:
        if is_first[rank]:
            files[rank].unlink(missing_ok=True)
    _refuse_contradictions(visible)
    ranks = tuple(other for other in range(len(visible)) if visible[other][0] == visible[rank][0])
    return Disk(ranks=ranks, index=ranks.index(rank), is_shared=len(ranks) == len(visible))


def _mark(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    for leftover in file.parent.glob(f"{_PREFIX}*"):  # of a start that was killed
        if leftover.name.rpartition("-")[0] != file.name.rpartition("-")[0]:
            leftover.unlink(missing_ok=True)
    file.touch()


def _visible(files: dict[int, Path], wait_s: float) -> list[int]:
    """The ranks whose files this rank sees.  Waits for the file of rank 0, on whose disk the other ranks should be."""
    deadline = time.monotonic() + wait_s
    while not files[0].exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    return [rank for rank, file in files.items() if file.exists()]


def _refuse_contradictions(visible: Sequence[Sequence[int]]) -> None:
    """Raise StorageError unless every rank sees its disk as the first rank of that disk does."""
    for rank, own in enumerate(visible):
        if not own or list(visible[own[0]]) != list(own):
            raise StorageError(
                f"rank {rank} and rank {own[0] if own else 0} do not agree whether they see the same run.dir: "
                "a file of one node appeared late on the other.  Start the command again."
            )


def _is_local(folder: Path) -> bool:
    """Whether the folder is on a file system that machines cannot share."""
    path = str(folder.resolve())
    mounts = [(part.mountpoint.rstrip("/"), part.fstype) for part in psutil.disk_partitions(all=True)]
    kinds = [(len(point), kind) for point, kind in mounts if path == point or path.startswith(f"{point}/")]
    return max(kinds, default=(0, ""))[1] in _LOCAL
