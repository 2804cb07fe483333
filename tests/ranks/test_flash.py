"""What torch's flash kernel is fed gives the numbers of the plain tiles, with a stand-in for the kernel on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.attention import flash_kernel
from tests.ranks import scenarios
from tests.ranks.layouts import GRADIENT_TOLERANCE
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
LOSS_TOLERANCE = 1e-6  # fp32, sums in another order
PACKS = [[1, 2, 3, 5], [0], [11, 10, 6]]


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The kernel by its documentation, a sequence at a time: causal from the bottom right, heads in groups."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert int(cu_seqlens_q[-1]) == len(query) and int(cu_seqlens_k[-1]) == len(key)
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q and int(cu_seqlens_k.diff().max()) == max_seqlen_k
    outs, sums = [], []
    per_group = query.shape[1] // key.shape[1]
    for i in range(len(cu_seqlens_q) - 1):
        q = query[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
        k, v = (x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].repeat_interleave(per_group, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, dim=1)


def plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *boundaries: Any,
    scale: float,
) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        again, sums = plain(*inputs, *boundaries, scale=scale)
    assert torch.equal(again, out) and torch.equal(sums, lse)  # those of the same heads
    return torch.autograd.grad(again, inputs, grad)


def by_flash(overrides: Sequence[str], packs: Sequence[Sequence[int]]) -> dict[str, Any]:
    with (
        mock.patch.object(flash_kernel, "why_not", lambda *told: None),
        mock.patch.object(flash_kernel, "TORCH", flash_kernel.Operators(plain, plain_backward)),  # type: ignore
    ):
        return scenarios.gradients(overrides, packs)


@pytest.mark.parametrize("cp,recompute", [(1, "none"), (2, "selective"), (4, "full")])
def test_loss_and_gradients_are_those_of_the_tiles(ranks: Ranks, cp: int, recompute: str) -> None:
    recipe = [f"parallel.cp={cp}", "train.global_batch_size=3", "model.init_std=0.2", f"train.recompute={recompute}"]
    expected = ranks(cp).run(scenarios.gradients, recipe, PACKS)
    for tiles, found in zip(expected, ranks(cp).run(by_flash, recipe, PACKS)):
        assert found["num_tokens"] == tiles["num_tokens"]
        assert found["loss"] == pytest.approx(tiles["loss"], rel=LOSS_TOLERANCE)
        for name, gradient in tiles["gradients"].items():
            error = np.linalg.norm(found["gradients"][name] - gradient)
            assert error <= GRADIENT_TOLERANCE * np.linalg.norm(gradient), name
