"""Writes shards to files in the torch_dist format, and reads them.

If several ranks hold the same tensor, one of them writes it, and one reads it and sends it to the others.  Ranks have
about equal work.  torch's distributed checkpoint plans the files and writes them, in threads.  Its `save` is not used,
because it would send the plans as pickles.  Core's writer is not used, because it forks processes.  Forking takes
seconds per save, and the processes outlive a killed rank.  If training continues during a save, tensors are copied
first.

`engine_state.py` decides which tensors are stored.  `safe_reader.py` decides what a file may contain.
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from sft.errors import CheckpointError, StorageError
from sft.files.atomic_files import why_not_written
from sft.files.file_digest import Entry, HashingFile
from sft.mcore.checkpoint_io import safe_reader, shard_owners
from sft.mcore.checkpoint_io.copy_buffers import CopyBuffers
from sft.mcore.checkpoint_io.save_plans import SavePlanner, SavePlans
from sft.mcore.process_groups import ProcessGroups
from sft.mcore.sharding.parts import with_all_axes
from sft.parallel.collectives import all_gather_objects, through_rank0

T = TypeVar("T")

CHUNK_BYTES = 256 << 20  # largest size of a stored chunk; reading one row reads the whole chunk


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's part of a checkpoint.  It shares memory with the engine: write it or copy it before the next step."""

    shards: list[ShardedTensor]
    objects: dict[str, io.BytesIO]  # small objects, by key
    common: dict[str, Any]  # the plain values; rank 0 writes them

    @property
    def num_bytes(self) -> int:
        return sum(s.data.nbytes for s in self.shards) + sum(len(o.getbuffer()) for o in self.objects.values())

    def refuse_nonfinite(self) -> None:
        if keys := [shard.key for shard in self.shards if not are_finite([shard.data])]:
            raise CheckpointError(f"{keys[0]} holds a value that is not finite; such a state is never saved.")

    def copied(self, buffers: CopyBuffers, group: dist.ProcessGroup) -> "Snapshot":
        """A snapshot whose tensors are copies in `buffers`.  Collective over `group`.

        If one rank lacks memory, all ranks raise StorageError.
        """

        def copy() -> None:
            try:
                copies.extend(buffers.copy(self.shards))
            except (RuntimeError, MemoryError) as error:
                raise StorageError(
                    f"rank {dist.get_rank()} has too little memory for a copy of its tensors: {error}."
                ) from error

        copies: list[ShardedTensor] = []
        all_gather_objects(copy, group)
        return replace(self, shards=copies)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are finite.  Not collective.

    Only the smallest and the largest value of each tensor are checked, because NaN makes both NaN.  This is twenty
    times as fast as isfinite, which writes a mask.  The host synchronises with the GPU only once.
    """
    ends = [torch.stack(torch.aminmax(tensor)).isfinite().all() for tensor in tensors if tensor.numel()]
    return not ends or bool(torch.stack(ends).all())


def select_shards(
    shards: Sequence[ShardedTensor],
    objects: Sequence[ShardedObject],
    groups: ProcessGroups,
    common: dict[str, Any],
    plans: SavePlans,
) -> Snapshot:
    """The snapshot of this rank: the tensors and objects that it writes.  Collective.

    shards, objects: everything that this rank holds.  The data- and context-parallel ranks that hold the same tensors
    divide the tensors evenly among themselves.
    """
    replicas = groups.collection.dp_cp
    by_number = {str(i): with_all_axes(shard) for i, shard in enumerate(shards)}
    distribution = plans.distribution(by_number, groups)
    distribute_main_replicas_with_precomputed_distribution(by_number, replicas, distribution)
    return Snapshot(
        shards=[chunk for s in by_number.values() if is_main_replica(s.replica_id) for chunk in _split(s)],
        objects={entry.unique_key: _bytes(entry.data) for entry in objects if is_main_replica(entry.replica_id)},
        common=common,
    )


def _split(shard: ShardedTensor) -> Iterator[ShardedTensor]:
    """The shard in chunks of at most `CHUNK_BYTES`, cut along its first axis that is longer than 1."""
    data, shape = shard.data, shard.data.shape
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None or data.nbytes <= CHUNK_BYTES:
        yield shard
        return
    rows = max(1, CHUNK_BYTES * shape[axis] // data.nbytes)
    for chunk, start in zip(data.split(rows, dim=axis), range(0, shape[axis], rows)):
        offset = (*shard.global_offset[:axis], shard.global_offset[axis] + start, *shard.global_offset[axis + 1 :])
        yield replace(shard, data=chunk, local_shape=tuple(chunk.shape), global_offset=offset)


def write(snapshot: Snapshot, folder: Path, group: dist.ProcessGroup, plans: SavePlans) -> dict[str, Entry]:
    """Write the tensors and objects of all ranks into `folder`.  Returns an entry for each file of this rank.

    Collective.

    If one rank of `group` fails, all ranks raise StorageError.
    """
    state = {**_by_key(snapshot.shards), **snapshot.objects}
    writer, planner, is_rank_0 = _Writer(folder), SavePlanner(plans), dist.get_rank() == 0
    index: list[Metadata] = []  # on rank 0

    def plan() -> SavePlan:
        writer.reset()
        planner.set_up_planner(state, writer.storage_meta(), is_rank_0)
        writer.set_up_storage_writer(is_rank_0, rank=dist.get_rank(), use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(rank_plans: list[SavePlan]) -> list[SavePlan]:
        planned, metadata = planner.create_global_plan(rank_plans)
        index.append(metadata)
        return writer.prepare_global_plan(planned)

    def finish(results: list[list[WriteResult]]) -> list[None]:
        writer.finish(index[0], results)
        return [None for _ in results]

    try:
        planned = through_rank0(partial(_naming_rank, plan), partial(_naming_rank, plan_all), group)
        write_own = lambda: writer.write_data(planner.finish_plan(planned), planner).wait()  # noqa: E731
        through_rank0(partial(_naming_rank, write_own), partial(_naming_rank, finish), group)
    except StorageError as error:
        raise StorageError(f"{folder.name} was not written: {error}") from error
    return writer.files.entries


def _naming_rank(step: Callable[..., T], *arguments: Any) -> T:
    """The result of `step`.  Every error is raised as a StorageError that names the rank."""
    try:
        return step(*arguments)
    except Exception as error:  # for a disk that fails, torch and core raise errors of many classes
        cause = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}".splitlines()[0]
        raise StorageError(f"rank {dist.get_rank()}: {cause}") from error


class _Writer(FileSystemWriter):
    """torch's writer, which also computes digests, and raises an error that gives the reason why a rank cannot write.

    On a full disk, torch itself reports "unexpected pos 704 vs 598" or similar.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = self.files = _HashingFiles()

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # on a full disk, torch raises RuntimeError and others
            raise StorageError(why_not_written(Path(self.path), error)) from error


class _HashingFiles(FileSystem):
    """torch's file system, which also computes the digests of files of shards while they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, Entry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        name = Path(path).name
        if not name.endswith(DEFAULT_SUFFIX):
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        assert mode == "wb", mode
        with closing(HashingFile(Path(path))) as file:
            yield file  # torch flushes the file to disk and closes it
            file.check()
            self.entries[name] = file.entry


def read(shards: Sequence[ShardedTensor], source: Path | safe_reader.SafeReader) -> None:
    """Fill the shards' tensors in place from a checkpoint's files.  Not collective.  Raises as `safe_reader.load`."""
    if not shards:
        return
    wanted = [with_all_axes(shard) for shard in shards]
    flexible = [shard for shard in wanted if shard.allow_shape_mismatch]
    for shard in flexible:
        shard.data.zero_()  # the checkpoint may have fewer rows of padding
    planner = safe_reader.SafeLoadPlanner(
        shapes_validation_sharded_tensors=[shard for shard in wanted if not shard.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={shard.key: shard for shard in flexible},
    )
    safe_reader.load(_by_key(wanted), source, planner)


def read_replicated(shards: Sequence[ShardedTensor], reader: safe_reader.SafeReader, groups: ProcessGroups) -> None:
    """Fill the shards' tensors like `read`.

    If several data- and context-parallel ranks hold the same shard, one of them reads it and sends it to the others.

    Collective.  If one rank raises an error, all ranks raise an error.
    """
    wanted, replicas = [with_all_axes(shard) for shard in shards], groups.collection.dp_cp
    if replicas.size() == 1:
        return read(wanted, reader)
    held: dict[shard_owners.ShardId, list[Tensor]] = {}
    for shard in wanted:
        held.setdefault(shard_owners.shard_id(shard), []).append(shard.data)
    readers = shard_owners.readers(wanted, groups)
    own = {id: shard for shard in wanted if readers[id := shard_owners.shard_id(shard)].rank == replicas.rank()}
    all_gather_objects(lambda: read(list(own.values()), reader), groups.control)
    for shard_id, (rank, shape, dtype, is_shared) in readers.items():
        first, *others = held.get(shard_id) or [
            torch.empty(shape if is_shared else 0, dtype=dtype, device=groups.device)
        ]
        if is_shared:
            dist.broadcast(first, dist.get_global_rank(replicas, rank), group=replicas)
        for other in others:
            other.copy_(first)


def _by_key(shards: Sequence[ShardedTensor]) -> dict[str, Any]:
    """The state dict for torch's distributed checkpoint: one entry per key, with one or several shards."""
    grouped: dict[str, list[Any]] = {}
    for shard in shards:
        grouped.setdefault(shard.key, []).append(CheckpointableShardedTensor.from_sh_ten(shard))
    return {key: group[0] if len(group) == 1 else LocalShardsContainer(group) for key, group in grouped.items()}


def _bytes(data: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save([data], stream)
    return stream
