"""Implements Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060), as in Nemotron-H, which replaces attention in a layer.

    z, x, B, C, dt = projections of the hidden state        x, B, C = silu(causal convolution of x, B, C + bias)
    dt = softplus(dt + dt_bias), within limits              g = -exp(A_log) * dt
    y = recurrence of C, B, x, g, dt, plus D * x            output = projection of norm by groups(y * silu(z))

Tensor-parallel ranks divide the groups among themselves.  A rank also has the heads that its groups serve.

In sft/mcore/linear_attention:

ssd.py         the inputs of the recurrence, time steps, interface of kernels; grouped_norm.py: the skip and the norm
ssd_kernel.py  a kernel in plain torch; ssd_chunks.py: the products of a block
ssd_fla.py     a kernel of FLA
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sft.config import ModelConfig
from sft.mcore.backend import PackedDocuments
from sft.mcore.linear_attention.documents import LinearDocuments, linear_attention
from sft.mcore.linear_attention.grouped_norm import GroupedNorm, skip
from sft.mcore.linear_attention.ssd import SsdInputs, time_steps
from sft.mcore.model.recurrent_layer import RecurrentLayer


def megatron_arguments(model: ModelConfig) -> dict[str, Any]:
    mamba = model.mamba
    if not mamba.layers:
        return {}
    return dict(
        mamba_num_heads=mamba.num_heads,
        mamba_head_dim=mamba.head_dim,
        mamba_num_groups=mamba.num_groups,
        mamba_state_dim=mamba.state_dim,
    )


class Mamba2(RecurrentLayer):
    """The mixer of a layer with Mamba-2."""

    kind = "Mamba-2"
    parts = {
        "in_proj.weight": ("z", "x", "B", "C", "dt"),
        "conv1d.weight": ("x", "B", "C"),
        "conv1d.bias": ("x", "B", "C"),
    }

    def widths(self, model: ModelConfig) -> tuple[list[int], int]:
        mamba = model.mamba
        inner, groups, heads = mamba.inner_width, mamba.group_width, mamba.num_heads
        assert heads is not None
        return [inner, inner, groups, groups, heads], inner

    def make_weights(self, model: ModelConfig) -> None:
        mamba = model.mamba
        self._head_dim, self._state_dim = mamba.head_dim, mamba.state_dim
        self._limits: dict[str, Any] = {"low": mamba.min_time_step, "high": mamba.max_time_step}
        inner, channels, heads = self._widths[0], sum(self._widths[1:4]), self._widths[4]
        self.conv1d = torch.nn.ParameterDict(
            {"weight": self.split_weight(channels, 1, mamba.conv_kernel), "bias": self.split_weight(channels)}
        )
        self.A_log, self.D, self.dt_bias = (self.split_weight(heads) for _ in range(3))
        groups = self._widths[2] // mamba.state_dim
        self.norm = GroupedNorm(inner, groups, model.norm_epsilon, self.config.params_dtype)

    def mixed(self, projected: Tensor, documents: LinearDocuments, packed: PackedDocuments) -> Tensor:
        kernel = documents.kernel
        z, channels, raw = projected.split([self._widths[0], sum(self._widths[1:4]), self._widths[4]], -1)
        weight, bias = self.conv1d["weight"].squeeze(1), self.conv1d["bias"]
        mixed = kernel.convolution(channels, weight, documents.convolution, documents.cp.members, bias)
        x, b, c = mixed.split(self._widths[1:4], -1)
        x = x.contiguous().unflatten(-1, (-1, self._head_dim))  # the recurrence and the skip save the same tensor
        dt, g = time_steps(raw, self.dt_bias, self.A_log, **self._limits)
        inputs = SsdInputs(
            c=c.unflatten(-1, (-1, self._state_dim)),
            b=b.unflatten(-1, (-1, self._state_dim)),
            x=x,
            g=g,
            dt=dt,
        )
        y = linear_attention(inputs, documents, partial(packed.attend, self))
        normed: Tensor = self.norm(skip(y, x, self.D).flatten(1), z, kernel)
        return normed

    def split_weights(self) -> dict[str, Tensor]:
        return {
            "conv1d.weight": self.conv1d["weight"],
            "conv1d.bias": self.conv1d["bias"],
            "A_log": self.A_log,
            "D": self.D,
            "dt_bias": self.dt_bias,
            "norm.weight": self.norm.weight,
        }
