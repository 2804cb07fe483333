"""Holds this rank's parts of the factors A and B of adapters, and describes them as parts of a checkpoint's tensors."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from sft.layers.adapters import AdaptedWeight, Adapter
from sft.mcore.lora.split import Split

PREFIX = "adapter."  # prefix of the keys of adapters in a checkpoint


class Factors(torch.nn.Module):
    """This rank's parts of A and B of one adapter, or of the adapters of all its experts.

    a: [rank, columns]; b: one matrix [rows, rank] for each part of our weight that belongs to the Linear.  The factors
    of experts have one more axis in front: [experts, ...]
    """

    def __init__(self, adapter: Adapter, weight: AdaptedWeight, rank: int, split: Split, base: Tensor) -> None:
        super().__init__()
        self.adapter, self.weight, self.split, self.rank = adapter, weight, split, rank
        num_columns = weight.num_columns // (split.size if split.by_columns else 1)
        num_rows = [weight.part_rows[part] // (1 if split.by_columns else split.size) for part in adapter.parts]
        stack = (len(split.experts),) if split.experts else ()
        self.a = torch.nn.Parameter(base.new_full((*stack, rank, num_columns), math.nan))
        self.b = torch.nn.ParameterList(base.new_full((*stack, rows, rank), math.nan) for rows in num_rows)
        self._mark(self.a, base, is_split=split.by_columns, axis=len(stack) + 1)
        for factor in self.b:
            self._mark(factor, base, is_split=not split.by_columns, axis=len(stack))

    def _mark(self, factor: Any, base: Any, *, is_split: bool, axis: int) -> None:
        """Set the attributes that core reads to sum the factor's gradient over ranks, and to count it once in the norm.

        base: the frozen weight; is_split: whether tp or etp splits the factor; axis: the axis that is split
        """
        split, is_dense = self.split, getattr(base, "allreduce", True)
        factor.allreduce = is_dense
        is_split = is_split and not split.is_duplicated
        # A factor that is not split has on each rank only the gradient of this rank's tokens.
        factor.sequence_parallel = split.sequence_parallel and not is_split
        if is_dense:
            is_counted = is_split and split.size > 1  # core counts any other dense factor on the first rank of tp
        else:
            is_counted = is_split or split.group.rank() == 0
        if is_counted:
            set_tensor_model_parallel_attributes(factor, True, axis, 1)

    def leaves(self) -> Iterator[ShardedTensor | ShardedTensorFactory]:
        """Yield the factors as parts of PEFT's tensors.  Tensors of experts are stacked along a first axis."""
        rank = self.split.part
        a_shape, b_shape = (self.rank, self.weight.num_columns), (self.weight.rows_of(self.adapter), self.rank)
        column = rank * self.a.shape[-1] if self.split.by_columns else 0
        yield self._shard("lora_A", self.a, a_shape, (0, column), is_split=self.split.by_columns)
        first = 0
        for part, factor in zip(self.adapter.parts, self.b):
            if self.adapter.num_blocks > 1:
                yield self._by_block(factor, b_shape, first // self.adapter.num_blocks)
            else:
                row = first if self.split.by_columns else first + rank * factor.shape[-2]
                yield self._shard("lora_B", factor, b_shape, (row, 0), is_split=not self.split.by_columns)
            first += self.weight.part_rows[part]

    def _by_block(self, factor: Tensor, shape: tuple[int, ...], first: int) -> ShardedTensorFactory:
        """A part of B whose rows are in separate blocks of PEFT's tensor.  first: the part's first row in each block"""
        count = self.adapter.num_blocks // self.split.size  # blocks of this rank
        block_rows, own = shape[0] // self.adapter.num_blocks, self.split.group.rank() * count

        def build(key: str, data: Tensor, replica_id: Any, flattened_range: None) -> list[ShardedTensor]:
            parts = enumerate(data.detach().chunk(count))
            rows = ((part, ((own + block) * block_rows + first, 0)) for block, part in parts)
            return [self._shard("lora_B", part, shape, offset, is_split=True) for part, offset in rows]

        whole = self._shard("lora_B", factor, shape, (first, 0), is_split=True)
        return ShardedTensorFactory(whole.key, factor, build, torch.cat, whole.replica_id)

    def _shard(
        self, name: str, factor: Tensor, shape: tuple[int, ...], offset: tuple[int, ...], *, is_split: bool
    ) -> ShardedTensor:
        is_whole = self.split.is_duplicated or not is_split
        if experts := self.split.experts:
            shape, offset = (self.weight.num_experts, *shape), (experts.start, *offset)
        return ShardedTensor(
            key=f"{PREFIX}{self.adapter.name}.{name}.weight",
            data=factor,
            dtype=factor.dtype,
            local_shape=tuple(factor.shape),
            global_shape=shape,
            global_offset=offset,
            axis_fragmentations=None,
            replica_id=(0, self.split.group.rank() if is_whole else 0, self.split.replica),
        )
