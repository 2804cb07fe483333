"""Plans which rank writes which part of a checkpoint, once for all saves of a run.

A run's state consists of the same parts at every save.  With many experts it has more than 100,000 parts, and rank 0
alone plans for all of them.  So later saves reuse the first plan, and ranks only send the results of their writes.

`torch_dist_files.py` writes the parts.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed.checkpoint.metadata as md
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from sft.mcore.checkpoint_io import shard_owners
from sft.mcore.checkpoint_io.chunk_index import ChunkIndex
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.messages import message

# The classes of the messages about a save: plans, and descriptions of the written parts.
_SENT: tuple[type, ...] = (
    *(SavePlan, WriteItem, WriteItemType, TensorWriteData, WriteResult, _StorageInfo, _StoragePrefix),
    *(md.MetadataIndex, md.ChunkStorageMetadata, md.TensorProperties),
)
for _kind in _SENT:
    message(_kind)


class SavePlans:
    """The plans of the first save of an engine; every later save of this engine reuses them.

    local   the parts that this rank proposes to write, before rank 0 compares the proposals of all ranks
    final   the parts that this rank writes, and the name of its file; None before the first save
    index   the index of all parts, for .metadata; None on all ranks but rank 0
    """

    def __init__(self) -> None:
        self._replicated: tuple[list[Any], Any] | None = None
        self.local: SavePlan | None = None
        self.final: SavePlan | None = None
        self.index: md.Metadata | None = None

    def distribution(self, shards: Mapping[str, ShardedTensor], groups: ProcessGroups) -> Any:
        """The rank of dp_cp that writes each shard, as core's ShardDistribution; None if the group has one rank.

        Collective at the first save.
        """
        parts = [(shard.key, shard.global_offset, shard.replica_id) for shard in shards.values()]
        if self._replicated is None:
            self._replicated = parts, shard_owners.writers(list(shards.values()), groups)
        first, distribution = self._replicated
        assert parts == first, "these plans are for another engine"
        return distribution


class SavePlanner(MCoreSavePlanner):
    """Core's planner, made to reuse plans.  Its check of all chunks is also fast with many experts (`ChunkIndex`).

    A rank that already has a plan sends an empty plan with usable=False, and rank 0 returns this plan unchanged.
    """

    def __init__(self, plans: SavePlans) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._plans = plans

    def create_local_plan(self) -> SavePlan:
        plan: SavePlan = super().create_local_plan()
        if self._plans.final is None:
            self._plans.local = plan
            return plan
        assert plan == self._plans.local, "these plans are for another engine"
        return SavePlan([], usable=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], md.Metadata]:
        if not any(plan.usable for plan in all_plans):
            assert self._plans.index is not None
            return all_plans, self._plans.index
        # With rewrite_index_hints, chunks are numbered over all ranks, and torch searches all chunks to find one.
        plans, index = create_default_global_save_plan(dedup_save_plans(all_plans), rewrite_index_hints=False)
        for key, entry in index.state_dict_metadata.items():
            if isinstance(entry, md.TensorStorageMetadata) and (fault := ChunkIndex(key, entry).fault()):
                raise ValueError(fault)
        self._plans.index = index
        return plans, index

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if new_plan.usable:
            self._plans.final = new_plan
        assert self._plans.final is not None
        self.plan = self._plans.final
        return self.plan
