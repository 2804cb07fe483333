"""Defines the recurrence of Mamba-2 (SSD, Dao and Gu 2024, arXiv:2405.21060) on one rank: inputs and kernel interface.

Every head has a state S [N, P].  For each token t:

    S = exp(g_t) S + B_t (dt_t x_t)^T        y_t = S^T C_t

Group j serves the heads j * r to j * r + r - 1, where r = heads / groups.  The map A of a fragment is one number: the
product of its decays.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sft.mcore.linear_attention.recurrence import Kernel, wide_dtype
from sft.mcore.wide import wide


class SsdInputs(NamedTuple):
    """Inputs of a kernel for the t tokens of a rank, or their gradients.

    c, b   [t, groups, N]
    x      [t, heads, P]
    g, dt  [t, heads], logarithm of the decay, at most 0, and time step; fp32
    """

    c: Tensor
    b: Tensor
    x: Tensor
    g: Tensor
    dt: Tensor

    @property
    def values(self) -> Tensor:
        return self.x

    @property
    def state_dtype(self) -> torch.dtype:
        return wide_dtype(self.x)

    def zero_states(self, count: int) -> Tensor:
        """States of 0, [count, heads, N, P], of dtype `state_dtype`."""
        shape = (count, self.x.shape[1], self.b.shape[-1], self.x.shape[-1])
        return torch.zeros(shape, dtype=self.state_dtype, device=self.x.device)


class SsdKernel(Kernel[SsdInputs], Protocol):
    """One implementation of the recurrence, and of the convolution and the norm around it."""

    def grouped_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm after the recurrence: weight * normed(x * silu(gate)), [t, groups, width].  Differentiable.

        Also returns the scale 1 / root mean square of each group, [t, groups, 1], which has no gradient.

        x, gate: [t, groups, width]; weight: [groups, width]
        """

    def grouped(self, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
        """Compute the first result of `grouped_norm` again, without gradients.  scale: its second result"""


def time_steps(raw: Tensor, bias: Tensor, a_log: Tensor, *, low: float, high: float | None) -> tuple[Tensor, Tensor]:
    """Time steps and logarithms of decays, [t, heads], in fp32, or in float64 for float64 inputs.  Differentiable.

        dt = softplus(raw + bias), at least `low` and at most `high`        g = -exp(a_log) * dt

    Only the inputs are saved for backward.  raw: [t, heads]; bias, a_log: [heads]
    """
    dt, g = _TimeSteps.apply(raw, bias, a_log, low, high)
    return dt, g


class _TimeSteps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, raw: Tensor, bias: Tensor, a_log: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(raw, bias, a_log)
        ctx.limits = low, high  # type: ignore[attr-defined]
        dt = torch.nn.functional.softplus(wide(raw) + wide(bias)).clamp_(low, high)
        return dt, -wide(a_log).exp() * dt

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (raw, bias, a_log), (low, high) = ctx.saved_tensors, ctx.limits  # type: ignore[attr-defined]
        z, rate = wide(raw) + wide(bias), -wide(a_log).exp()
        free = torch.nn.functional.softplus(z)
        inside = free >= low if high is None else (free >= low) & (free <= high)
        dz = (grads[0] + rate * grads[1]) * inside * z.sigmoid()
        da_log = (grads[1] * rate * free.clamp_(low, high)).sum(0)
        return dz.to(raw.dtype), dz.sum(0).to(bias.dtype), da_log.to(a_log.dtype), None, None
