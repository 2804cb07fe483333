"""Computes the skip and the norm after Mamba-2: y + D x, then weight * normed(y * silu(gate)) by groups.

Unlike in gated_norm.py, the gate is applied before the norm, and each group of heads has its own root mean square.  The
arithmetic is in fp32 or float64, on a block of tokens at a time.  Backward needs the inputs and one fp32 value per
token and group.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn.functional import silu

from sft.mcore.activations.saved_tensors import SavePolicy
from sft.mcore.linear_attention.ssd import SsdKernel
from sft.mcore.linear_attention.token_blocks import token_blocks
from sft.mcore.wide import wide


class GroupedNorm(torch.nn.Module):
    """The norm of this tp rank's groups.  tp ranks hold different parts of the weight, [groups * width]."""

    save_policy: SavePolicy | None = None

    def __init__(self, width: int, groups: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps, self._groups = eps, groups
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor, gate: Tensor, kernel: SsdKernel) -> Tensor:
        """x, gate [t, groups * width] -> [t, groups * width]"""
        x, gate, weight = (y.unflatten(-1, (self._groups, -1)) for y in (x, gate, self.weight))
        out, shrink = kernel.grouped_norm(x, gate, weight, self.eps)
        if self.save_policy is not None:
            self.save_policy.mark_recomputable(out, partial(kernel.grouped, eps=self.eps), x, gate, weight, shrink)
        return out.flatten(1)


def grouped_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Implements `ssd.SsdKernel.grouped_norm`."""
    out, shrink = _GroupedNorm.apply(x, gate, weight, eps)
    return out, shrink


class _GroupedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        squares = [_gated(x[rows], gate[rows]).square_().mean(-1, keepdim=True) for rows in token_blocks(x)]
        shrink = torch.cat(squares).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gate, weight, shrink)
        ctx.mark_non_differentiable(shrink)
        return grouped(x, gate, weight, shrink), shrink

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, shrink = ctx.saved_tensors
        dx, dgate = torch.empty_like(x), torch.empty_like(gate, memory_format=torch.contiguous_format)
        dweight = torch.zeros_like(wide(weight))
        for rows in token_blocks(x):
            normed, wide_grad = _gated(x[rows], gate[rows]).mul_(shrink[rows]), wide(grad[rows])
            dweight += (wide_grad * normed).sum(0)
            scaled = wide_grad * wide(weight)
            dgated = shrink[rows] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
            dgate[rows] = torch.ops.aten.silu_backward(dgated * wide(x[rows]), wide(gate[rows]))
            dx[rows] = dgated * silu(wide(gate[rows]))
        return dx, dgate, dweight.to(weight.dtype), None


def grouped(x: Tensor, gate: Tensor, weight: Tensor, shrink: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for rows in token_blocks(x):
        out[rows] = _gated(x[rows], gate[rows]).mul_(shrink[rows]).mul_(wide(weight))
    return out


def skip(y: Tensor, x: Tensor, factors: Tensor) -> Tensor:
    """y + factors * x, [t, heads, P], with gradients.  Saves only x.  factors: [heads]"""
    out: Tensor = _Skip.apply(y, x, factors)
    return out


class _Skip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(x, factors)
        return torch.addcmul(y, x, factors[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, factors = ctx.saved_tensors
        total = torch.zeros_like(wide(factors))
        for rows in token_blocks(x):
            total += (wide(grads[0][rows]) * wide(x[rows])).sum((0, 2))
        return grads[0], grads[0] * factors[:, None], total.to(factors.dtype)


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    return silu(wide(gate)).mul_(wide(x))
