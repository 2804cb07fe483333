"""Replaces torch's flash kernel on a CPU by code with the same results, so that its benchmarks run without a GPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sft.mcore.attention.flash2 import FLASH2
from sft.mcore.attention.flash_kernel import Operators


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
    return torch.cat(outs), query.new_empty(0)


def _stand_in_backward(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, *boundaries: Any, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [x.detach().requires_grad_() for x in (query, keys, values)]
    with torch.enable_grad():
        recomputed, _ = stand_in(*inputs, *boundaries, scale=scale)
    dquery, dkeys, dvalues = torch.autograd.grad(recomputed, inputs, grad)
    return dquery, dkeys, dvalues


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """torch's scaled_dot_product_attention of one document, [t, heads, d]; without a mask, the attention is causal."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    causal = mask is None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
