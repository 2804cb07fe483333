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


def test_sequences_written_out() -> None:
    """A document of 8 and one of 4 over two ranks; gathered parts hold 0 1 6 7 8 11 | 2 3 4 5 9 10."""
    boundaries = np.array([0, 8, 12], dtype=np.int32)
    early = flash_kernel.FlashKernel.of(boundaries, 2, 0, torch.device("cpu"))
    assert early.cu_seqlens_q.tolist() == [0, 2, 4, 5, 6]
    assert early.cu_seqlens_k.tolist() == [0, 2, 10, 11, 15]
    assert early.key_order is not None
    assert early.key_order.tolist() == [0, 1, 0, 1, 6, 7, 8, 9, 2, 3, 4, 4, 10, 11, 5]
    assert (early.max_seqlen_q, early.max_seqlen_k) == (2, 8)
    late = flash_kernel.FlashKernel.of(boundaries, 2, 1, torch.device("cpu"))
    assert late.cu_seqlens_q.tolist() == [0, 2, 4, 5, 6]
    assert late.cu_seqlens_k.tolist() == [0, 4, 10, 12, 15]
    alone = flash_kernel.FlashKernel.of(boundaries, 1, 0, torch.device("cpu"))
    assert alone.key_order is None
    assert alone.cu_seqlens_q.tolist() == alone.cu_seqlens_k.tolist() == [0, 8, 12]


@pytest.mark.parametrize(
    "head_dim, dtype, device, reason",
    [
        (128, torch.bfloat16, "cpu", "it needs CUDA"),
        (128, torch.float32, "cuda", "it computes in bf16 only"),
        (288, torch.bfloat16, "cuda", "it has heads of up to 256 in multiples of 8, and this model's are 288 wide"),
        (100, torch.bfloat16, "cuda", "it has heads of up to 256 in multiples of 8, and this model's are 100 wide"),
        (128, torch.bfloat16, "cuda", None),
    ],
)
def test_why_not(head_dim: int, dtype: torch.dtype, device: str, reason: str | None) -> None:
    assert flash_kernel.why_not(head_dim, dtype, device) == reason


def test_the_kernel_of_this_torch_takes_what_it_is_given() -> None:
    """Shapes and names only: on the meta device nothing is computed."""
    assert flash_kernel._missing() is None
    made = {"device": "meta", "dtype": torch.bfloat16}
    query, key = torch.empty(12, 8, 64, **made), torch.empty(15, 2, 64, **made)
    boundaries = torch.empty(5, dtype=torch.int32, device="meta")
    sizes = boundaries, boundaries, 2, 8
    out, lse = flash_kernel.TORCH.forward(query, key, key, *sizes, scale=0.125)
    assert out.shape == query.shape and lse.shape == (8, 12)
    grads = flash_kernel.TORCH.backward(out, query, key, key, out, lse, *sizes, scale=0.125)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]
