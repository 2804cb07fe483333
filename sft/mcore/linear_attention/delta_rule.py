"""Defines the gated delta rule on one rank: its inputs and the interface of its kernels.

Every value head has a state S [K, V].  For each token t (Yang et al. 2024, arXiv:2412.06464):

    S = exp(g_t) S        S += k_t (beta_t (v_t - S^T k_t))^T        o_t = S^T q_t

exp(g_t) is a number, or a diagonal matrix with a number for each channel of the keys (Kimi Linear, arXiv:2510.26692).
q and k are first divided by their L2 norms, and q is also divided by sqrt(K).  Key head j serves the value heads
j * r to j * r + r - 1, where r = value heads / key heads.  The map A of a fragment is a matrix [K, K].
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sft.config.linear_attention import Activation
from sft.mcore.linear_attention.recurrence import Kernel, wide_dtype

NORM_EPS = 1e-6  # added to the squared norm of q and k, as in transformers and FLA


class Inputs(NamedTuple):
    """Inputs of a kernel for the t tokens of a rank, or their gradients.

    q, k  [t, key heads, K], not normalised
    v     [t, value heads, V]
    g     [t, value heads], logarithm of the decay, at most 0, fp32; or [t, value heads, K], a decay for each channel
    beta  [t, value heads], between 0 and 2; at most 1 in all models but Olmo Hybrid
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def has_channel_decay(self) -> bool:
        return self.g.ndim == 3

    @property
    def values(self) -> Tensor:
        return self.v

    @property
    def state_dtype(self) -> torch.dtype:
        return wide_dtype(self.v)

    def zero_states(self, count: int) -> Tensor:
        """States of 0, [count, value heads, K, V], of dtype `state_dtype`."""
        shape = (count, self.v.shape[1], self.k.shape[-1], self.v.shape[-1])
        return torch.zeros(shape, dtype=self.state_dtype, device=self.v.device)


class DeltaKernel(Kernel[Inputs], Protocol):
    """One implementation of the rule, and of the convolution, the decays and the norm around it."""

    def log_decay(self, a: Tensor, a_log: Tensor, dt_bias: Tensor, floor: float | None = None) -> Tensor:
        """The logarithm g of each decay, at most 0, in fp32, or in float64 for float64 inputs.  Differentiable.

            g = -exp(a_log) * softplus(a + dt_bias)         a [t, heads], a_log and dt_bias [heads]
            g = floor * sigmoid(exp(a_log) * (a + dt_bias)), if there is a floor

        For the decays of channels, a is [t, heads, K], dt_bias is [heads * K], and a head has one number in a_log.
        """

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation = "silu"
    ) -> tuple[Tensor, Tensor]:
        """The norm after the rule: weight * normed(x) * activation(gate), [t, heads, V].  Differentiable.

        Also returns the scale 1 / root mean square of each head, [t, heads, 1], which has no gradient.
        """

    def gated(
        self, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, eps: float, activation: Activation = "silu"
    ) -> Tensor:
        """Compute the first result of `gated_norm` again, without gradients.  scale: its second result"""
