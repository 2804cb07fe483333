"""Keys of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), with the names that config.json has.

Keys and values of all heads are projections of one latent of kv_lora_rank elements.  In addition, all heads share a
rotary key of qk_rope_head_dim elements.
"""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from sft.config.mixer_section import MixerSection
from sft.config.section import Positive


class LatentAttentionConfig(MixerSection):
    kind = "latent attention"
    switch = "kv_lora_rank"
    has_te = True
    kv_lora_rank: Positive | None = None
    """Width of the latent of keys and values; null: no latent attention."""
    q_lora_rank: Positive | None = None
    """Width of the latent of queries; null: queries are a projection of the token (Moonlight)."""
    qk_nope_head_dim: Positive = 128
    """Width of the part of a query and of a key that is not rotated."""
    qk_rope_head_dim: Positive = 64
    """Width of the part of a query and of a key that is rotated."""
    v_head_dim: Positive = 128
    """Width of a value and of a head's output."""
    head_gate: bool = False
    """Multiply the output of each head by sigmoid(a projection of the token) (Ling 3.0)."""
    norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    """Epsilon of the norms of latents; model.norm_epsilon has no effect on them."""

    @property
    def is_used(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def shares_input_norm(self) -> bool:
        return self.is_used

    def has_layer(self, number: int) -> bool:
        return self.is_used

    @property
    def projects_queries(self) -> bool:
        """Whether queries are computed directly from the hidden state, without a latent for queries."""
        return self.is_used and self.q_lora_rank is None

    @property
    def qk_head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def compressed_width(self) -> int:
        """Elements of a token's latent and rotary key; 0 without latent attention."""
        return self.kv_lora_rank + self.qk_rope_head_dim if self.kv_lora_rank is not None else 0

    @property
    def has_te_kernel(self) -> bool:
        """Whether Transformer Engine trains with keys and values of these widths, on Hopper and on Blackwell.

        Source: the table of cuDNN's kernels in Transformer Engine 2.20 (fused_attn.cpp), for cuDNN 9.11 or later.
        """
        widths = (self.qk_head_dim, self.v_head_dim)
        return widths == (192, 128) or (max(widths) <= 128 and not any(width % 8 for width in widths))

    def sends_latent(self, num_heads: int) -> bool:
        """Whether layers save the latent and send it over cp, not keys and values of the rank's `num_heads` heads.

        DeepSeek-V3: a latent of 576 elements, or 320 elements for each head -> True from 2 heads on a rank
        """
        return self.compressed_width <= num_heads * (self.qk_head_dim + self.v_head_dim)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if not self.is_used:
            yield from ((name, "has no effect without model.latent_attention.kv_lora_rank") for name in self.changed)
        elif self.qk_rope_head_dim % 2:
            yield "qk_rope_head_dim", "must be even, because rotary positions rotate pairs of numbers"

    def conflicts_with(self, model: Any) -> Iterator[tuple[str, str]]:
        if not self.is_used:
            return
        if model.head_dim is not None:
            yield "head_dim", f"must be null with latent_attention, whose keys are {self.qk_head_dim} wide"
        if model.num_query_groups not in (None, model.num_attention_heads):
            yield "num_query_groups", "must be null with latent_attention, where each head has its own keys and values"
        excluded = {
            "qk_norm": model.qk_norm,
            "qkv_bias": model.qkv_bias,
            "attention_output_bias": model.attention_output_bias,
            "attention_output_gate": model.attention_output_gate,
            "attention_sinks": model.attention_sinks,
            "sliding_window": model.sliding_window is not None,
            "norm_zero_centered": model.norm_zero_centered,
            "norm_placement": model.norm_placement != "pre",
            "rope.fraction": model.rope.fraction != 1.0,
        }
        for name in (name for name, is_used in excluded.items() if is_used):
            yield name, "is not supported with latent_attention; use the default"
