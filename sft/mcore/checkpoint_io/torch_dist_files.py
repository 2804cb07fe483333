"""Shards <-> files, in the torch_dist format: which rank writes or reads which bytes, and how.

Decides that every replicated tensor is written, and read, by one of the ranks that hold it, evenly; that torch's
distributed checkpoint does the writing, by threads; and that tensors are copied first where a save is to go on while
training does.  Core's own writer forks processes, and starts one more to collect their answers: seconds a save, and
processes that outlive a killed rank.

What the tensors are is `shards.py`; what a file may contain, `safe_reader.py`.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as md
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    determine_main_replica_uniform_distribution,
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, TorchDistLoadShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from sft.errors import CheckpointError, StorageError
from sft.mcore.checkpoint_io import safe_reader
from sft.mcore.checkpoint_io.chunk_index import Parts

PART_BYTES = 256 << 20  # of one stored part: whoever wants a row of it reads it whole


@dataclass(frozen=True, kw_only=True)
class Part:
    """What this rank writes of a checkpoint: shards of tensors, and small objects as bytes, by key."""

    shards: list[ShardedTensor]
    objects: dict[str, io.BytesIO]

    @property
    def num_bytes(self) -> int:
        return sum(s.data.nbytes for s in self.shards) + sum(len(o.getbuffer()) for o in self.objects.values())

    def refuse_what_is_no_number(self) -> None:
        """Raise CheckpointError where a value is NaN or infinite."""
        if spoilt := [shard.key for shard in self.shards if not are_finite([shard.data])]:
            raise CheckpointError(f"{spoilt[0]} holds a value that is not a number; such a state is never saved.")


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are numbers: the smallest and the largest of each tensor are.

    Twenty times as fast as isfinite, which writes a mask; and a GPU is asked once.
    """
    ends = [torch.stack(torch.aminmax(tensor)).isfinite().all() for tensor in tensors if tensor.numel()]
    return not ends or bool(torch.stack(ends).all())


class Copies:
    """Memory of its own for what a save in the background writes; kept from save to save, as making it is slow."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def of(self, shards: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """The shards with data that training does not change."""
        made = [replace(shard, data=self._copy(shard)) for shard in shards]
        if any(shard.data.is_cuda for shard in shards):
            torch.cuda.synchronize()
        return made

    def _copy(self, shard: ShardedTensor) -> Tensor:
        where = (shard.key, tuple(shard.global_offset))
        kept, data = self._kept.get(where), shard.data
        if kept is None or kept.shape != data.shape or kept.dtype != data.dtype:
            kept = self._kept[where] = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
        return kept.copy_(data, non_blocking=True)


def part_of_rank(shards: Sequence[ShardedTensor], objects: Sequence[ShardedObject], sharers: dist.ProcessGroup) -> Part:
    """What this rank is to write of the tensors and objects that it holds.  Collective over `sharers`, the data- and
    context-parallel ranks, among which what all of them hold is shared out."""
    described = {str(i): _box(shard) for i, shard in enumerate(shards)}
    distribution = determine_main_replica_uniform_distribution(described, sharers)
    distribute_main_replicas_with_precomputed_distribution(described, sharers, distribution)
    return Part(
        shards=[piece for s in described.values() if is_main_replica(s.replica_id) for piece in _pieces(s)],
        objects={one.unique_key: _bytes(one.data) for one in objects if is_main_replica(one.replica_id)},
    )


def _pieces(shard: ShardedTensor) -> Iterator[ShardedTensor]:
    """The shard in boxes of at most `PART_BYTES`, cut along its first axis that is longer than 1."""
    data, shape = shard.data, shard.data.shape
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None or data.nbytes <= PART_BYTES:
        yield shard
        return
    rows = max(1, PART_BYTES * shape[axis] // data.nbytes)
    for piece, start in zip(data.split(rows, dim=axis), range(0, shape[axis], rows)):
        offset = (*shard.global_offset[:axis], shard.global_offset[axis] + start, *shard.global_offset[axis + 1 :])
        yield replace(shard, data=piece, local_shape=tuple(piece.shape), global_offset=offset)


def write(part: Part, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write the parts of all ranks into `folder`.  Collective over `group`; what fails on one rank is raised on all.

    Raises StorageError.
    """
    state = {**_by_key(part.shards), **part.objects}
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.save(state, storage_writer=FileSystemWriter(folder), planner=planner, process_group=group)
    except dcp.CheckpointException as error:  # a BaseException
        raise StorageError(f"{folder.name} was not written: {_causes(error)}") from error


class _SavePlanner(MCoreSavePlanner):
    """Core's planner, with a check of the whole that is quick for many experts."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], md.Metadata]:
        # Numbered anew over all ranks, a part would no longer be found by its number, but by a search of all.
        plans, index = create_default_global_save_plan(dedup_save_plans(all_plans), rewrite_index_hints=False)
        for key, entry in index.state_dict_metadata.items():
            if isinstance(entry, md.TensorStorageMetadata) and (fault := Parts(key, entry).fault()):
                raise ValueError(fault)
        self.global_plan, self.metadata = plans, index
        return plans, index


def read(shards: Sequence[ShardedTensor], source: Path | safe_reader.Reader) -> None:
    """Fill the shards' tensors, in place, from the files of a checkpoint; each rank for itself.

    source: its folder, or a reader of it
    Raises CheckpointError.
    """
    if not shards:
        return
    wanted = [_box(shard) for shard in shards]
    flexible = {shard.key: shard for shard in wanted if shard.allow_shape_mismatch}
    for shard in flexible.values():
        shard.data.zero_()  # rows of padding that the checkpoint may not have
    planner = safe_reader.Planner(
        shapes_validation_sharded_tensors=[shard for shard in wanted if not shard.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors=flexible,
    )
    safe_reader.load(_by_key(wanted), source, planner)


def read_shared(shards: Sequence[ShardedTensor], reader: safe_reader.Reader, sharers: dist.ProcessGroup) -> None:
    """The same where the ranks of `sharers` want the same: each reads an even part of it and hands it to the others.

    Collective over `sharers`.
    """
    wanted = {str(i): _box(shard) for i, shard in enumerate(shards)}
    targets = {name: shard.data for name, shard in wanted.items()}
    found = FullyParallelLoadStrategyWrapper(_Strategy(reader), sharers).load(wanted, reader.path)
    for name, target in targets.items():
        if found[name].data_ptr() != target.data_ptr():  # another rank read it
            target.copy_(found[name])


class _Strategy(TorchDistLoadShardedStrategy):
    """How core's fully parallel load reads its part: by `read`."""

    def __init__(self, reader: safe_reader.Reader) -> None:
        super().__init__()
        self._reader = reader

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path, async_strategy: str = "mcore") -> Any:
        read(list(sharded_state_dict.values()), self._reader)
        return {name: shard.data for name, shard in sharded_state_dict.items()}


def _box(shard: ShardedTensor) -> ShardedTensor:
    """The same shard with all axes of the whole tensor, tied to no grid."""
    axes, data = shard.prepend_axis_num, shard.data.detach()
    data = data.view((1,) * axes + tuple(data.shape))
    return replace(shard, data=data, local_shape=tuple(data.shape), axis_fragmentations=None, prepend_axis_num=0)


def _by_key(shards: Sequence[ShardedTensor]) -> dict[str, Any]:
    """As torch's distributed checkpoint wants it: one entry a key, of one or several shards."""
    grouped: dict[str, list[Any]] = {}
    for shard in shards:
        grouped.setdefault(shard.key, []).append(CheckpointableShardedTensor.from_sh_ten(shard))
    return {key: ones[0] if len(ones) == 1 else LocalShardsContainer(ones) for key, ones in grouped.items()}


def _bytes(data: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save([data], stream)
    return stream


def _causes(error: dcp.CheckpointException) -> str:
    """`rank 1: No space left on device; rank 3: ...`"""
    told = {rank: f"{type(cause).__name__}: {cause}".splitlines()[0] for rank, (cause, _) in error.failures.items()}
    return "; ".join(f"rank {rank}: {what}" for rank, what in sorted(told.items()))
