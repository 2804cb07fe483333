"""Attention implementations over one pack: those of the trainer, of torch and of Transformer Engine.

Decides which implementations run on a device, and returns each as a function.  Measures no time.

    flash   the trainer's code with torch's flash kernel, for the whole pack or for the part of a rank; on a CPU,
            `stand_in` replaces the kernel
    plain   the trainer's code with plain torch
    sdpa    torch's scaled_dot_product_attention, one call per document; torch chooses the kernel
    cudnn   as sdpa, with the kernel of cuDNN
    te      Transformer Engine's DotProductAttention over packed documents; Transformer Engine chooses the kernel
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sft.mcore.attention.flash2 import FLASH2
from sft.mcore.attention.flash_kernel import FlashKernel, Operators
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.parallel import context_parallel

NAMES = ("flash", "sdpa", "te", "cudnn", "plain")
FOREIGN = ("te", "cudnn")  # kernels that may refuse a shape
REFUSALS = (RuntimeError, ValueError, AssertionError, ImportError)  # what the kernels of FOREIGN raise for such a shape
BACKWARD = 2.5  # FLOPs of backward / FLOPs of forward; backward recomputes the scores

# An implementation: returns the output, and the gradient of the loss with respect to the output.
Way = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Pack:
    """One pack of random queries, keys and values: the same tensors for every implementation."""

    boundaries: np.ndarray
    tensors: Sequence[Tensor]  # query, key, value, gradient of the output
    device: torch.device

    @classmethod
    def random(cls, boundaries: np.ndarray, heads: tuple[int, int, int], device: torch.device) -> "Pack":
        """A pack of random bf16 tensors.  Query, key and value require gradients.

        heads: number of query heads, number of key and value heads, head_dim
        """
        num_heads, num_groups, head_dim = heads
        generator = torch.Generator(device).manual_seed(0)
        shapes = [(int(boundaries[-1]), count, head_dim) for count in (num_heads, num_groups, num_groups, num_heads)]
        tensors = [torch.randn(s, device=device, dtype=torch.bfloat16, generator=generator) for s in shapes]
        tensors = [x.requires_grad_(i < 3) for i, x in enumerate(tensors)]
        return cls(boundaries=boundaries, tensors=tensors, device=device)

    @property
    def scale(self) -> float:
        return float(self.tensors[0].shape[-1] ** -0.5)

    @property
    def flops(self) -> float:
        """FLOPs of a causal forward pass: the products for scores and values, for half of the square of each document.

        documents of 2 and 4 tokens, 3 heads of size 8: 2 * 24 * (4 + 16) = 960
        """
        _, num_heads, head_dim = self.tensors[0].shape
        return 2.0 * num_heads * head_dim * float((np.diff(self.boundaries).astype(np.float64) ** 2).sum())


def why_not(name: str, device: torch.device) -> str | None:
    """The reason why an implementation cannot run on this device; None if no reason is known."""
    if name not in FOREIGN:
        return None
    if device.type != "cuda":
        return "it needs CUDA"
    if name == "te":
        try:
            import transformer_engine.pytorch  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            return f"transformer_engine cannot be imported ({error})"
    return None


def is_refusal(name: str, error: Exception) -> bool:
    """Whether the error means that a kernel does not support the shape; other errors are faults."""
    return name in FOREIGN and isinstance(error, REFUSALS) and not isinstance(error, torch.OutOfMemoryError)


def reason(error: Exception) -> str:
    """The first line of the error message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def whole(p: Pack, name: str) -> Way:
    """The implementation `name` for the whole pack.

    `why_not` must be None for the device.  A call of the result may still refuse the shape (`is_refusal`).
    """
    if name == "flash":
        return by_flash(p, 1, 0)[0]
    ways: dict[str, Callable[[Pack], Way]] = {"plain": by_plain, "sdpa": by_sdpa, "cudnn": by_cudnn, "te": by_te}
    return ways[name](p)


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """torch's scaled_dot_product_attention of one document, [t, heads, d]; without a mask, the attention is causal."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    causal = mask is None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def by_sdpa(p: Pack) -> Way:
    query, key, value, gradient = p.tensors
    ends = p.boundaries.tolist()

    def way() -> tuple[Tensor, Tensor]:
        outs = [sdpa(query[a:b], key[a:b], value[a:b], p.scale) for a, b in zip(ends, ends[1:])]
        return torch.cat(outs) if len(outs) > 1 else outs[0], gradient

    return way


def by_cudnn(p: Pack) -> Way:
    way = by_sdpa(p)

    def by_that_kernel() -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return way()

    return by_that_kernel


def by_te(p: Pack) -> Way:
    from transformer_engine.pytorch import DotProductAttention

    query, key, value, gradient = p.tensors
    _, heads, width = query.shape
    core = DotProductAttention(
        heads, width, num_gqa_groups=key.shape[1], attention_dropout=0.0, qkv_format="thd",
        attn_mask_type="padding_causal", softmax_scale=p.scale,
    )  # fmt: skip
    boundaries, longest = torch.from_numpy(p.boundaries).to(p.device), int(np.diff(p.boundaries).max())

    def way() -> tuple[Tensor, Tensor]:
        out = core(
            query, key, value, qkv_format="thd", attn_mask_type="padding_causal",
            cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=longest, max_seqlen_kv=longest,
        )  # fmt: skip
        return out.view(query.shape), gradient

    return way


def by_plain(p: Pack) -> Way:
    query, key, value, gradient = p.tensors
    kernel, no_group = TorchKernel.of(p.boundaries, 1, 0, p.device), None
    return lambda: (packed_attention(query, key, value, kernel, p.scale, no_group), gradient)


def by_flash(p: Pack, cp_size: int, rank: int) -> tuple[Way, Sequence[Tensor], np.ndarray]:
    """The implementation `flash` for the part of one rank.

    Returns a function that computes the part, the queries, keys and values of the part, and the positions of its tokens
    in the pack.
    """
    kernel = FlashKernel.of(p.boundaries, cp_size, rank, p.device, operators=operators_for(p.device))
    indices = context_parallel.local_indices(p.boundaries, cp_size, rank)
    rows = torch.from_numpy(indices).to(p.device)
    if cp_size == 1:
        query, key, value, gradient = p.tensors
    else:
        query, key, value, gradient = (x.detach()[rows].requires_grad_(i < 3) for i, x in enumerate(p.tensors))
    group: Any = SimpleNamespace(size=lambda: cp_size, rank=lambda: rank)
    return (
        lambda: (packed_attention(query, key, value, kernel, p.scale, group), gradient),
        (query, key, value),
        indices,
    )


def operators_for(device: torch.device) -> Operators:
    """Torch's flash kernel on a GPU, and its replacement on a CPU."""
    return FLASH2 if device.type == "cuda" else Operators(stand_in, _stand_in_backward)


def stand_in(
    query: Tensor, keys: Tensor, values: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *longest: Any, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes the kernel's output one sequence at a time, with a bottom-right causal mask.  Returns no log-sum-exp."""
    outs = []
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device).tril(k1 - k0 - (q1 - q0))
        outs.append(sdpa(query[q0:q1], keys[k0:k1], values[k0:k1], scale, mask=mask))
    return torch.cat(outs), query.new_empty((0, len(query)))


def _stand_in_backward(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, *boundaries: Any, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [x.detach().requires_grad_() for x in (query, keys, values)]
    with torch.enable_grad():
        recomputed, _ = stand_in(*inputs, *boundaries, scale=scale)
    dquery, dkeys, dvalues = torch.autograd.grad(recomputed, inputs, grad)
    return dquery, dkeys, dvalues
