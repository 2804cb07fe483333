"""Chooses one of the ranks that hold the same shard, which then writes or reads it.  Ranks get about equal work.

A function of core makes the choice.  Core sends descriptions of the shards as pickles; this module sends messages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.exchange_utils import ShardDistribution, distribute_shards_to_ranks
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import all_gather_objects
from sft.parallel.messages import message

ShardId = tuple[Any, ...]  # key and offset


@message
class _Held(NamedTuple):
    """A shard that a rank holds."""

    shard: ShardId
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_main: bool  # whether this is the main replica: exactly one of the ranks that hold the shard holds it

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Reader(NamedTuple):
    """The rank that reads a shard, and a description of the shard."""

    rank: int  # rank in the group dp_cp
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_shared: bool  # other ranks of the group need the shard, too


shard_id = _sharded_tensor_shard_id


def writers(shards: Sequence[ShardedTensor], groups: ProcessGroups) -> ShardDistribution | None:
    """The rank of dp_cp that writes each shard whose main replica is in this group.  None: the group has one rank.

    Collective over all ranks.
    """
    if groups.collection.dp_cp.size() == 1:
        return None
    held = _held_by_all(shards, groups)
    main = {entry.shard for entries in held for entry in entries if entry.is_main}
    holders = {shard: ranks for shard, ranks in _holders(held).items() if shard in main}
    return ShardDistribution(_chosen(held, holders, main), main, {}, holders)


def readers(shards: Sequence[ShardedTensor], groups: ProcessGroups) -> dict[ShardId, Reader]:
    """For each shard that a rank of dp_cp holds, the rank that reads it.  All ranks of dp_cp get the same result.

    Collective over all ranks.
    """
    held = _held_by_all(shards, groups)
    main = {entry.shard for entries in held for entry in entries if entry.is_main}
    holders = _holders(held)
    described = {entry.shard: entry for entries in held for entry in entries}
    return {
        shard: Reader(rank, described[shard].shape, described[shard].dtype, is_shared=len(holders[shard]) > 1)
        for shard, rank in _chosen(held, holders, main).items()
    }


def _held_by_all(shards: Sequence[ShardedTensor], groups: ProcessGroups) -> list[list[_Held]]:
    """The shards that each rank of dp_cp holds.  Collective over all ranks of the run, over gloo."""
    own = {
        shard_id(s): _Held(shard_id(s), tuple(s.local_shape), s.dtype, is_main_replica(s.replica_id)) for s in shards
    }
    by_rank = all_gather_objects(lambda: list(own.values()), groups.control)
    return [by_rank[rank] for rank in dist.get_process_group_ranks(groups.collection.dp_cp)]


def _holders(held: Sequence[Sequence[_Held]]) -> dict[ShardId, list[int]]:
    holders: dict[ShardId, list[int]] = {}
    for rank, entries in enumerate(held):
        for entry in entries:
            holders.setdefault(entry.shard, []).append(rank)
    return holders


def _chosen(
    held: Sequence[Sequence[_Held]], holders: dict[ShardId, list[int]], main: set[ShardId]
) -> dict[ShardId, int]:
    sizes = {entry.shard: entry.num_bytes for entries in held for entry in entries}
    chosen: dict[ShardId, int] = distribute_shards_to_ranks(holders, sizes, len(held), set(holders) - main)
    return chosen
