"""The base class of the sections for kinds of layers: recurrences and latent attention."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from sft.config.section import Section

LayerKind = Literal["full attention", "window attention", "linear attention", "Mamba-2", "latent attention", "no mixer"]


class MixerSection(Section):
    kind: ClassVar[LayerKind]
    switch: ClassVar[str] = "layers"  # the key without which no layer is of this kind
    has_te: ClassVar[bool] = False  # Transformer Engine computes such layers
    is_recurrent: ClassVar[bool] = False  # layers have a state, and no keys that later tokens read

    @property
    def named(self) -> list[int]:
        """The layers that a key names by number, from 1; []: all layers are of this kind, or none."""
        return []

    @property
    def is_used(self) -> bool:
        """Whether there are layers of this kind."""
        return bool(self.named)

    @property
    def shares_input_norm(self) -> bool:
        """Whether several projections of a layer read the output of its first norm, so that none can compute it."""
        return False

    def has_layer(self, number: int) -> bool:
        """Whether the layer of this number, from 1, is of this kind."""
        return number in self.named

    def conflicts_with(self, model: Any) -> Iterator[tuple[str, str]]:
        """The keys of the model that layers of this kind exclude, each with the reason.  model: a ModelConfig"""
        yield from ()
