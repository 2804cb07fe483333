"""Adapters of Linears whose rows form blocks, for example a query and a gate for each head."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from sft.layers.adapters import AdaptedWeight, Adapter
from sft.mcore.lora.factors import Factors
from sft.mcore.lora.split import Split

ADAPTER = Adapter(name="q_proj", parts=(0, 1), num_blocks=4)
WEIGHT = AdaptedWeight(
    module="self_attention.linear_qkv", layer=0, num_experts=0, part_rows=(8, 8, 4, 4), num_columns=3, num_groups=2,
    adapters=(ADAPTER,),
)  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_b_lie_block_by_block(rank: int) -> None:
    """Four heads of width 2: rows 0 and 1 of each block of 4 are queries, rows 2 and 3 are gates.  A rank has two
    heads."""
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    split = Split(group=group, by_columns=False, sequence_parallel=False, replica=0)
    factors = Factors(ADAPTER, WEIGHT, 5, split, torch.empty(20, 3))
    a, queries, gates = factors.leaves()
    assert isinstance(a, ShardedTensor) and a.global_shape == (5, 3)
    for leaf, factor, first in ((queries, factors.b[0], 0), (gates, factors.b[1], 2)):
        assert isinstance(leaf, ShardedTensorFactory) and leaf.data is factor and factor.shape == (4, 5)
        parts: Any = leaf.build()
        assert [part.global_offset for part in parts] == [(8 * rank + first, 0), (8 * rank + first + 4, 0)]
        assert all(part.global_shape == (16, 5) and part.data.is_contiguous() for part in parts)
        assert torch.equal(torch.cat([part.data for part in parts]).isnan(), factor.isnan())
        assert [part.data.data_ptr() for part in parts] == [factor[:2].data_ptr(), factor[2:].data_ptr()]
