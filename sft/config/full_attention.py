"""Keys of layers with full attention, for models whose layers with a sliding window have other heads (Gemma 4)."""

from collections.abc import Iterator
from typing import Any

from sft.config.section import Positive, Section, divisors


class FullAttentionConfig(Section):
    head_dim: Positive | None = None
    """Width of a head in layers without a sliding window; null: model.head_dim."""
    num_attention_heads: Positive | None = None
    """Query heads in layers without a sliding window; null: model.num_attention_heads."""
    num_query_groups: Positive | None = None
    """Key/value heads in layers without a sliding window; null: model.num_query_groups."""
    sinks: bool = True
    """Layers without a sliding window have model.attention_sinks (MiMo-V2-Flash: false)."""
    keys_as_values: bool = False
    """Layers without a sliding window have no value projection: a value is value_norm of the key projection (Gemma
    4)."""

    @property
    def is_used(self) -> bool:
        return bool(self.changed)

    @property
    def projects_values(self) -> bool:
        return not self.keys_as_values

    def conflicts_with(self, model: Any) -> Iterator[tuple[str, str]]:
        """Yields (key, reason) of each conflict with other keys.  model: the ModelConfig that has this section"""
        if not self.is_used:
            return
        if not {"full attention", "window attention"} <= model.kinds:
            why = "needs layers of both kinds: set sliding_window and sliding_window_layers"
            yield f"full_attention.{self.changed[0]}", why
        for name, is_used in {
            "latent_attention.kv_lora_rank": model.latent_attention.is_used,
            "qk_norm_across_heads": model.qk_norm_across_heads,
            "attention_output_gate": model.attention_output_gate,
        }.items():
            if is_used:
                yield name, "is not supported with full_attention: no released model has both"
        heads = self.num_attention_heads or model.num_attention_heads
        groups = self.num_query_groups or model.resolved_query_groups
        if heads % groups:
            name = "num_query_groups" if self.num_query_groups else "num_attention_heads"
            why = f"does not divide {heads} heads; use {', '.join(map(str, divisors(heads)))}"
            yield f"full_attention.{name}", (
                why if self.num_query_groups else f"must be a multiple of {groups} key heads"
            )
        if not self.sinks and not model.attention_sinks:
            yield "full_attention.sinks", "= false has no effect without attention_sinks"
        if self.head_dim and model.rope.window_base is None:
            yield "full_attention.head_dim", "needs rope.window_base: layers with a window have positions of their own"
        if self.head_dim and self.head_dim % 2:
            yield "full_attention.head_dim", "is odd, but rotary positions need an even width"
        if self.keys_as_values and not model.value_norm:
            yield "full_attention.keys_as_values", "needs value_norm = true"
        if self.keys_as_values and model.value_head_dim is not None:
            yield "value_head_dim", "is not supported with full_attention.keys_as_values, which are as wide as values"
        if self.keys_as_values and model.qkv_bias:
            yield "qkv_bias", "is not supported with full_attention.keys_as_values"
