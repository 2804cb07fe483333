"""Names of optimizer tensors if some layers or experts are frozen."""

from dataclasses import replace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from sft.layers.adapters import Trained, Weight
from sft.mcore.checkpoint_io.partial_stacks import for_load, for_save

KEY = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
STATE = f"optimizer.state.exp_avg.{KEY}"
LAYER = "optimizer.state.exp_avg.decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
EXPERT = "optimizer.state.exp_avg.decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight"


def shard() -> ShardedTensor:
    """Row 4 of the third of four experts, in the second of two layers."""
    return ShardedTensor(
        key=STATE,
        data=torch.arange(3.0).view(1, 1, 1, 3),
        dtype=torch.float32,
        local_shape=(1, 1, 1, 3),
        global_shape=(2, 4, 5, 3),
        global_offset=(1, 2, 4, 0),
        axis_fragmentations=None,
    )


def trained(*indices: tuple[int, ...]) -> Trained:
    return Trained(whole=[Weight(key=KEY, index=index, shape=(5, 3)) for index in indices])


EXPERTS = [(1, expert) for expert in range(4)]


@pytest.mark.parametrize(
    "indices,key,shape,offset",
    [
        ([(0, expert) for expert in range(4)] + EXPERTS, STATE, (2, 4, 5, 3), (1, 2, 4, 0)),
        (EXPERTS, LAYER, (4, 5, 3), (2, 4, 0)),
        (EXPERTS[1:], EXPERT, (5, 3), (4, 0)),
    ],
)
def test_a_stack_with_holes_is_taken_apart(
    indices: list[tuple[int, ...]], key: str, shape: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    (saved,) = for_save([shard()], trained(*indices))
    assert (saved.key, saved.global_shape, saved.global_offset) == (key, shape, offset)
    assert saved.local_shape == tuple(saved.data.shape) and torch.equal(saved.data.flatten(), torch.arange(3.0))
    (loaded,) = for_load([shard()], {key, "another"})
    assert (loaded.key, loaded.global_shape, loaded.global_offset) == (key, shape, offset)


def test_a_stack_stays_one_if_all_weights_are_trained() -> None:
    (saved,) = for_save([shard()], Trained())
    (missing,) = for_load([shard()], {"another"})
    assert saved.key == missing.key == STATE


def test_experts_of_a_layer_with_tensors_of_its_own() -> None:
    """If a model has layers of several kinds, only the experts of a layer are stacked."""
    key = "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
    own = replace(
        shard(),
        key=f"optimizer.state.exp_avg.{key}",
        data=torch.arange(3.0).view(1, 1, 3),
        local_shape=(1, 1, 3),
        global_shape=(4, 5, 3),
        global_offset=(2, 4, 0),
    )
    weights = [Weight(key=key, index=(expert,), shape=(5, 3)) for expert in range(4)]
    assert all(weight.layer == 1 and weight.is_expert for weight in weights)
    (saved,) = for_save([own], Trained(whole=weights))
    assert saved.key == own.key
    (part,) = for_save([own], Trained(whole=weights[1:]))
    assert (part.key, part.global_offset) == (EXPERT, (4, 0))
    (loaded,) = for_load([own], {EXPERT})
    assert loaded.key == EXPERT
