"""Describes this rank's reduced gradients as chunks of unsharded gradients, whose names are equal on every layout."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from sft.mcore.checkpoint_io.engine_state import trained_state
from sft.mcore.checkpoint_io.optimizer_shards import MAIN, optimizer_slices, sharded_slices
from sft.mcore.engine import Engine

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_STACKED = re.compile(r"decoder\.layers\.(?!\d)")  # the first axis of such a tensor is the layer


@dataclass(frozen=True, kw_only=True)
class GradientChunk:
    """A rectangular part of the gradient of one parameter, on the device, in the dtype of `optim.grad_dtype`."""

    parameter: str  # "layer 4 mlp.linear_fc1.weight", layers counted from 1; outside of layers, the key in checkpoints
    shape: tuple[int, ...]  # shape of the whole gradient
    offset: tuple[int, ...]  # offset of `data` in the whole gradient
    data: Tensor


def gradient_chunks(engine: Engine) -> Iterator[GradientChunk]:
    """Yield this rank's chunks.  If several ranks hold the same chunk, only the first of them yields it.

    So the chunks of all ranks have every element of every gradient exactly once.  Call this function after
    `engine.measure(..., forward_only=False)`.  With the distributed optimizer, a rank holds the reduced gradients of
    the elements that it updates.
    """
    slices = [replace(part, tensors={MAIN: part.gradient}) for part in optimizer_slices(engine.optimizer)]
    for shard in sharded_slices(slices, trained_state(engine), main=""):
        if not any(shard.replica_id):
            yield chunk_of(shard)


def chunk_of(shard: ShardedTensor) -> GradientChunk:
    """The shard as a chunk of one layer's parameter.  The shard of a stack of layers loses the axis of layers."""
    name, skipped = shard.key, 0
    if layer := _LAYER.match(name):
        name = f"layer {int(layer[1]) + 1} {_LAYER.sub('', name)}"
    elif _STACKED.match(name):
        name, skipped = f"layer {shard.global_offset[0] + 1} {_STACKED.sub('', name)}", 1
    return GradientChunk(
        parameter=name,
        shape=tuple(shard.global_shape[skipped:]),
        offset=tuple(shard.global_offset[skipped:]),
        data=shard.data[0] if skipped else shard.data,
    )
