"""Keys of rotary positions (Su et al., 2021, arXiv:2104.09864)."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from sft.config.section import Positive, Section


class RopeConfig(Section):
    base: Annotated[float, Field(gt=1.0)] = 10000.0
    """Base period (theta)."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of each head that is rotated, from its first number on (Qwen3-Next: 0.25)."""
    scaling: Literal["none", "linear", "llama3", "yarn", "proportional"] = "none"
    """Method that changes the frequencies for contexts beyond `original_max_position`; or proportional (Gemma 4):
    frequencies of whole heads, of which all above `fraction` are 0, except in layers with a window_base."""
    factor: Annotated[float, Field(ge=1.0)] = 1.0
    """Factor of the extension of the context: 1 with none and proportional, above 1 with every other scaling."""
    original_max_position: Positive | None = None
    """Context length of the model before scaling; required by llama3 and yarn."""
    low_freq_factor: Annotated[float, Field(gt=0.0)] = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are fully scaled."""
    high_freq_factor: Annotated[float, Field(gt=0.0)] = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor are not scaled."""
    beta_fast: Annotated[float, Field(gt=0.0)] = 32.0
    """yarn: dimensions with more rotations than this over the original context are not scaled."""
    beta_slow: Annotated[float, Field(gt=0.0)] = 1.0
    """yarn: dimensions with fewer rotations than this over the original context are fully scaled."""
    attention_factor: Annotated[float, Field(gt=0.0)] | None = None
    """yarn: factor on queries and keys; null: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: round the first and last partly scaled dimensions to whole numbers (gpt-oss: false)."""
    query_scale_beta: Annotated[float, Field(gt=0.0)] | None = None
    """Queries are multiplied by 1 + beta * ln(1 + floor(position / original_max_position)) (Ministral 3); null: no
    factor."""
    window_base: Annotated[float, Field(gt=1.0)] | None = None
    """Base period in layers with a sliding window, which then do not scale frequencies (Olmo 3); null: `base` and
    `scaling` of all layers."""
    window_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """`fraction` in layers with a sliding window (Laguna: 1, in other layers 0.5); null: `fraction`.  Needs
    window_base."""
    skip_layers: list[Positive] = []
    """Layers without rotary positions, counted from 1 (SmolLM3)."""
    interleaved: bool = False
    """true: numbers 0 and 1 of a head are rotated together, then 2 and 3 (DeepSeek).  false: a number of the first half
    with one of the second."""
    mscale_all_dim: Annotated[float, Field(gt=0.0)] | None = None
    """yarn with latent attention: query-key products are multiplied by (0.1 * mscale_all_dim * ln(factor) + 1)^2."""

    @property
    def window_rope(self) -> "RopeConfig | None":
        """The rotary positions of layers with a sliding window; None if they are those of all layers."""
        if self.window_base is None:
            return None
        fraction = 1.0 if self.is_proportional else self.window_fraction or self.fraction
        return RopeConfig(base=self.window_base, fraction=fraction, interleaved=self.interleaved)

    @property
    def is_proportional(self) -> bool:
        return self.scaling == "proportional"

    @property
    def mscale(self) -> float:
        """For yarn, the value of `mscale` in config.json with which, and with mscale_all_dim, attention_factor follows.

        factor 40, mscale_all_dim 1, attention_factor 1 -> 1
        """
        step = 0.1 * math.log(self.factor)
        factor = self.attention_factor or step + 1.0
        return (factor * (step * (self.mscale_all_dim or 0.0) + 1.0) - 1.0) / step

    def conflicts(self) -> Iterator[tuple[str, str]]:
        plain = self.scaling in ("none", "proportional")
        if plain and self.factor != 1.0:
            yield "factor", f"has no effect with scaling = {self.scaling}; use linear, llama3 or yarn"
        if not plain and self.factor == 1.0:
            yield "factor", f"must be above 1 for {self.scaling} scaling; give the new length / original_max_position"
        if self.original_max_position is None and self.scaling in ("llama3", "yarn"):
            why = f"is required with scaling = {self.scaling}; give the context length before scaling"
            yield "original_max_position", why
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            yield "high_freq_factor", f"must be above low_freq_factor = {self.low_freq_factor}"
        if self.window_fraction is not None and self.window_base is None:
            yield "window_fraction", "has no effect without window_base"
        if self.window_fraction is not None and self.is_proportional:
            yield "window_fraction", "has no effect with scaling = proportional; use null"
        if self.is_proportional and self.interleaved:
            yield "interleaved", "is not supported with scaling = proportional; use false"
        if self.scaling != "yarn" and not self.truncate:
            yield "truncate", "= false has no effect without scaling = yarn"
        if self.scaling == "yarn" and self.beta_fast < self.beta_slow:  # Kimi-K2 has equal values
            yield "beta_fast", f"must not be below beta_slow = {self.beta_slow}"
        if self.mscale_all_dim is not None and self.scaling != "yarn":
            yield "mscale_all_dim", "has no effect without scaling = yarn"
        if self.query_scale_beta is not None and self.original_max_position is None:
            yield "original_max_position", "is required with query_scale_beta, whose steps have this length"
        if self.query_scale_beta is not None and self.skip_layers:
            yield "query_scale_beta", "is not supported with skip_layers; use null, or skip_layers = []"
        if self.skip_layers != sorted(set(self.skip_layers)):
            yield "skip_layers", "must be in increasing order, each layer once"
