"""The tensors that megatron-core hands to a rotary kernel: `fused_rotary.token_stride` is their widest stride."""

import pytest
import torch

from sft.layers.fused_rotary import token_stride
from tests.ranks import scenarios
from tests.ranks.pool import Ranks

# RECIPE: 8 heads and 4 key heads of 4 numbers.
CASES = [
    (1, ["model.qk_norm=false"], [32, 64]),  # queries are a copy; keys a view of (8 + 4 + 4) x 4
    (1, ["model.qk_norm=true"], [32, 16]),  # both are what the norm has written
    (1, ["model.qk_norm=false", "model.num_query_groups=8"], [96, 96]),  # both are views of 3 x 8 x 4
    (2, ["model.qk_norm=false", "parallel.tp=2"], [16, 32]),
]


def strides(overrides: list[str]) -> tuple[list[int], int]:
    """Of a token of queries and of keys, as attention rotates them; and what we say."""
    with scenarios.running(overrides) as engine:
        attention = engine.chunks[0].module.decoder.layers[0].self_attention
        query, key, _ = attention.get_query_key_value_tensors(torch.zeros(6, 1, 32))
        return [x.squeeze(1).stride(0) for x in (query, key)], token_stride(engine.config)


@pytest.mark.parametrize("world_size, overrides, expected", CASES)
def test_stride_of_a_token(ranks: Ranks, world_size: int, overrides: list[str], expected: list[int]) -> None:
    for found, said in ranks(world_size).run(strides, overrides):
        assert found == expected
        assert said == max(expected)
