"""Keys of layers with linear attention: the gated delta rule (Yang et al., 2024, arXiv:2412.06464).

Each head has a decay of its own (Gated DeltaNet), or each channel of a head's keys has one (Kimi Delta Attention,
arXiv:2510.26692).
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from sft.config.mixer_section import MixerSection
from sft.config.section import Positive, divisors

Activation = Literal["silu", "sigmoid"]


class LinearAttentionConfig(MixerSection):
    kind = "linear attention"
    is_recurrent = True
    layers: list[Positive] = []
    """Layers with linear attention in place of attention, counted from 1."""
    num_key_heads: Positive | None = None
    """Heads of queries and keys; required with layers."""
    num_value_heads: Positive | None = None
    """Heads of values, a multiple of num_key_heads; required with layers."""
    key_head_dim: Positive = 128
    """Width of a query and of a key."""
    value_head_dim: Positive = 128
    """Width of a value."""
    conv_kernel: Positive = 4
    """Tokens that the short causal convolution on queries, keys and values reads: a token and those before it."""
    decay: Literal["head", "channel"] = "head"
    """A token has a decay for each head (Gated DeltaNet), or for each channel of its keys (Kimi Delta Attention)."""
    low_rank: Positive | None = None
    """Inner width of the projections of decay and gate, which are products of two matrices (Kimi-Linear); null: one
    matrix."""
    decay_floor: Annotated[float, Field(lt=0.0)] | None = None
    """Lower limit f of the logarithm of the decay, which is f * sigmoid(exp(A_log) * a) (Ling 3.0); null: no limit."""
    gate: Activation = "silu"
    """Activation of the gate on the output (sigmoid: Kimi Delta Attention)."""
    beta_factor: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    """Factor on beta, which is between 0 and 1 without it (Olmo Hybrid: 2, with which a state can change its sign)."""
    norm_epsilon: Annotated[float, Field(gt=0.0)] | None = None
    """Epsilon of the norm after the delta rule (Olmo Hybrid: 1e-5); null: model.norm_epsilon."""
    norm_placement: Literal["pre", "post", "both"] | None = None
    """model.norm_placement for layers with linear attention (Olmo Hybrid: pre); null: as in other layers."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        keys, values = self.num_key_heads, self.num_value_heads
        if not self.layers:
            yield from ((name, "has no effect without model.linear_attention.layers") for name in self.changed)
            return
        if self.layers != sorted(set(self.layers)):
            yield "layers", "must be in increasing order, each layer once"
        if keys is None:
            yield "num_key_heads", "is required with layers"
        if values is None:
            yield "num_value_heads", "is required with layers"
        if keys and values and values % keys:
            fitting = ", ".join(map(str, divisors(values)))
            yield "num_key_heads", f"does not divide {values} value heads; use one of {fitting}"
        elif self.has_channel_decay and keys != values:
            yield "num_key_heads", f"must be num_value_heads, {values}, with decay = channel"
        for name in ("low_rank", "decay_floor"):
            if getattr(self, name) is not None and not self.has_channel_decay:
                yield name, "has no effect with decay = head; use null"

    def conflicts_with(self, model: Any) -> Iterator[tuple[str, str]]:
        both = sorted({*self.layers} & {*(model.sliding_window_layers or ())})
        if both:
            named = ", ".join(map(str, both))
            yield "sliding_window_layers", f"names layers that linear_attention.layers names, too: {named}"
        elif self.layers and model.sliding_window is not None and "window attention" not in model.kinds:
            yield "sliding_window", "has no effect: linear_attention.layers names all layers; use null"
        if self.norm_placement is not None and (model.moe.own_norms or model.norm_placement == "both"):
            yield "linear_attention.norm_placement", "is not supported with moe.own_norms or norm_placement = both"

    @property
    def named(self) -> list[int]:
        return self.layers

    @property
    def shares_input_norm(self) -> bool:
        return self.low_rank is not None

    @property
    def has_channel_decay(self) -> bool:
        return self.decay == "channel"

    @property
    def num_decays(self) -> int:
        """Number of decays of a token in all heads; 0 without layers."""
        return self.key_width if self.has_channel_decay else self.num_value_heads or 0

    @property
    def key_width(self) -> int:
        """Elements of all keys of a token, and of all its queries; 0 without layers."""
        return (self.num_key_heads or 0) * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Elements of all values of a token; 0 without layers."""
        return (self.num_value_heads or 0) * self.value_head_dim
