"""Extends megatron-core's attention layer for heads that core does not have (Gemma 4, Laguna, MiMo-V2-Flash).

    heads    Layers can differ in the number of heads, and in the width and number of key heads
             (`model.full_attention`)
    values   Values are normed without a weight, multiplied by a number, or narrower than keys.  In some layers keys
             and values share one projection:

        key = rotary(norm(projection))        value = norm without a weight(projection)

    norms    The norms of queries and keys can follow the rotary positions (Hunyuan).  Then portable.py applies the
             norms

    gates    The output of a head is multiplied by a function of one number, a projection of the token

linear_qkv has for each query group the rows of its query heads, then one row for the gate of each of these heads, then
the rows of its key head, then the rows of its value head.  portable.py applies the rotary positions.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from sft.config import ModelConfig
from sft.layers.mixers.softmax import qkv_rows
from sft.mcore.attention import rope
from sft.mcore.modules.norm import UnscaledNorm

_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
}


def needs_own_heads(model: ModelConfig) -> bool:
    """Whether core's attention cannot compute the heads of `model`, whose layers are all of one kind."""
    if model.qk_norm_after_rotary:
        return True
    has_values = model.value_norm or model.value_head_dim is not None or model.value_multiplier != 1.0
    return has_values or model.attention_head_gate is not None


def with_own_heads(spec: ModuleSpec, model: ModelConfig) -> ModuleSpec:
    """Put an `OwnHeads` into the layer `spec`, and return the spec.

    model: a model whose layers are all of this kind (`kinds.model_of_kind`)
    """
    attention = spec.submodules.self_attention
    attention.module, attention.params = OwnHeads, {**attention.params, "model": model}
    parts, outputs = attention.submodules, model.num_attention_heads * model.resolved_value_head_dim
    parts.linear_qkv = _sized(parts.linear_qkv, num_rows=qkv_rows(model))
    parts.linear_proj = _sized(parts.linear_proj, num_columns=outputs)
    return spec


def _sized(linear: Any, *, num_rows: int | None = None, num_columns: int | None = None) -> Any:
    """A subclass of core's projection `linear` with these numbers of outputs and inputs; None: core's own number."""

    class Sized(linear):
        def __init__(self, input_size: int, output_size: int, **core: Any) -> None:
            super().__init__(num_columns or input_size, num_rows or output_size, **core)

    return Sized


class OwnHeads(SelfAttention):
    """Attention with the heads of `model`, a model whose layers are all of this kind."""

    def __init__(self, config: TransformerConfig, *args: Any, model: ModelConfig, **kwargs: Any) -> None:
        own = copy.copy(config)
        own.kv_channels, own.num_query_groups = model.resolved_head_dim, model.resolved_query_groups
        own.num_attention_heads = model.num_attention_heads
        own.softmax_scale = rope.softmax_scale(model)
        own.attention_output_gate = model.attention_head_gate is not None  # core then takes a gate, and applies it
        super().__init__(own, *args, **kwargs)
        self._keys_are_values, self._multiplier = model.full_attention.keys_as_values, model.value_multiplier
        self._value_width, self._gate = model.resolved_value_head_dim, model.attention_head_gate
        self._norms_rotated = model.qk_norm_after_rotary
        if self._norms_rotated:
            self.core_attention.norm_rotated = self._normed
        self.value_norm = UnscaledNorm(model.norm_epsilon) if model.value_norm else None

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Queries [t, 1, heads, d], keys and values [t, 1, key heads, d] of this tp rank, from [t, 1, h].

        With a gate for each head, the gates [t, 1, heads] follow.
        """
        width, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = self.num_attention_heads_per_partition // groups
        projected, _ = self.linear_qkv(hidden_states)
        gates, values = heads * (self._gate is not None), self._value_width * (not self._keys_are_values)
        parts = projected.unflatten(-1, (groups, -1)).split([heads * width, gates, width, values], -1)
        query, gate, key, value = parts
        query = query.unflatten(-1, (heads, width)).flatten(2, 3)
        if self._keys_are_values:
            key = value = key.contiguous()  # both norms save this key
        if not self._norms_rotated:
            query, key = self._normed(query, key)
        value = value if self.value_norm is None else self.value_norm(value)
        value = value if self._multiplier == 1.0 else value * self._multiplier
        # The gate is copied.  A view would keep the whole output of the projection in memory.
        return (query, key, value) if self._gate is None else (query, key, value, gate.flatten(2).contiguous())

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        return query, key if self.k_layernorm is None else self.k_layernorm(key)

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply each head of x [t, 1, heads * d] by a function of its gate, [t, 1, heads]."""
        assert self._gate is not None
        factor = _GATES[self._gate](gate.float()).to(x.dtype)
        return (x.unflatten(-1, (gate.shape[-1], -1)) * factor[..., None]).flatten(2)
