"""Kernels on a GPU: torch's flash kernel against the plain tiles in fp32, and that of RMSNorm against plain torch."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.attention import flash_kernel, packed_attention, torch_kernel
from sft.mcore.attention.key_source import LocalKeys
from sft.mcore.norm import RMSNorm, _RMSNorm
from sft.parallel import context_parallel

HEADS, GROUPS, SCALE = 8, 2, 0.125
# bf16 has 8 bits of mantissa, and inputs are rounded alike on both sides: of the norm.
FORWARD_TOLERANCE, BACKWARD_TOLERANCE = 1e-2, 2e-2
NORM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the norm
MIXES = {
    "one": [4096],
    "many": [64, 192, 320, 64, 1024, 256, 64, 64],
    "skewed": [64] * 16 + [3072],
}


def packed(lengths: list[int], head_dim: int) -> tuple[np.ndarray, tuple[Tensor, ...]]:
    """Boundaries; query, key, value and a gradient of the output, bf16 on the GPU."""
    torch.manual_seed(11)
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    shapes = [(heads, head_dim) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return boundaries, tuple(torch.randn(sum(lengths), *s, device="cuda").bfloat16() for s in shapes)


def by_tiles(boundaries: np.ndarray, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients in fp32."""
    query, key, value = (x.float().requires_grad_() for x in tensors[:3])
    kernel = torch_kernel.TorchKernel.of(boundaries, 1, 0, query.device)
    out = packed_attention.packed_attention(query, key, value, kernel, SCALE, None)
    out.backward(tensors[3].float())
    return [out.detach(), *(x.grad for x in (query, key, value))]  # type: ignore[list-item]


def by_flash(boundaries: np.ndarray, tensors: tuple[Tensor, ...], cp_size: int) -> list[Tensor]:
    """The same by the ranks of `cp_size`, one after the other; keys are gathered here as they are between ranks."""
    query, key, value = (x.clone().requires_grad_() for x in tensors[:3])
    order = np.concatenate([context_parallel.local_indices(boundaries, cp_size, rank) for rank in range(cp_size)])
    gathered = [x[torch.from_numpy(order).cuda()] for x in (key, value)]
    out = torch.empty_like(query)
    for rank in range(cp_size):
        seen = flash_kernel.FlashKernel.of(boundaries, cp_size, rank, query.device)
        here = torch.from_numpy(context_parallel.local_indices(boundaries, cp_size, rank)).cuda()
        keys, values = (x if cp_size == 1 else x[seen.key_source.key_order] for x in gathered)
        part = packed_attention.packed_attention(
            query[here], keys, values, replace(seen, key_source=LocalKeys()), SCALE, None
        )
        out = out.index_copy(0, here, part)
    out.backward(tensors[3])
    return [out.detach(), *(x.grad for x in (query, key, value))]  # type: ignore[list-item]


@pytest.mark.parametrize("cp_size", [1, 2, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mix", MIXES)
def test_flash_is_the_tiles(mix: str, head_dim: int, cp_size: int) -> None:
    boundaries, tensors = packed(MIXES[mix], head_dim)
    expected, found = by_tiles(boundaries, tensors), by_flash(boundaries, tensors, cp_size)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected)]
    assert errors[0] < FORWARD_TOLERANCE and max(errors[1:]) < BACKWARD_TOLERANCE, errors


def test_another_document_changes_nothing(request: pytest.FixtureRequest) -> None:
    """Bitwise, in value and gradients, whatever stands in the place of the second document."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # the kernel adds up the gradient of queries as it comes
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    boundaries, tensors = packed([512, 1024, 320], 128)
    other = [x.clone() for x in tensors]
    for x in other:
        x[512:1536] = torch.randn_like(x[512:1536])
    kept = torch.cat([torch.arange(512), torch.arange(1536, 1856)]).cuda()
    for a, b in zip(by_flash(boundaries, tensors, 1), by_flash(boundaries, tuple(other), 1)):
        assert torch.equal(a[kept], b[kept])


def test_the_length_of_another_document_changes_nothing() -> None:
    """Bitwise: how the kernel divides the keys of one may not depend on the longest of the pack."""
    _, (query, key, value, _) = packed([512, 16384], 128)
    outs = []
    for rest in (64, 16384):
        boundaries = np.array([0, 512, 512 + rest], dtype=np.int32)
        kernel = flash_kernel.FlashKernel.of(boundaries, 1, 0, query.device)
        outs.append(kernel.forward(*(x[: 512 + rest] for x in (query, key, value)), SCALE)[0][:512])
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", list(NORM_TOLERANCE), ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_is_plain_torch(dtype: torch.dtype, eps: float) -> None:
    """eps and weight reach its kernel."""
    torch.manual_seed(4)
    config: Any = SimpleNamespace(params_dtype=dtype, sequence_parallel=False)
    norm = RMSNorm(config, 256, eps=eps).cuda()
    norm.weight.data.normal_()
    weight = norm.weight.detach().clone().requires_grad_()
    x, grad = (torch.randn(300, 2, 256, device="cuda").to(dtype) for _ in range(2))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = norm(a), _RMSNorm.apply(b, weight, eps)
    found.backward(grad)
    expected.backward(grad)
    assert norm.weight.grad is not None
    for mine, theirs in ((found, expected), (a.grad, b.grad), (norm.weight.grad, weight.grad)):
        assert mine.dtype == dtype
        assert (mine.float() - theirs.float()).norm() <= NORM_TOLERANCE[dtype] * theirs.float().norm()
