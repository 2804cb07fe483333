"""Names optimizer tensors of weights that are trained only in some layers or only for some experts.

Megatron-LM stacks the tensors of all layers along the first axis, and the tensors of a layer's experts along the
second.  If train.freeze freezes a weight in some layers, the stack would lack their tensors, and a checkpoint must hold
every element of a tensor.  So each trained layer gets a tensor of its own, under the name that core uses in models
whose layers differ and are not stacked.  If some experts of a layer are frozen, each expert gets a tensor of its own.

    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight [layers, h, f], layer 3
    optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc2.weight [h, f]
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from math import prod

from megatron.core.dist_checkpointing.mapping import ShardedTensor

from sft.layers.adapters import Trained

_LAYERS, _EXPERTS = "decoder.layers.", ".experts.experts."


def for_save(shards: Iterable[ShardedTensor], trained: Trained) -> Iterator[ShardedTensor]:
    """The shards under the names of a checkpoint.  A stack that is trained only in part becomes several tensors."""
    indices: dict[str, list[tuple[int, ...]]] = {}
    for weight in trained.whole or ():
        indices.setdefault(weight.key, []).append(weight.index)
    for shard in shards:
        prefix, layers, rest = shard.key.partition(_LAYERS)
        yield unstacked(shard, _depth(indices.get(layers + rest, []), shard.global_shape))


def for_load(shards: Iterable[ShardedTensor], stored: Collection[str]) -> Iterator[ShardedTensor]:
    """Yield the shards under their names in a checkpoint with the keys `stored`.  If it lacks one, its name stays."""
    for shard in shards:
        forms = [shard]
        forms += [unstacked(shard, depth) for depth in range(1, len(_axes(shard.key)) + 1)]
        yield next((form for form in forms if form.key in stored), shard)


def unstacked(shard: ShardedTensor, depth: int) -> ShardedTensor:
    """The shard as part of a tensor without the first `depth` stack axes (layers, experts).

    The key of the tensor contains the shard's indices on these axes.
    """
    key, index = shard.key, shard.global_offset[:depth]
    for axis, number in zip(_axes(shard.key), index):
        key = key.replace(axis, f"{axis}{number}.", 1)
    assert shard.prepend_axis_num == 0 and tuple(shard.local_shape[:depth]) == (1,) * depth
    return replace(
        shard,
        key=key,
        data=shard.data.view(shard.data.shape[depth:]),
        local_shape=tuple(shard.local_shape[depth:]),
        global_shape=tuple(shard.global_shape[depth:]),
        global_offset=tuple(shard.global_offset[depth:]),
    )


def _axes(key: str) -> list[str]:
    """The parts of a key that stand for its stack axes: first layers, then experts.  A tensor may lack either axis."""
    _, is_in_layers, name = key.partition(_LAYERS)
    stacks_layers = is_in_layers and not name.partition(".")[0].isdecimal()
    return [_LAYERS] * bool(stacks_layers) + [_EXPERTS] * (_EXPERTS in key)


def _depth(indices: list[tuple[int, ...]], shape: tuple[int, ...]) -> int:
    """The number of stack axes to remove so that all tensors are complete.

    indices: (layer,) or (layer, expert) of each trained weight; shape: shape of the whole stack

    shape (2, 4, h, f), two layers of four experts: all eight are trained -> 0; only the four of layer 1 -> 1; only
    three of them -> 2
    """
    num_axes = len(indices[0]) if indices else 0
    if not indices or len(indices) == prod(shape[:num_axes]):
        return 0
    num_layers = len({layer for layer, *_ in indices})
    return 1 if len(indices) == num_layers * prod(shape[1:num_axes]) else 2
