"""Implements RMSNorm: one kernel on CUDA (torch 2.9 and later), plain torch elsewhere.

The norm saves its input and one fp32 value per row for backward.  The weight may be an offset from 1 (Gemma).  torch's
kernel would need 1 + weight in the weight's dtype.  So on CUDA, torch compiles the plain norm for such weights.
"""

from typing import Any, ClassVar

import torch
from megatron.core.jit import jit_fuser
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sft.mcore.activations.saved_tensors import SavePolicy
from sft.mcore.wide import wide


class UnscaledNorm(torch.nn.Module):
    """RMSNorm over the last axis without a weight, computed in fp32; its output is marked as recomputable.

    offset: added to the weight of a subclass that has a weight
    core: further arguments that core passes to norms
    """

    save_policy: SavePolicy | None = None
    weight: torch.nn.Parameter | None

    def __init__(self, eps: float, offset: float = 0.0, **core: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        # Queries and keys are views.  A saved view would keep the whole output of the projection in memory.
        x = x.contiguous()
        out = self._norm(x)
        if self.save_policy is not None:
            self.save_policy.mark_recomputable(out, self._norm, x)
        return out

    def _norm(self, x: Tensor) -> Tensor:
        if not self.offset and x.is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm"):
            return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps, self.offset)
        return out


class RMSNorm(UnscaledNorm):
    """The norm with a weight.

    Under sequence parallelism, each tp rank computes a slice of the tokens.  The attribute `sequence_parallel` of the
    weight then makes core sum the weight's gradient over the tp ranks.

    is_zero_centered, epsilon  values that a subclass sets; None: the values of all norms of the model
    """

    weight: torch.nn.Parameter
    is_zero_centered: ClassVar[bool | None] = None
    epsilon: ClassVar[float | None] = None

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        is_offset = config.layernorm_zero_centered_gamma if self.is_zero_centered is None else self.is_zero_centered
        super().__init__(self.epsilon or eps, offset=1.0 if is_offset else 0.0)
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _RMSNorm(torch.autograd.Function):
    """rms_norm in plain torch with its own backward.  Autograd would save four fp32 copies of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        compute = _compiled_forward if x.is_cuda else _forward
        out, shrink = compute(_rows(x), weight, eps, offset)
        ctx.save_for_backward(x, weight, shrink)
        ctx.offset = offset
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight, shrink) = grads, ctx.saved_tensors
        compute = _compiled_backward if grad.is_cuda else _backward
        dx, dweight = compute(_rows(grad), _rows(x), weight, shrink, ctx.offset)
        return dx.view(x.shape), dweight, None, None


def _rows(x: Tensor) -> Tensor:
    """[..., h] -> [n, h].  torch would compile the norm anew for each number of axes, and does so at most 8 times."""
    return x.detach().reshape(-1, x.shape[-1])


def _forward(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """x [n, h] -> the output, and 1 / root mean square of each row, [n, 1]"""
    own = wide(x)
    shrink = torch.rsqrt(own.pow(2).mean(-1, keepdim=True) + eps)
    return (own * shrink * _factor(weight, own.dtype, offset)).to(x.dtype), shrink


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, shrink: Tensor, offset: float
) -> tuple[Tensor, Tensor | None]:
    grad = grad.to(shrink.dtype)
    normed, scaled = x.to(shrink.dtype) * shrink, grad * _factor(weight, shrink.dtype, offset)
    dx = shrink * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    dweight = None if weight is None else (grad * normed).sum(0).to(weight.dtype)
    return dx.to(x.dtype), dweight


def _factor(weight: Tensor | None, dtype: torch.dtype, offset: float) -> Tensor | float:
    """The factor of the norm: weight, or weight + offset in `dtype`, because bf16 would round the sum; 1: no weight."""
    if weight is None:
        return 1.0
    return weight.to(dtype) + offset if offset else weight


_compiled_forward, _compiled_backward = jit_fuser(_forward), jit_fuser(_backward)
