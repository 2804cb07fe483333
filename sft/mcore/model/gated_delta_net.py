"""Implements Gated DeltaNet and Kimi Delta Attention, which replace attention in a layer.

Sources: Yang et al., 2024, arXiv:2412.06464, and Kimi Linear, arXiv:2510.26692.

    q, k, v, z, b, a = projections of the hidden state      q, k, v = silu(causal convolution of q, k, v)
    g = -exp(A_log) * softplus(a + dt_bias)                 beta = beta_factor * sigmoid(b)
    output = projection of (norm(gated delta rule of q, k, v, g, beta) * gate(z))

The gate is silu.  In Kimi Delta Attention the gate is a sigmoid, and a is as wide as k.  With
linear_attention.low_rank, two matrices one after the other compute z, and two others a.  Every tensor-parallel rank has
the whole of the first matrix.

Tensor-parallel ranks divide the key heads among themselves.  A rank also has the value heads that its key heads serve.

In sft/mcore/linear_attention:

delta_rule.py    the inputs of the rule and the interface of its kernels; gated_norm.py: the norm after it
torch_kernel.py  a kernel in plain torch; chunks.py: the products of a block
fla_kernel.py    a kernel of FLA; fla_rule.py: the rule; fla_compilation.py: compiles it before the first pass
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sft.config import ModelConfig
from sft.mcore.backend import PackedDocuments
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.mcore.linear_attention.documents import LinearDocuments, linear_attention
from sft.mcore.linear_attention.gated_norm import GatedNorm
from sft.mcore.model.recurrent_layer import RecurrentLayer
from sft.mcore.modules.duplicated_linear import DuplicatedLinear


def megatron_arguments(model: ModelConfig) -> dict[str, Any]:
    """The arguments of Megatron-LM that describe the layers; {} for decays of channels, which it does not have."""
    linear = model.linear_attention
    if not linear.layers or linear.has_channel_decay:
        return {}
    return dict(
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(number + 1 in linear.layers) for number in range(model.num_layers)],
        linear_num_key_heads=linear.num_key_heads,
        linear_num_value_heads=linear.num_value_heads,
        linear_key_head_dim=linear.key_head_dim,
        linear_value_head_dim=linear.value_head_dim,
        linear_conv_kernel_dim=linear.conv_kernel,
    )


class GatedDeltaNet(RecurrentLayer):
    """The mixer of a layer with the gated delta rule."""

    kind = "linear attention"
    parts = {
        "in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
        "conv1d.weight": ("query", "key", "value"),
    }

    def widths(self, model: ModelConfig) -> tuple[list[int], int]:
        linear = model.linear_attention
        keys, values, heads = linear.key_width, linear.value_width, linear.num_value_heads
        assert heads is not None
        gates, decays = (0, 0) if linear.low_rank else (values, linear.num_decays)
        return [keys, keys, values, gates, heads, decays], values

    def make_weights(self, model: ModelConfig) -> None:
        linear = model.linear_attention
        self._linear, self._key_dim, self._value_dim = linear, linear.key_head_dim, linear.value_head_dim
        if (rank := linear.low_rank) is not None:
            self.gate_down, self.decay_down = (
                DuplicatedLinear(self.config, model.hidden_size, rank, self._tp) for _ in "za"
            )
            self.gate_up = self.column_parallel(rank, linear.value_width)
            self.decay_up = self.column_parallel(rank, linear.num_decays)
        self.conv1d = torch.nn.ParameterDict(
            {"weight": self.split_weight(sum(self._widths[:3]), 1, linear.conv_kernel)}
        )
        self.A_log = self.split_weight(self._widths[4])
        self.dt_bias = self.split_weight(linear.num_decays // self._tp.size())
        epsilon, dtype = linear.norm_epsilon or model.norm_epsilon, self.config.params_dtype
        self.out_norm = GatedNorm(linear.value_head_dim, epsilon, linear.gate, dtype, self._tp)

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """The channels of the convolution, z, b and a, each [t, rows]."""
        projected, num_channels = super().projected(hidden_states), sum(self._widths[:3])
        z, b, a = projected.split([num_channels, *self._widths[3:]], -1)[1:]
        if self._linear.low_rank is not None:
            z = self.gate_up(self.gate_down(hidden_states)[0])[0].squeeze(1)
            a = self.decay_up(self.decay_down(hidden_states)[0])[0].squeeze(1)
        return projected[:, :num_channels], z, b, a

    def mixed(self, projected: tuple[Tensor, ...], documents: LinearDocuments, packed: PackedDocuments) -> Tensor:
        kernel, (channels, z, b, a) = documents.kernel, projected
        mixed = kernel.convolution(
            channels, self.conv1d["weight"].squeeze(1), documents.convolution, documents.cp.members
        )
        a = a.unflatten(-1, (-1, self._key_dim)) if self._linear.has_channel_decay else a
        q, k, v = mixed.split(self._widths[:3], -1)
        inputs = Inputs(
            q=q.unflatten(-1, (-1, self._key_dim)),
            k=k.unflatten(-1, (-1, self._key_dim)),
            v=v.unflatten(-1, (-1, self._value_dim)),
            g=kernel.log_decay(a, self.A_log, self.dt_bias, self._linear.decay_floor),
            beta=b.sigmoid() if self._linear.beta_factor == 1.0 else self._linear.beta_factor * b.sigmoid(),
        )
        out = linear_attention(inputs, documents, partial(packed.attend, self))
        normed: Tensor = self.out_norm(out, z.unflatten(-1, (-1, self._value_dim)), kernel)
        return normed.flatten(1)

    def split_weights(self) -> dict[str, Tensor]:
        return {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d["weight"]}
