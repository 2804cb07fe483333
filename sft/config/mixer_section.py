"""Defines the base class of the groups of keys for kinds of layers: linear attention, Mamba-2 and latent attention."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from sft.config.section import Section

LayerKind = Literal["full attention", "window attention", "linear attention", "Mamba-2", "latent attention", "no mixer"]


class MixerSection(Section):
    """A group of keys for layers of one kind.  Layers are counted from 1."""

    kind: ClassVar[LayerKind]
    switch: ClassVar[str] = "layers"  # the key without which no layer is of this kind
    has_te: ClassVar[bool] = False  # Transformer Engine computes such layers
    is_recurrent: ClassVar[bool] = False  # layers have a state, and no keys that later tokens read

    @property
    def named(self) -> list[int]:
        """The layers of this kind that a key names; []: all layers are of this kind, or none is."""
        return []

    @property
    def is_used(self) -> bool:
        """Whether there are layers of this kind."""
        return bool(self.named)

    @property
    def shares_input_norm(self) -> bool:
        """Whether several projections of a layer read the output of its first norm, so that the norm cannot be fused
        into one projection."""
        return False

    def has_layer(self, number: int) -> bool:
        """Whether layer `number` is of this kind."""
        return number in self.named

    def conflicts_with(self, model: Any) -> Iterator[tuple[str, str]]:
        """Yields (key, reason) of each key of the model that layers of this kind exclude.  model: the ModelConfig"""
        yield from ()
