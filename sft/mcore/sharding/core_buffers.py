"""Presents this rank's shards to core's distributed optimizer.

Core's optimizer updates the parameters of `ShardedModel.named_parameters`.  These are the parts of weights that this
rank holds, flat, each with the attributes of its whole weight.  For core they are whole weights that no other rank
shares, in buffers with one bucket per shard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor

from sft.mcore.sharding.flat import FlatWeights, WeightSlice


class ShardParameter(torch.nn.Parameter):
    """Elements `start` to `start + n - 1` of the flattened weight `whole`: [n], a view of this rank's shard."""

    whole: torch.nn.Parameter
    start: int
    replica: int  # number of this copy of the shard, counted from 0
    main_grad: Tensor
    shared: bool

    @classmethod
    def of(cls, flat: FlatWeights, piece: WeightSlice) -> "ShardParameter":
        part = cls(flat.shard.narrow(0, piece.offset, piece.end - piece.start), requires_grad=flat.is_trained)
        for name, value in vars(piece.param).items():  # core reads these attributes
            setattr(part, name, value)
        if flat.shard_grad is not None:
            part.main_grad = flat.shard_grad.narrow(0, piece.offset, piece.end - piece.start)
        if flat.ranks.replica > 0:
            part.shared = True  # core then does not add this copy to the norm of the gradients
        part.whole, part.start, part.replica = piece.param, piece.start, flat.ranks.replica
        return part


class _OneRank:
    """Behaves as a process group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@dataclass(eq=False)
class ShardBucket:
    """The fields of core's _ParamAndGradBucket that its optimizer reads."""

    params_list: Sequence[ShardParameter]
    param_data: Tensor
    grad_data: Tensor
    offset: int
    numel_unpadded: int


@dataclass(eq=False)
class ShardBuffer:
    """The fields of core's _ParamAndGradBuffer that its optimizer reads."""

    ddp_config: DistributedDataParallelConfig
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    params: list[ShardParameter] = field(default_factory=list)
    buckets: list[ShardBucket] = field(default_factory=list)
    param_index_map: dict[ShardParameter, tuple[int, int, int]] = field(default_factory=dict)
    data_parallel_group: Any = field(default_factory=_OneRank)
    data_parallel_world_size: int = 1
    num_optimizer_shards: None = None

    def add(self, flat: FlatWeights, parts: Sequence[ShardParameter]) -> None:
        """Add a bucket with this rank's shard of `flat`.  parts: the parts of weights in this shard"""
        assert flat.shard_grad is not None
        offset, number = sum(bucket.grad_data.numel() for bucket in self.buckets), len(self.buckets)
        for part in parts:
            start = offset + int(part.storage_offset() - flat.shard.storage_offset())
            self.param_index_map[part] = (start, start + part.numel(), number)
        self.params.extend(parts)
        self.buckets.append(
            ShardBucket(parts, flat.shard, flat.shard_grad, offset, sum(part.numel() for part in parts))
        )


def buffers_of(
    parts: Mapping[FlatWeights, Sequence[ShardParameter]], ddp_config: DistributedDataParallelConfig
) -> list[ShardBuffer]:
    """A buffer for each dtype of the trained weights.  parts: the parts of weights that this rank holds"""
    by_dtype: dict[torch.dtype, ShardBuffer] = {}
    for flat, own in parts.items():
        if flat.shard_grad is not None:
            dtypes = flat.shard.dtype, flat.shard_grad.dtype
            by_dtype.setdefault(flat.shard.dtype, ShardBuffer(ddp_config, *dtypes)).add(flat, own)
    return list(by_dtype.values())
