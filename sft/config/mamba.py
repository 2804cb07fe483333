"""Keys of layers with Mamba-2: state space duality (Dao and Gu, 2024, arXiv:2405.21060)."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from sft.config.mixer_section import MixerSection
from sft.config.section import Positive, divisors


class MambaConfig(MixerSection):
    kind = "Mamba-2"
    is_recurrent = True
    layers: list[Positive] = []
    """Layers with Mamba-2 in place of attention, counted from 1."""
    num_heads: Positive | None = None
    """Heads, each with a state of state_dim x head_dim; required with layers."""
    head_dim: Positive = 64
    """Width of a head."""
    num_groups: Positive | None = None
    """Groups of heads that share B and C, and for which the gated norm normalises; required with layers."""
    state_dim: Positive = 128
    """Width of B and of C."""
    conv_kernel: Positive = 4
    """Tokens that the short causal convolution on x, B and C reads: a token and those before it."""
    min_time_step: Annotated[float, Field(ge=0.0)] = 0.0
    """Smallest time step, after softplus (Nemotron 3: 0.001)."""
    max_time_step: Annotated[float, Field(gt=0.0)] | None = None
    """Largest time step, after softplus; null: no limit."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        heads, groups = self.num_heads, self.num_groups
        if not self.layers:
            yield from ((name, "has no effect without model.mamba.layers") for name in self.changed)
            return
        if self.layers != sorted(set(self.layers)):
            yield "layers", "must be in increasing order, each layer once"
        if heads is None:
            yield "num_heads", "is required with layers"
        if groups is None:
            yield "num_groups", "is required with layers"
        if heads and groups and heads % groups:
            fitting = ", ".join(map(str, divisors(heads)))
            yield "num_groups", f"does not divide {heads} heads; use one of {fitting}"
        if self.max_time_step is not None and self.max_time_step < self.min_time_step:
            yield "max_time_step", f"is less than min_time_step = {self.min_time_step:g}"

    def conflicts_with(self, model: Any) -> Iterator[tuple[str, str]]:
        for name, others in (
            ("sliding_window_layers", model.sliding_window_layers or ()),
            ("linear_attention.layers", model.linear_attention.layers),
        ):
            if both := sorted({*self.layers} & {*others}):
                named = ", ".join(map(str, both))
                yield name, f"names layers that mamba.layers names, too: {named}"

    @property
    def named(self) -> list[int]:
        return self.layers

    @property
    def inner_width(self) -> int:
        """Elements of all heads of a token; 0 without layers."""
        return (self.num_heads or 0) * self.head_dim

    @property
    def group_width(self) -> int:
        """Elements of B, and of C, of a token; 0 without layers."""
        return (self.num_groups or 0) * self.state_dim
