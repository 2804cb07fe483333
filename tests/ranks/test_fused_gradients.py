"""Gradients of weights that a kernel adds to their fp32 sum, with torch in place of Apex's kernel."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import layers

from sft.mcore.activations.saved_tensors import SavePolicy
from sft.mcore.engine import Engine
from sft.mcore.model import chunks
from tests.ranks import scenarios
from tests.ranks.pool import RankFailure, Ranks

SMALL = ["model.num_layers=2", "train.global_batch_size=2", "model.init_std=0.2"]
PACKS = [[1, 2, 3, 5], [0]]


def accumulate(inputs: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    calls.append(main_grad.shape)
    main_grad.add_(grad.t() @ inputs)


calls: list[torch.Size] = []


def fused(overrides: list[str], hooks: bool) -> dict[str, Any]:
    """Gradients, and how often the kernel ran.  hooks: as portable has them; else as te, which has none."""
    calls.clear()
    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    policy = Engine._make_save_policy if hooks else lambda engine: SavePolicy(recompute=False)
    with (
        mock.patch.dict(chunks.CPU_TRANSFORMER_FIELDS, gradient_accumulation_fusion=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernel, create=True),
        mock.patch.object(Engine, "_make_save_policy", policy),
    ):
        return {**scenarios.gradients(overrides, PACKS), "calls": len(calls)}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_fused_gradients_are_the_same_bit_for_bit(ranks: Ranks, recompute: str) -> None:
    """Of four weights in each of two layers and two packs."""
    (plain,) = ranks(1).run(scenarios.gradients, SMALL, PACKS)
    (found,) = ranks(1).run(fused, [*SMALL, f"train.recompute={recompute}"], False)
    assert found["calls"] == 4 * 2 * 2
    for name, gradient in plain["gradients"].items():
        assert np.array_equal(found["gradients"][name], gradient), name


def test_hooks_and_fused_gradients_exclude_each_other(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="gradient_accumulation_fusion"):
        ranks(1).run(fused, [*SMALL, "train.recompute=selective"], True)
