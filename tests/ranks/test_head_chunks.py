"""train.head_chunks changes no more than the order of sums, and no tensor has the queries of all heads and tokens."""

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sft.mcore.attention import torch_kernel
from tests.ranks import scenarios
from tests.ranks.layouts import CP, GEMMA4, SHARDED, SP, TP
from tests.ranks.pool import Ranks
from tests.ranks.test_attention_kept import LAYERS, expected_calls, kernel_calls

PACKS = [[1, 2, 3, 5], [0]]
SMALL = ["model.num_layers=2", "train.global_batch_size=2", "model.init_std=0.2"]
FULL = "train.recompute=full"
SINKS = ["model.attention_sinks=true", "model.attention_output_bias=true"]
WINDOWS = ["model.sliding_window=20", "model.sliding_window_layers=[1]"]
TOLERANCE = 1e-6  # of a gradient's norm: fp32 sums in another order


@pytest.mark.parametrize(
    "world, recipe, saving",
    [
        *((1, [], [f"train.recompute={recompute}"]) for recompute in ("none", "selective", "attention_kept", "full")),
        (1, ["model.norm_placement=post", "model.qk_norm=false", "model.qkv_bias=false"], [FULL]),
        (1, [*GEMMA4, *WINDOWS], [FULL]),  # values without a projection, and normed
        (2, [*CP, *WINDOWS, *SINKS], ["train.mlp_tile=40", FULL]),
        (2, [*CP, *SHARDED, "parallel.shard=weights"], [FULL, "train.offload_fraction=1"]),
        (2, TP, ["train.recompute=selective"]),
        (2, SP, [FULL, "train.mlp_tile=40"]),
    ],
    ids=str,
)
def test_gradients(ranks: Ranks, world: int, recipe: list[str], saving: list[str]) -> None:
    expected = ranks(world).run(scenarios.gradients, [*SMALL, *recipe], PACKS)
    found = ranks(world).run(scenarios.gradients, [*SMALL, *recipe, *saving, "train.head_chunks=2"], PACKS)
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        scenarios.check_parameters(one["gradients"], other["gradients"], TOLERANCE)


@pytest.mark.parametrize("recompute, forward", [("full", 2), ("attention_kept", 1)])
def test_kernels_run_as_often_as_without_chunks(ranks: Ranks, recompute: str, forward: int) -> None:
    """Over cp, attention without chunks has four head groups.  Four chunks have one each."""
    recipe = [*CP, f"train.recompute={recompute}"]
    for more in ([], ["train.head_chunks=4"]):
        assert ranks(2).run(kernel_calls, [*recipe, *more]) == [expected_calls(forward, 4 * LAYERS, 0)] * 2


class Large(TorchDispatchMode):
    """Counts the new tensors of at least `least` elements, by shape."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.shapes = least, Counter[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.numel() >= self.least:
                if x.untyped_storage().data_ptr() not in given:
                    self.shapes[tuple(x.shape)] += 1
        return result


def large_tensors(overrides: list[str]) -> dict[tuple[int, ...], int]:
    """The tensors of a forward and a backward pass with as many elements as the queries of all heads have, by shape."""
    with ExitStack() as stack:
        engine = stack.enter_context(scenarios.running(overrides))
        tokens, model = engine.config.data.seq_length, engine.config.model
        for name in ("QUERY_TILE", "KEY_TILE"):
            stack.enter_context(mock.patch.object(torch_kernel, name, 16))
        microbatch = scenarios.microbatch_of(engine, [scenarios.SkewedCorpus([tokens]).sample(0)])
        with Large(tokens * model.num_attention_heads * model.resolved_head_dim) as large:
            scenarios.backward(engine, [microbatch])
        return dict(large.shapes)


def test_no_tensor_has_all_heads_but_the_output_and_its_gradient(ranks: Ranks) -> None:
    """8 heads of 8, and hidden states of 32.  The output exists twice, because backward computes the layer again."""
    recipe = ["model.num_layers=1", "model.hidden_size=32", "model.head_dim=8", "train.global_batch_size=1", FULL]
    recipe += ["train.mlp_tile=16", "model.qkv_bias=true", "model.qk_norm=true"]
    (found,) = ranks(1).run(large_tensors, [*recipe, "train.head_chunks=4"])
    assert found == {(256, 8, 8): 2, (256, 64): 1}
    (plain,) = ranks(1).run(large_tensors, recipe)
    assert sum(plain.values()) > 10
