"""Computes the gated norm: RMSNorm of each value head, times a gate: weight * normed(x) * activation(gate).

The activation is silu or sigmoid.  The weight itself is the factor: nothing is added to it.  The arithmetic is in fp32
or float64, on a block of tokens at a time.  Backward needs the inputs and one fp32 value per token and head; autograd
would save six fp32 copies of the input.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor

from sft.config.linear_attention import Activation
from sft.mcore.activations.saved_tensors import SavePolicy
from sft.mcore.linear_attention.delta_rule import DeltaKernel
from sft.mcore.linear_attention.token_blocks import token_blocks
from sft.mcore.wide import wide


class GatedNorm(torch.nn.Module):
    """The norm of this tp rank's heads.  All tp ranks hold the same weight, [V], and backward sums its gradient."""

    save_policy: SavePolicy | None = None

    def __init__(self, width: int, eps: float, activation: Activation, dtype: torch.dtype, tp_group: Any) -> None:
        super().__init__()
        self._eps, self._activation, self._tp_group = eps, activation, tp_group
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor, kernel: DeltaKernel) -> Tensor:
        """x, gate [t, heads, V] -> [t, heads, V]"""
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self._tp_group)
        out, shrink = kernel.gated_norm(x, gate, weight, self._eps, self._activation)
        if self.save_policy is not None:
            compute = partial(kernel.gated, eps=self._eps, activation=self._activation)
            self.save_policy.mark_recomputable(out, compute, x, gate, self.weight, shrink)
        return out


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation = "silu"
) -> tuple[Tensor, Tensor]:
    """Implements `delta_rule.DeltaKernel.gated_norm`."""
    out, shrink = _GatedNorm.apply(x, gate, weight, eps, activation)
    return out, shrink


class _GatedNorm(torch.autograd.Function):
    """(x, gate [t, heads, V], weight [V], eps, activation) -> the gated norm [t, heads, V], and 1 / root mean square of
    each head, [t, heads, 1].  The second result has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation = "silu"
    ) -> tuple[Tensor, Tensor]:
        shrink = torch.cat([torch.rsqrt(wide(x[rows]).pow(2).mean(-1, keepdim=True) + eps) for rows in token_blocks(x)])
        ctx.save_for_backward(x, gate, weight, shrink)
        ctx.mark_non_differentiable(shrink)
        ctx.activation = activation
        return gated(x, gate, weight, shrink, activation), shrink

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, shrink = ctx.saved_tensors
        dx, dgate, dweight = torch.empty_like(x), torch.empty_like(gate), torch.zeros_like(wide(weight))
        for rows in token_blocks(x):
            normed, wide_gate, wide_grad = wide(x[rows]) * shrink[rows], wide(gate[rows]), wide(grad[rows])
            activated, dgate[rows] = _with_gradient(ctx.activation, wide_gate, wide_grad * normed * wide(weight))
            dnormed_weighted = wide_grad * activated
            dweight += (dnormed_weighted * normed).flatten(0, -2).sum(0)
            scaled = dnormed_weighted * wide(weight)
            dx[rows] = shrink[rows] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return dx, dgate, dweight.to(weight.dtype), None, None


def gated(x: Tensor, gate: Tensor, weight: Tensor, shrink: Tensor, activation: Activation = "silu") -> Tensor:
    out, activate = torch.empty_like(x), torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu
    for rows in token_blocks(x):
        out[rows] = wide(x[rows]) * shrink[rows] * wide(weight) * activate(wide(gate[rows]))
    return out


def _with_gradient(activation: Activation, gate: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """activation(gate), and the gradient of the gate.  grad: the gradient of activation(gate)"""
    if activation == "sigmoid":
        activated = torch.sigmoid(gate)
        return activated, torch.ops.aten.sigmoid_backward(grad, activated)
    return torch.nn.functional.silu(gate), torch.ops.aten.silu_backward(grad, gate)
