"""Recomputation leaves out products whose output nobody reads, and nothing that is trained changes by one bit.

test_counted_flops.py counts the products of a step, test_traffic.py the sums over ranks that they end with, and
test_saved_tensors.py the bytes that a layer keeps.
"""

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sft.layers.unread import Unread
from sft.mcore.activations.kept_calls import KeptCalls, leaving_out_products, unread_product
from sft.mcore.activations.saved_tensors import SavePolicy
from tests.ranks import mtp_models, scenarios
from tests.ranks.alive import Alive
from tests.ranks.hf_models import recipe_of
from tests.ranks.layouts import CP, EP, MODELS, PP, SHARDED, SLOW_CP, SP
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf

FULL, KEPT, SELECTIVE = (f"train.recompute={name}" for name in ("full", "attention_kept", "selective"))
HALVES = ["model.halves={without_mlp: [1, 2], without_mixer: [3, 4]}"]
MAMBA = "model.mamba={layers: [2], num_heads: 4, num_groups: 2, head_dim: 6, state_dim: 10}"


def trained(overrides: list[str], repeats: bool) -> dict[str, Any]:
    """The numbers of two steps.  repeats: whether recomputation repeats all products"""
    leaves_out, left_out = (lambda *_: False) if repeats else Unread.leaves_out, KeptCalls.unread
    with (
        mock.patch.object(Unread, "leaves_out", leaves_out),
        mock.patch.object(KeptCalls, "unread", autospec=True, side_effect=left_out) as calls,
    ):
        result = scenarios.train(overrides, [0, 1])
    assert (calls.call_count == 0) == repeats
    return {name: result[name] for name in ("loss", "grad_norm", "parameters", "optimizer")}


CASES = [
    (1, [FULL]),
    (1, [SELECTIVE, "train.mlp_tile=40"]),
    (1, ["train.mlp_tile=40"]),
    (1, [KEPT, "train.mlp_tile=40", "run.precision=bf16"]),
    (1, [FULL, "model.residual_multiplier=0.5", "model.mlp_bias=true"]),
    (2, [KEPT, *SP]),
    (2, [FULL, *PP, "parallel.virtual_stages=2", "train.mlp_tile=40"]),
    (2, [SELECTIVE, *PP, *MODELS["linear_experts"]]),
    (2, [KEPT, *CP, *EP, *MODELS["linear_experts"], "train.offload_fraction=1"]),
    (2, [FULL, *CP, *EP, *MODELS["gpt_oss"], "data.turns=each"]),
    (2, [SELECTIVE, *CP, *EP, *MODELS["gemma4"]]),
    (2, [FULL, *CP, *SHARDED, "parallel.shard=weights", *MODELS["routers"], "train.offload_fraction=1"]),
    (2, [SELECTIVE, *CP, *SHARDED, "parallel.shard=weights", "train.head_chunks=2"]),
    (2, [KEPT, *CP, "parallel.dynamic_cp=true", *SLOW_CP, "data.turns=each"]),
    (1, [KEPT, *HALVES, MAMBA]),
    (1, [SELECTIVE, *HALVES, MAMBA]),
    (1, [FULL, *HALVES, *MODELS["latent"]]),
]


@pytest.mark.parametrize("world, overrides", CASES, ids=str)
def test_training_is_the_same_bit_for_bit(ranks: Ranks, world: int, overrides: list[str]) -> None:
    found, expected = (ranks(world).run(trained, overrides, repeats) for repeats in (False, True))
    assert found == expected


@pytest.mark.parametrize("recompute", [FULL, SELECTIVE])
def test_the_block_for_multi_token_prediction(ranks: Ranks, tmp_path: Path, recompute: str) -> None:
    recipe = [*mtp_models.joint(tmp_path), recompute]
    assert ranks(1).run(trained, recipe, False) == ranks(1).run(trained, recipe, True)


def adapted(folder: Path, family: str, targets: str) -> list[str]:
    source = hf.save(folder, family)
    return [*recipe_of(source), f"lora={{rank: 3, alpha: 8, targets: {targets}}}"]


@pytest.mark.parametrize(
    "world, family, targets, overrides",
    [
        (1, "qwen3", "[q_proj, down_proj]", [FULL]),
        (2, "qwen3", "[down_proj]", [SELECTIVE, *SP]),
        (2, "qwen3_moe", "[experts.*]", [KEPT, *CP, *EP]),
    ],
)
def test_adapters(ranks: Ranks, tmp_path: Path, world: int, family: str, targets: str, overrides: list[str]) -> None:
    """They also keep nothing for backward: neither the input of the product nor what A makes of it."""
    recipe = [*adapted(tmp_path / "source", family, targets), *overrides]
    assert ranks(world).run(trained, recipe, False) == ranks(world).run(trained, recipe, True)
    assert ranks(world).run(kept_bytes, recipe, False) == ranks(world).run(kept_bytes, recipe, True)


def kept_bytes(overrides: list[str], repeats: bool) -> int:
    """The bytes that exist after a forward pass, without those that existed before."""
    leaves_out = (lambda *_: False) if repeats else Unread.leaves_out
    with mock.patch.object(Unread, "leaves_out", leaves_out), scenarios.running(overrides) as engine:
        microbatch = scenarios.microbatch_of(engine, [scenarios.SkewedCorpus([256]).sample(0)])
        engine._set_denominator([microbatch])
        with Alive() as alive:
            given = iter([("microbatch 1 of 1", microbatch)])
            outputs = engine._forward_step(lambda *told: None, given, engine.chunks[0].train())
        gc.collect()
        assert outputs
        return alive.num_bytes()


def test_calls_of_one_caller_keep_their_order() -> None:
    """Tiles of an MLP: the second pass gets the calls in the order of the first."""
    calls, weight = KeptCalls(SavePolicy(recompute=False), False), torch.randn(3, 4, requires_grad=True)
    tiles = [torch.randn(rows, 4) for rows in (5, 2)]

    def product(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ weight.t(), None

    with leaving_out_products(calls):
        with torch.no_grad():
            outputs = [unread_product(tiles, product, [x], [weight])[0] for x in tiles]
        for x, out in zip(tiles, outputs):
            x.requires_grad_()
            again, _ = unread_product(tiles, product, [x], [weight])
            assert again.shape == out.shape and again.untyped_storage().nbytes() == 4
            grad = torch.randn_like(out)
            dx, dweight = torch.autograd.grad(again, [x, weight], grad)
            assert torch.equal(dx, grad @ weight) and torch.equal(dweight, grad.t() @ x)
        (rest,) = [unread_product(tiles, product, [x], [weight])[0] for x in tiles[:1]]
    assert torch.equal(rest, tiles[0] @ weight.t())  # no call waits, so the product is computed
