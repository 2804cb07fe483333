"""Kernels on a GPU: each flash kernel against the plain tiles in fp32, and those of RMSNorm against its formula."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.attention import packed_attention, torch_kernel
from sft.mcore.attention.flash_kernel import Demand, FlashKernel
from sft.mcore.attention.key_source import LocalKeys
from sft.mcore.backends import kernels
from sft.mcore.modules.norm import RMSNorm
from sft.parallel import context_parallel
from sft.parallel.branches import Branches
from tests.gpu import runs

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
    softcap: float | None = None
    groups: int = GROUPS
    heads: int = HEADS

    @property
    def demand(self) -> Demand:
        return Demand(
            "cuda",
            torch.bfloat16,
            self.width,
            self.value_width,
            heads_per_key=self.heads // self.groups,
            has_window=self.window is not None,
            softcap=self.softcap,
        )


KINDS = {
    "64": Heads(64, 64),
    "128": Heads(128, 128),
    "latent": Heads(192, 128, groups=HEADS),
    "256": Heads(256, 256),
    "window": Heads(128, 128, window=100),
    "256 window": Heads(256, 256, window=1024),
    "sinks": Heads(64, 64, has_sinks=True),
    "window sinks": Heads(64, 64, window=128, has_sinks=True),
    "window cap": Heads(128, 128, window=1024, softcap=20.0),
    "256 window cap": Heads(256, 256, window=1024, softcap=20.0),
    "seven heads a key": Heads(128, 128, heads=14),
    "512": Heads(512, 512),
}
NAMES = tuple(kernels.FLASH)


def fit(name: str, kind: str) -> str:
    """`name`, if that kernel is there and computes layers of that kind; else the test is skipped."""
    if reason := kernels.FLASH[name].why_not(KINDS[kind].demand):
        pytest.skip(f"{name}: {reason}")
    return name


def packed(lengths: list[int], heads: Heads) -> tuple[np.ndarray, list[Tensor]]:
    """Boundaries; query, key, value and, if there are any, sinks, then a gradient of the output; bf16 on the GPU."""
    torch.manual_seed(11)
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    shapes = [(heads.heads, heads.width), (heads.groups, heads.width), (heads.groups, heads.value_width)]
    inputs = [torch.randn(sum(lengths), *shape, device="cuda").bfloat16() for shape in shapes]
    if heads.has_sinks:
        inputs.append(torch.randn(heads.heads, device="cuda").bfloat16())
    return boundaries, [*inputs, torch.randn(sum(lengths), heads.heads, heads.value_width, device="cuda").bfloat16()]


def by_tiles(
    boundaries: np.ndarray, tensors: Sequence[Tensor], heads: Heads, branches: Branches | None = None
) -> list[Tensor]:
    """Output and gradients in fp32."""
    options: Any = {"window": heads.window, "softcap": heads.softcap, "branches": branches}
    kernel = torch_kernel.TorchKernel.of(boundaries, 1, 0, tensors[0].device, **options)
    return attended(kernel, [x.float() for x in tensors])


def attended(kernel: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients on one rank."""
    inputs = [x.clone().requires_grad_() for x in tensors[:-1]]
    query, key, value, *sinks = inputs
    out = packed_attention.packed_attention(query, key, value, kernel, SCALE, None, sinks=sinks[0] if sinks else None)
    out.backward(tensors[-1])
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def by_flash(
    name: str, boundaries: np.ndarray, tensors: Sequence[Tensor], cp_size: int, heads: Heads = KINDS["128"]
) -> list[Tensor]:
    """The same by the ranks of `cp_size`, one after the other; each takes its keys from the whole pack."""
    inputs, grad = [x.clone().requires_grad_() for x in tensors[:-1]], tensors[-1]
    query, key, value, *sinks = inputs
    out = torch.empty_like(grad)
    for rank in range(cp_size):
        kernel = FlashKernel.of(
            boundaries,
            cp_size,
            rank,
            grad.device,
            operators=replace(kernels.FLASH[name], starts_all_blocks=False),  # one call
            window=heads.window,
            softcap=heads.softcap,
        )
        chunks = context_parallel.local_chunks(boundaries, cp_size, rank)
        ends = [chunk.document_start + chunk.position + chunk.length for chunk in chunks]
        num_keys = kernel.calls[0].cu_seqlens_k.diff().tolist()
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
@pytest.mark.parametrize("name", NAMES)
def test_flash_is_the_tiles(name: str, mix: str, kind: str, cp_size: int) -> None:
    heads = KINDS[kind]
    boundaries, tensors = packed(MIXES[mix], heads)
    close(by_flash(fit(name, kind), boundaries, tensors, cp_size, heads), by_tiles(boundaries, tensors, heads), heads)


def close(found: Sequence[Tensor], expected: Sequence[Tensor], heads: Heads) -> None:
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    assert len(errors) == 4 + heads.has_sinks
    assert errors[0] < FORWARD_TOLERANCE and max(errors[1:]) < BACKWARD_TOLERANCE, errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_branches(name: str, kind: str) -> None:
    """Three behind different tokens of the first document, one of which has a branch; the last document has none."""
    heads = KINDS[kind]
    boundaries, tensors = packed([1024, 192, 320, 64, 256, 128], heads)
    branches = Branches.of([-1, 0, 0, 2, 0, -1], [0, 100, 500, 33, 1000, 0])
    options: Any = {"window": heads.window, "softcap": heads.softcap, "branches": branches}
    operators = kernels.FLASH[fit(name, kind)]
    kernel = FlashKernel.of(boundaries, 1, 0, tensors[0].device, operators=operators, **options)
    close(attended(kernel, tensors), by_tiles(boundaries, tensors, heads, branches), heads)


@pytest.mark.parametrize("mix, kind", [("skewed", "512"), ("one", "window cap"), ("many", "sinks")])
def test_tiles_on_tensor_cores_are_the_tiles(mix: str, kind: str) -> None:
    """In bf16 against fp32."""
    heads = KINDS[kind]
    boundaries, tensors = packed(MIXES[mix], heads)
    options: Any = {"window": heads.window, "softcap": heads.softcap}
    kernel = torch_kernel.TorchKernel.of(boundaries, 1, 0, tensors[0].device, **options)
    close(attended(kernel, tensors), by_tiles(boundaries, tensors, heads), heads)


@pytest.mark.parametrize("name", NAMES)
def test_some_heads_of_wider_tensors(name: str) -> None:
    """Under context parallelism a kernel gets one head group after the other, as a view."""
    kind = "512" if name == "ffpa-attn" else "128"
    boundaries, tensors = packed([512, 64], KINDS[kind])
    kernel = FlashKernel.of(boundaries, 1, 0, tensors[0].device, operators=kernels.FLASH[fit(name, kind)])
    views = [x.chunk(2, dim=1)[1] for x in tensors]
    copies = [x.contiguous() for x in views]
    for (query, key, value, grad), other in ((views, copies), (copies, copies)):
        out, lse = kernel.forward(query, key, value, SCALE)
        expected, sums = kernel.forward(*other[:3], SCALE)
        assert torch.equal(out, expected) and torch.equal(lse, sums)
        found = kernel.backward(grad, query, key, value, out, lse, SCALE)
        for a, b in zip(found, kernel.backward(other[3], *other[:3], expected, sums, SCALE)):
            assert float((a.float() - b.float()).norm() / b.float().norm()) < BACKWARD_TOLERANCE


@pytest.mark.parametrize("kind", ["64", "128", "latent", "256", "window", "256 window", "window cap"])
@pytest.mark.parametrize("name", NAMES)
def test_another_document_changes_nothing(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Bitwise, in value and gradients, whatever stands in the place of the second document."""
    # Else, and with warn_only too, the kernel adds up the gradient of queries as it comes.
    torch.use_deterministic_algorithms(True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    heads = KINDS[kind]
    if reason := kernels.FLASH[name].why_not(heads.demand._replace(is_deterministic=True)):
        pytest.skip(f"{name}: {reason}")
    boundaries, tensors = packed([512, 1024, 320], heads)
    other = [x.clone() for x in tensors]
    for x in other:
        x[512:1536] = torch.randn_like(x[512:1536])
    kept = torch.cat([torch.arange(512), torch.arange(1536, 1856)]).cuda()
    for a, b in zip(by_flash(name, boundaries, tensors, 1, heads), by_flash(name, boundaries, other, 1, heads)):
        assert torch.equal(a[kept], b[kept])


@pytest.mark.parametrize("name", NAMES)
def test_the_length_of_another_document_changes_nothing(name: str) -> None:
    """Bitwise: how the kernel divides the keys of one may not depend on the longest of the pack."""
    kind = "512" if name == "ffpa-attn" else "128"
    _, (query, key, value, _) = packed([512, runs.LONGEST], KINDS[kind])
    outs = []
    for rest in (64, runs.LONGEST):
        boundaries = np.array([0, 512, 512 + rest], dtype=np.int32)
        kernel = FlashKernel.of(boundaries, 1, 0, query.device, operators=kernels.FLASH[fit(name, kind)])
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
