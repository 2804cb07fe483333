"""Finds the tensors of a sharded state dict that this rank holds, whole or in part."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from sft.mcore.modules.stored import sharded_tensors
from sft.mcore.sharding.model import ShardedModel

Index = tuple[int, ...]


def held(chunks: Iterable[torch.nn.Module], state: Any) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """The tensors of `state`, a sharded state dict or a list: those that this rank holds whole, and parts of others.

    With parallel.shard = weights, the parts are rectangular pieces of weights, as views of this rank's shards.  All
    other tensors are whole, and so are the weights without parallel.shard = weights.  Other ranks hold copies of whole
    tensors.
    """
    sharded = [chunk for chunk in chunks if isinstance(chunk, ShardedModel) and chunk.frees_weights]
    weights = {id(p) for chunk in sharded for unit in chunk.units for flat in unit.flats for p in flat.params}
    own = {id(part.whole): part for chunk in sharded for part in chunk.shards.values()}
    whole: list[ShardedTensor] = []
    parts: list[ShardedTensor] = []
    for leaf in nested_values(state):
        if not isinstance(leaf, ShardedTensor | ShardedTensorFactory) or id(leaf.data) not in weights:
            whole.extend(sharded_tensors([leaf]))
        elif id(leaf.data) in own:
            for shard in sharded_tensors([leaf]):
                first = shard.data.storage_offset() - leaf.data.storage_offset()
                part = own[id(leaf.data)]
                parts.extend(pieces(shard, first, part.detach(), part.start, replica=part.replica))
    return whole, parts


def pieces(
    shard: ShardedTensor, first: int, flat: Tensor, start: int, *, replica: int | None
) -> Iterator[ShardedTensor]:
    """Yield the rectangular pieces of `shard` whose values are in `flat`, as views of it.

    first: the index of the shard's first element in the flattened weight; flat [n]: its elements from `start` on
    replica: number of this copy of the elements among copies on other data-parallel ranks; None: that of `shard`
    """
    shape, axes = tuple(shard.data.shape), shard.prepend_axis_num
    number = shard.replica_id if replica is None else (*shard.replica_id[:-1], replica)
    begin, end = max(start - first, 0), min(start + flat.numel() - first, prod(shape))
    for offset, size in rectangular_chunks(begin, end, shape):
        data = flat.narrow(0, first + flat_index(offset, shape) - start, prod(size)).view(size)
        inner = tuple(outer + local for outer, local in zip(shard.global_offset[axes:], offset))
        yield replace(
            shard,
            data=data,
            dtype=data.dtype,
            local_shape=size,
            global_offset=(*shard.global_offset[:axes], *inner),
            axis_fragmentations=None,
            replica_id=number,
        )


def shards_by_param(state: Any) -> dict[int, list[tuple[int, ShardedTensor]]]:
    """For the id of each parameter, its shards with the index of their first element in the flattened parameter.

    A factory makes several shards of one parameter, for example the gate and the up projection.
    state: a sharded state dict or a list
    """
    by_param: dict[int, list[tuple[int, ShardedTensor]]] = {}
    for leaf in nested_values(state):
        if not isinstance(leaf, ShardedTensor | ShardedTensorFactory) or leaf.data is None:
            continue
        for shard in sharded_tensors([leaf]):
            assert shard.data.is_contiguous(), shard.key
            start = shard.data.storage_offset() - leaf.data.storage_offset()
            by_param.setdefault(id(leaf.data), []).append((start, shard))
    return by_param


def with_all_axes(shard: ShardedTensor) -> ShardedTensor:
    """A copy of `shard` whose data has as many axes as the whole tensor, and without core's grid of equal shards."""
    axes, data = shard.prepend_axis_num, shard.data.detach()
    data = data.view((1,) * axes + tuple(data.shape))
    return replace(shard, data=data, local_shape=tuple(data.shape), axis_fragmentations=None, prepend_axis_num=0)


def rectangular_chunks(first: int, last: int, shape: Index) -> Iterator[tuple[Index, Index]]:
    """Yield offset and size of the chunks that hold elements `first` to `last - 1` of a flattened tensor, in order.

    rectangular_chunks(3, 16, (4, 5)) -> ((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 1))
    """
    if not shape and first < last:
        yield (), ()
        return
    row, rest = prod(shape[1:]), shape[1:]
    while first < last:
        index, inner = divmod(first, row)
        if inner == 0 and last - first >= row:
            num_rows = (last - first) // row
            yield (index, *(0 for _ in rest)), (num_rows, *rest)
            first += num_rows * row
        else:  # a part of one row
            end = min(last - index * row, row)
            for offset, size in rectangular_chunks(inner, end, rest):
                yield (index, *offset), (1, *size)
            first = index * row + end


def flat_index(offset: Index, shape: Index) -> int:
    index = 0
    for position, size in zip(offset, shape):
        index = index * size + position
    return index
