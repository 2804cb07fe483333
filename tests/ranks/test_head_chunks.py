"""train.head_chunks changes no more than the order of sums, on every layout, and no tensor has all heads' queries."""

from typing import Any

import pytest

from tests.ranks import scenarios
from tests.ranks.pool import Ranks

PACKS = [[0, 3], [4, 1, 2]]
SMALL = ["model.num_layers=2", "train.global_batch_size=2", "model.init_std=0.2"]
TOLERANCE = 1e-6  # of fp32 sums in another order
CHUNKS = "train.head_chunks=2"


def check(ranks: Ranks, world: int, recipe: list[str], *saving: str) -> None:
    expected = ranks(world).run(scenarios.gradients, [*SMALL, *recipe], PACKS)
    found = ranks(world).run(scenarios.gradients, [*SMALL, *recipe, *saving], PACKS)
    for one, other in zip(found, expected):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        scenarios.check_parameters(one["gradients"], other["gradients"], TOLERANCE)


@pytest.mark.parametrize("recompute", ["none", "selective", "attention_kept", "full"])
def test_gradients_of_each_recomputation(ranks: Ranks, recompute: str) -> None:
    check(ranks, 1, [], f"train.recompute={recompute}", CHUNKS)


@pytest.mark.parametrize(
    "world,recipe",
    [
        (1, ["model.norm_placement=post", "model.qk_norm=false", "model.sliding_window_layers=[1]", "model.sliding_window=40"]),
        (1, ["lora.rank=4", "model.qkv_bias=false"]),
        (2, ["parallel.cp=2", "parallel.shard=weights", "parallel.distributed_optimizer=true"]),
        (2, ["parallel.tp=2"]),
        (2, ["parallel.tp=2", "parallel.sequence_parallel=true", "lora.rank=4"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_gradients_of_each_layout(ranks: Ranks, world: int, recipe: list[str]) -> None:
    check(ranks, world, recipe, "train.recompute=full", CHUNKS)
