"""RMSNorm: one kernel on CUDA (torch 2.9 and later), plain torch elsewhere.

The norm saves its input and one fp32 number per row for backward.
"""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sft.mcore.activations.saved_tensors import SavePolicy


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, computed in fp32; its output is marked as recomputable.

    Under sequence parallelism each rank computes a slice of the tokens.  The attribute `sequence_parallel` of the
    weight makes core sum the weight's gradient over these ranks.
    """

    save_policy: SavePolicy | None = None

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        # Queries and keys are views.  A saved view would keep the whole output of the projection in memory.
        x = x.contiguous()
        out = self._norm(x)
        if self.save_policy is not None:
            self.save_policy.mark_recomputable(out, self._norm, x)
        return out

    def _norm(self, x: Tensor) -> Tensor:
        if x.is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm"):
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return out


class _RMSNorm(torch.autograd.Function):
    """rms_norm in plain torch with its own backward.  Autograd would save four fp32 copies of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        shrink = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, shrink)
        return (wide * shrink * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, shrink = ctx.saved_tensors
        grad = grad.to(shrink.dtype)
        normed, scaled = x.to(shrink.dtype) * shrink, grad * weight
        dx = shrink * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return dx.to(x.dtype), (grad * normed).flatten(0, -2).sum(0).to(weight.dtype), None
