"""Kernels on a GPU: torch's flash kernel against the plain tiles in fp32, and those of RMSNorm against its formula."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.attention import flash_kernel, packed_attention, torch_kernel
from sft.mcore.attention.key_source import LocalKeys
from sft.mcore.modules.norm import RMSNorm
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


@dataclass(frozen=True)
class Heads:
    """What a kind of layers asks of the kernel."""

    width: int
    value_width: int
    window: int | None = None
    has_sinks: bool = False


KINDS = {
    "64": Heads(64, 64),
    "128": Heads(128, 128),
    "latent": Heads(192, 128),
    "256": Heads(256, 256),
    "window": Heads(128, 128, window=100),
    "256 window": Heads(256, 256, window=1024),
    "sinks": Heads(64, 64, has_sinks=True),
    "window sinks": Heads(64, 64, window=128, has_sinks=True),
}


def packed(lengths: list[int], heads: Heads) -> tuple[np.ndarray, list[Tensor]]:
    """Boundaries; query, key, value and, if there are any, sinks, then a gradient of the output; bf16 on the GPU."""
    torch.manual_seed(11)
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    shapes = [(HEADS, heads.width), (GROUPS, heads.width), (GROUPS, heads.value_width)]
    inputs = [torch.randn(sum(lengths), *shape, device="cuda").bfloat16() for shape in shapes]
    if heads.has_sinks:
        inputs.append(torch.randn(HEADS, device="cuda").bfloat16())
    return boundaries, [*inputs, torch.randn(sum(lengths), HEADS, heads.value_width, device="cuda").bfloat16()]


def by_tiles(boundaries: np.ndarray, tensors: Sequence[Tensor], window: int | None = None) -> list[Tensor]:
    """Output and gradients in fp32."""
    inputs, grad = [x.float().requires_grad_() for x in tensors[:-1]], tensors[-1].float()
    query, key, value, *sinks = inputs
    kernel = torch_kernel.TorchKernel.of(boundaries, 1, 0, grad.device, window=window)
    out = packed_attention.packed_attention(query, key, value, kernel, SCALE, None, sinks=sinks[0] if sinks else None)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def by_flash(
    boundaries: np.ndarray, tensors: Sequence[Tensor], cp_size: int, window: int | None = None
) -> list[Tensor]:
    """The same by the ranks of `cp_size`, one after the other; each takes its keys from the whole pack."""
    inputs, grad = [x.clone().requires_grad_() for x in tensors[:-1]], tensors[-1]
    query, key, value, *sinks = inputs
    out = torch.empty_like(grad)
    for rank in range(cp_size):
        kernel = flash_kernel.FlashKernel.of(boundaries, cp_size, rank, grad.device, window=window)
        chunks = context_parallel.local_chunks(boundaries, cp_size, rank)
        ends = [chunk.document_start + chunk.position + chunk.length for chunk in chunks]
        num_keys = kernel.cu_seqlens_k.diff().tolist()
        own = torch.cat([torch.arange(end - chunk.length, end) for end, chunk in zip(ends, chunks)]).cuda()
        seen = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, num_keys, strict=True)]).cuda()
        local = replace(kernel, key_source=LocalKeys())
        part = packed_attention.packed_attention(
            query[own], key[seen], value[seen], local, SCALE, None, sinks=sinks[0] if sinks else None
        )
        out = out.index_copy(0, own, part)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("cp_size", [1, 2, 8], ids="cp{}".format)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", MIXES)
def test_flash_is_the_tiles(mix: str, kind: str, cp_size: int) -> None:
    heads = KINDS[kind]
    boundaries, tensors = packed(MIXES[mix], heads)
    found = by_flash(boundaries, tensors, cp_size, heads.window)
    expected = by_tiles(boundaries, tensors, heads.window)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    assert len(errors) == 4 + heads.has_sinks
    assert errors[0] < FORWARD_TOLERANCE and max(errors[1:]) < BACKWARD_TOLERANCE, errors


def test_another_document_changes_nothing(request: pytest.FixtureRequest) -> None:
    """Bitwise, in value and gradients, whatever stands in the place of the second document."""
    # Else, and with warn_only too, the kernel adds up the gradient of queries as it comes.
    torch.use_deterministic_algorithms(True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    boundaries, tensors = packed([512, 1024, 320], KINDS["128"])
    other = [x.clone() for x in tensors]
    for x in other:
        x[512:1536] = torch.randn_like(x[512:1536])
    kept = torch.cat([torch.arange(512), torch.arange(1536, 1856)]).cuda()
    for a, b in zip(by_flash(boundaries, tensors, 1), by_flash(boundaries, other, 1)):
        assert torch.equal(a[kept], b[kept])


def test_the_length_of_another_document_changes_nothing() -> None:
    """Bitwise: how the kernel divides the keys of one may not depend on the longest of the pack."""
    _, (query, key, value, _) = packed([512, 16384], KINDS["128"])
    outs = []
    for rest in (64, 16384):
        boundaries = np.array([0, 512, 512 + rest], dtype=np.int32)
        kernel = flash_kernel.FlashKernel.of(boundaries, 1, 0, query.device)
        outs.append(kernel.forward(*(x[: 512 + rest] for x in (query, key, value)), SCALE)[0][:512])
    assert torch.equal(*outs)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", list(NORM_TOLERANCE), ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_is_its_formula(dtype: torch.dtype, eps: float, zero_centered: bool) -> None:
    """In fp64.  eps, weight and the offset of the weight reach the kernel."""
    torch.manual_seed(4)
    config: Any = SimpleNamespace(
        params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=zero_centered
    )
    norm = RMSNorm(config, 256, eps=eps).cuda()
    norm.weight.data.normal_()
    x, grad = (torch.randn(300, 2, 256, device="cuda").to(dtype) for _ in range(2))
    a, b, weight = x.clone().requires_grad_(), x.double().requires_grad_(), norm.weight.detach().double()
    found = norm(a)
    expected = b * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + eps) * (weight.requires_grad_() + zero_centered)
    found.backward(grad)
    expected.backward(grad.double())
    for ours, reference in ((found, expected), (a.grad, b.grad), (norm.weight.grad, weight.grad)):
        assert ours is not None and reference is not None and ours.dtype == dtype
        assert (ours.double() - reference).norm() <= NORM_TOLERANCE[dtype] * reference.norm()
