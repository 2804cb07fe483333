"""The inputs of GPU kernels, tested with replacements of the kernels on the CPU.

The replacement of torch's flash kernel gives the numbers of the plain tiles.  Apex's kernel adds gradients of weights
to their fp32 sum. megatron-core hands tensors to a rotary kernel whose widest stride is `fused_rotary.token_stride`.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers

from sft.layers.fused_rotary import token_stride
from sft.mcore.activations.saved_tensors import SavePolicy
from sft.mcore.backends import kernels
from sft.mcore.engine import Engine
from sft.mcore.model import core_config
from sft.parallel import length_classes
from tests.plain_flash import PLAIN
from tests.ranks import scenarios
from tests.ranks.layouts import GRADIENT_TOLERANCE, LOSS_TOLERANCE, TP
from tests.ranks.pool import RankFailure, Ranks

PACKS = [[1, 2, 3, 5], [0]]


def by_flash(overrides: Sequence[str], packs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """In classes of sequences of similar lengths, as torch's kernel computes packs of long and short documents."""
    in_classes = {"a replacement": replace(PLAIN, starts_all_blocks=True)}
    costs = mock.patch.multiple(length_classes, BLOCK=4, CALL_BLOCKS=0, COPY_BLOCKS=0.0)
    with mock.patch.object(kernels, "FLASH", in_classes), costs:
        return scenarios.gradients(overrides, packs)


@pytest.mark.parametrize("cp,recompute", [(1, "none"), (2, "selective"), (4, "full")])
def test_loss_and_gradients_are_those_of_the_tiles(ranks: Ranks, cp: int, recompute: str) -> None:
    recipe = [f"parallel.cp={cp}", "train.global_batch_size=3", "model.init_std=0.2", f"train.recompute={recompute}"]
    expected = ranks(cp).run(scenarios.gradients, recipe, [*PACKS, [11, 10, 6]])
    for tiles, found in zip(expected, ranks(cp).run(by_flash, recipe, [*PACKS, [11, 10, 6]])):
        assert found["num_tokens"] == tiles["num_tokens"]
        assert found["loss"] == pytest.approx(tiles["loss"], rel=LOSS_TOLERANCE)
        scenarios.check_parameters(found["gradients"], tiles["gradients"], GRADIENT_TOLERANCE)


SMALL = ["model.num_layers=2", "train.global_batch_size=2", "model.init_std=0.2"]


def accumulate(inputs: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    calls.append(main_grad.shape)
    main_grad.add_(grad.t() @ inputs)


calls: list[torch.Size] = []


def fused(overrides: list[str], hooks: bool) -> dict[str, Any]:
    """The gradients, and the number of calls of the kernel.  hooks: with the gradient hooks of portable; otherwise as
    te, which has none"""
    calls.clear()
    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    policy = Engine._make_save_policy if hooks else lambda engine: SavePolicy(recompute=False)
    with (
        mock.patch.dict(core_config.CPU_TRANSFORMER_FIELDS, gradient_accumulation_fusion=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernel, create=True),
        mock.patch.object(Engine, "_make_save_policy", policy),
    ):
        return {**scenarios.gradients(overrides, PACKS), "calls": len(calls)}


def test_fused_gradients_are_the_same_bit_for_bit(ranks: Ranks) -> None:
    """Four weights in each of two layers, and two packs."""
    (plain,) = ranks(1).run(scenarios.gradients, SMALL, PACKS)
    (found,) = ranks(1).run(fused, [*SMALL, "train.recompute=none"], False)
    assert found["calls"] == 4 * 2 * 2
    scenarios.check_parameters(found["gradients"], plain["gradients"], 0)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_hooks_and_fused_gradients_exclude_each_other(ranks: Ranks, recompute: str) -> None:
    with pytest.raises(RankFailure, match="gradient_accumulation_fusion|not have been used"):
        ranks(1).run(fused, [*SMALL, f"train.recompute={recompute}"], True)


# RECIPE has 8 query heads and 4 key heads of width 4.
STRIDES = [
    (1, ["model.qk_norm=false"], [32, 64]),  # queries are a copy; keys are a view of (8 + 4 + 4) x 4
    (1, ["model.qk_norm=true"], [32, 16]),  # both are outputs of norms
    (1, ["model.qk_norm=false", "model.num_query_groups=8"], [96, 96]),  # both are views of 3 x 8 x 4
    (2, ["model.qk_norm=false", *TP], [16, 32]),
]


def strides(overrides: list[str]) -> tuple[list[int], int]:
    """The strides between tokens of queries and of keys when attention rotates them; and our prediction of the
    widest."""
    with scenarios.running(overrides) as engine:
        attention = engine.chunks[0].module.decoder.layers[0].self_attention
        query, key, _ = attention.get_query_key_value_tensors(torch.zeros(6, 1, 32))
        return [x.squeeze(1).stride(0) for x in (query, key)], token_stride(engine.config)


@pytest.mark.parametrize("world_size, overrides, expected", STRIDES)
def test_stride_of_a_token(ranks: Ranks, world_size: int, overrides: list[str], expected: list[int]) -> None:
    for found, said in ranks(world_size).run(strides, overrides):
        assert found == expected
        assert said == max(expected)
