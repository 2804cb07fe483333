"""Gated activations that megatron-core's own paths lack: GeGLU in tanh form (Gemma), and SwiGLU with limits.

    geglu           gelu(gate) * up, gelu in tanh form (arXiv:2002.05202)
    clamped_swiglu  gate * sigmoid(alpha * gate) * (up + 1), with gate <= limit and |up| <= limit (arXiv:2508.10925)
    swiglu          silu(gate) * up, with silu(gate) <= limit and |up| <= limit (Step-3.5); core has it without limits

The output of linear_fc1 holds this tp rank's gates, then its ups.  Backward recomputes from that output, which is the
only activation saved, as in core's fused SwiGLU.  16-bit inputs are computed in fp32 and rounded once.  On CUDA, torch
compiles forward and backward, as it compiles core's fused functions.
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

_SLOPE, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715  # gelu(x) = x / 2 * (1 + tanh(_SLOPE * (x + _CUBIC * x^3)))


class GatedActivation(torch.nn.Module):
    """A gated activation, applied to the output of linear_fc1.

    Core builds it in place of an activation of Transformer Engine: core passes gate and up together only to these.
    """

    def __init__(self, *, kind: str, limit: float | None, alpha: float | None, config: Any = None) -> None:
        """kind: "geglu", "clamped_swiglu", which needs limit and alpha, or "swiglu", which needs limit; config: unused,
        core passes it"""
        super().__init__()
        assert kind == "geglu" or (limit is not None and (alpha is None) == (kind == "swiglu"))
        self.limit, self.alpha = (None, None) if kind == "geglu" else (limit, alpha)

    @staticmethod
    def fields(model: ModelConfig, limit: float = math.inf) -> dict[str, Any]:
        """Arguments of the constructor; {} with swiglu without limits, which core computes.

        limit: of swiglu in this layer (`limits_of`)
        """
        if has_plain_swiglu(model):
            return {}
        own = limit if model.activation == "swiglu" else model.activation_limit
        return dict(kind=model.activation, limit=own, alpha=model.activation_alpha)

    @staticmethod
    def spec(fields: Mapping[str, Any]) -> ModuleSpec:
        """fields: the result of `fields`"""
        return ModuleSpec(module=GatedActivation, params=dict(fields))

    def forward(self, gate_up: Tensor, bias: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """gate_up [..., 2 * f] -> [..., f].  bias: [2 * f], of linear_fc1; weights: [...], factors on the outputs"""
        output: Tensor = _Gated.apply(gate_up, bias, weights, self.limit, self.alpha)
        return output

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return {}: the activation has no weights.  Core's MLP calls this on all its modules."""
        return {}


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, bias: Tensor | None, weights: Tensor | None, limit: float | None, alpha: float | None
    ) -> Tensor:
        ctx.save_for_backward(gate_up, bias, weights)
        ctx.limit, ctx.alpha = limit, alpha
        compute = _compiled_forward if gate_up.is_cuda else _forward
        output: Tensor = compute(gate_up, bias, weights, limit, alpha)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, bias, weights = ctx.saved_tensors
        compute = _compiled_backward if gate_up.is_cuda else _backward
        return *compute(grads[0], gate_up, bias, weights, ctx.limit, ctx.alpha), None, None


def _forward(
    gate_up: Tensor, bias: Tensor | None, weights: Tensor | None, limit: float | None, alpha: float | None
) -> Tensor:
    """limit: None with geglu; alpha: None with geglu and swiglu"""
    gate, up = _halves(gate_up, bias)
    if limit is None:
        output = _gelu(gate)[0] * up
    elif alpha is None:
        output = _swish(gate, 1.0)[0].clamp(max=limit) * up.clamp(-limit, limit)
    else:
        output = _swish(gate.clamp(max=limit), alpha)[0] * (up.clamp(-limit, limit) + 1.0)
    if weights is not None:
        output = output * weights[..., None]
    return output.to(gate_up.dtype)


def _backward(
    grad: Tensor, gate_up: Tensor, bias: Tensor | None, weights: Tensor | None, limit: float | None, alpha: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of gate_up, bias and weights."""
    gate, up = _halves(gate_up, bias)
    if limit is None:
        act, slope = _gelu(gate)
        factor, dfactor = up, torch.ones_like(up)
    elif alpha is None:
        act, slope = _swish(gate, 1.0)
        slope, act = slope * (act <= limit), act.clamp(max=limit)
        factor, dfactor = up.clamp(-limit, limit), (up.abs() <= limit).to(up.dtype)
    else:
        act, slope = _swish(gate.clamp(max=limit), alpha)
        slope = slope * (gate <= limit)
        factor, dfactor = up.clamp(-limit, limit) + 1.0, (up.abs() <= limit).to(up.dtype)
    grad, dweights = grad.to(gate.dtype), None
    if weights is not None:
        dweights = (grad * act * factor).sum(-1).to(weights.dtype)
        grad = grad * weights[..., None]
    halves = grad * factor * slope, grad * act * dfactor
    dbias = None if bias is None else torch.cat(halves, -1).flatten(0, -2).sum(0).to(bias.dtype)
    # Rounded before they are joined, because a compiled kernel may write the joined halves to memory unrounded, too.
    return torch.cat([half.to(gate_up.dtype) for half in halves], -1), dbias, dweights


def _halves(gate_up: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Gate and up, in fp32 or float64."""
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    return (wide if bias is None else wide + bias).chunk(2, -1)


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
