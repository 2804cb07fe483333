"""Extends megatron-core's attention layer for models whose kinds of layers have different heads (Gemma 4).

    heads    Layers can differ in the width and number of key heads (`model.full_attention`), unlike in core
    values   Values are normed without a weight.  In some layers keys and values share one projection:

        key = rotary(norm(projection))        value = norm without a weight(projection)

In layers with a shared projection, linear_qkv has for each query group the rows of its query heads, and then the rows
of its key head.  portable.py applies the rotary positions.
"""

import copy
from typing import Any

from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from sft.config import ModelConfig
from sft.mcore.attention import rope
from sft.mcore.modules.norm import UnscaledNorm


def with_own_heads(spec: ModuleSpec, model: ModelConfig) -> ModuleSpec:
    """Put an `OwnHeads` into the layer `spec`, and return the spec.

    model: a model whose layers are all of this kind (`kinds.model_of_kind`)
    """
    attention = spec.submodules.self_attention
    attention.module, attention.params = OwnHeads, {**attention.params, "model": model}
    if model.full_attention.keys_as_values:
        attention.submodules.linear_qkv = _narrowed(attention.submodules.linear_qkv, model)
    return spec


def _narrowed(linear: Any, model: ModelConfig) -> Any:
    """A subclass of core's projection `linear` that has no rows for values."""
    rows = (model.num_attention_heads + model.resolved_query_groups) * model.resolved_head_dim

    class QueriesAndKeys(linear):
        def __init__(self, input_size: int, output_size: int, **core: Any) -> None:
            super().__init__(input_size, rows, **core)

    return QueriesAndKeys


class OwnHeads(SelfAttention):
    """Attention with the heads of `model`, a model whose layers are all of this kind."""

    def __init__(self, config: TransformerConfig, *args: Any, model: ModelConfig, **kwargs: Any) -> None:
        own = copy.copy(config)
        own.kv_channels, own.num_query_groups = model.resolved_head_dim, model.resolved_query_groups
        own.softmax_scale = rope.softmax_scale(model)
        super().__init__(own, *args, **kwargs)
        self._keys_are_values = model.full_attention.keys_as_values
        self.value_norm = UnscaledNorm(model.norm_epsilon) if model.value_norm else None

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [t, 1, heads, d], keys and values [t, 1, key heads, d] of this tp rank, from [t, 1, h]."""
        if not self._keys_are_values:
            query, key, value = super().get_query_key_value_tensors(hidden_states, key_value_states, **options)
            return query, key, value if self.value_norm is None else self.value_norm(value)
        assert self.value_norm is not None
        width = self.hidden_size_per_attention_head
        projected, _ = self.linear_qkv(hidden_states)
        by_group = projected.unflatten(-1, (self.num_query_groups_per_partition, -1, width))
        query, key = by_group[..., :-1, :].flatten(2, 3), by_group[..., -1, :].contiguous()  # both norms save this key
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        return query, key if self.k_layernorm is None else self.k_layernorm(key), self.value_norm(key)
