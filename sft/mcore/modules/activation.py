"""Implements activations that megatron-core lacks: GeGLU in tanh form, SwiGLU with limits, and squared ReLU.

    geglu           gelu(gate) * up, gelu in tanh form (Gemma; arXiv:2002.05202)
    clamped_swiglu  gate * sigmoid(alpha * gate) * (up + 1), with gate <= limit and |up| <= limit (arXiv:2508.10925)
    swiglu          silu(gate) * up, with silu(gate) <= limit and |up| <= limit (Step-3.5); core has it without limits
    relu2           max(x, 0)^2, without a gate (Nemotron-H; arXiv:2109.08668)

The output of linear_fc1 holds this tp rank's gates, then its ups; without a gate, it holds x.  As in core's fused
SwiGLU, this output is the only saved activation, and backward computes all other values again.  16-bit inputs are
computed in fp32 and rounded once.  On CUDA, torch compiles forward and backward, as it compiles core's fused functions.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.jit import jit_fuser
from megatron.core.transformer import ModuleSpec
from torch import Tensor

from sft.config import ModelConfig
from sft.layers.mlps.limits import has_plain_swiglu
from sft.mcore.wide import wide

_SLOPE, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715  # gelu(x) = x / 2 * (1 + tanh(_SLOPE * (x + _CUBIC * x^3)))


class Activation(torch.nn.Module):
    """An activation, applied to the output of linear_fc1.

    Core passes gate and up together only to activations of Transformer Engine, so core builds this class as if it were
    one of these.
    """

    def __init__(self, *, kind: str, limit: float | None, alpha: float | None, config: Any = None) -> None:
        """Make the activation.

        kind: a name of the list above; limit: for swiglu and clamped_swiglu; alpha: for clamped_swiglu
        config: unused, but core passes it
        """
        super().__init__()
        assert kind in ("geglu", "relu2") or (limit is not None and (alpha is None) == (kind == "swiglu"))
        self._setting = kind, limit or 0.0, alpha or 0.0

    @staticmethod
    def fields(model: ModelConfig, limit: float = math.inf) -> dict[str, Any]:
        """Arguments of the constructor; {} with swiglu without limits, which core computes.

        limit: the limit of swiglu in this layer (`limits_of`)
        """
        if has_plain_swiglu(model):
            return {}
        own = limit if model.activation == "swiglu" else model.activation_limit
        return dict(kind=model.activation, limit=own, alpha=model.activation_alpha)

    @staticmethod
    def spec(fields: Mapping[str, Any]) -> ModuleSpec:
        """Core's spec of the activation.  fields: the result of `fields`"""
        return ModuleSpec(module=Activation, params=dict(fields))

    def forward(self, x: Tensor, bias: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """The activation: x [..., 2 * f], or without a gate [..., f] -> [..., f].

        bias: bias of linear_fc1, with the size of the last axis of x; weights: [...], factors on the outputs
        """
        output: Tensor = _Applied.apply(x, bias, weights, *self._setting)
        return output

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return {}: the activation has no weights.  Core's MLP calls this on all its modules."""
        return {}


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weights: Tensor | None, kind: str, limit: float, alpha: float
    ) -> Tensor:
        ctx.save_for_backward(x, bias, weights)
        ctx.setting = kind, limit, alpha
        compute = _compiled_forward if x.is_cuda else _forward
        output: Tensor = compute(x, bias, weights, kind, limit, alpha)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weights = ctx.saved_tensors
        compute = _compiled_backward if x.is_cuda else _backward
        return *compute(grads[0], x, bias, weights, *ctx.setting), None, None, None


def _forward(x: Tensor, bias: Tensor | None, weights: Tensor | None, kind: str, limit: float, alpha: float) -> Tensor:
    output, _ = _computed(_widened(x, bias), kind, limit, alpha)
    if weights is not None:
        output = output * weights[..., None]
    return output.to(x.dtype)


def _backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    kind: str,
    limit: float,
    alpha: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, bias and weights; None for a missing bias or missing weights."""
    wide = _widened(x, bias)
    output, derivatives = _computed(wide, kind, limit, alpha)
    grad, dweights = grad.to(wide.dtype), None
    if weights is not None:
        dweights = (grad * output).sum(-1).to(weights.dtype)
        grad = grad * weights[..., None]
    parts = [grad * slope for slope in derivatives]
    dbias = None if bias is None else torch.cat(parts, -1).flatten(0, -2).sum(0).to(bias.dtype)
    # The parts are rounded before they are joined.  Otherwise a compiled kernel may also write the unrounded joined
    # tensor to memory.
    return torch.cat([part.to(x.dtype) for part in parts], -1), dbias, dweights


def _widened(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias, in fp32 or float64."""
    return wide(x) if bias is None else wide(x) + bias


def _computed(x: Tensor, kind: str, limit: float, alpha: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and its derivatives by x, or by gate and by up."""
    if kind == "relu2":
        positive = x.relu()
        return positive * positive, (2.0 * positive,)
    gate, up = x.chunk(2, -1)
    if kind == "geglu":
        act, slope = _gelu(gate)
        return act * up, (up * slope, act)
    if kind == "swiglu":
        act, slope = _swish(gate, 1.0)
        is_below, act, factor = act <= limit, act.clamp(max=limit), up.clamp(-limit, limit)
        return act * factor, (factor * slope * is_below, act * (up.abs() <= limit))
    act, slope = _swish(gate.clamp(max=limit), alpha)
    factor = up.clamp(-limit, limit) + 1.0
    return act * factor, (factor * slope * (gate <= limit), act * (up.abs() <= limit))


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """gelu in tanh form, and its derivative.  (1 + tanh z) / 2 is sigmoid(2 z)."""
    square = _CUBIC * x * x
    share = torch.sigmoid(2.0 * _SLOPE * x * (1.0 + square))
    output = x * share
    return output, share + output * (1.0 - share) * (2.0 * _SLOPE + 6.0 * _SLOPE * square)


def _swish(x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """x * sigmoid(alpha * x), and its derivative."""
    share = torch.sigmoid(alpha * x)
    return x * share, share * (1.0 + alpha * x * (1.0 - share))


_compiled_forward, _compiled_backward = jit_fuser(_forward), jit_fuser(_backward)
