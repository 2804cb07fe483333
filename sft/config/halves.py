"""Keys of layers that have only one half: only an MLP or experts, or only a mixer such as attention (Nemotron-H)."""

from collections.abc import Iterator
from typing import Any, Literal

from sft.config.section import Positive, Section

MlpKind = Literal["dense", "experts", "no MLP"]


class HalvesConfig(Section):
    without_mixer: list[Positive] = []
    """Layers that are only an MLP or experts, counted from 1 (Nemotron-H)."""
    without_mlp: list[Positive] = []
    """Layers that are only attention, or what replaces it, counted from 1 (Nemotron-H)."""

    @property
    def is_used(self) -> bool:
        return bool(self.changed)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        for name in ("without_mixer", "without_mlp"):
            layers = getattr(self, name)
            if layers != sorted(set(layers)):
                yield name, "must be in increasing order, each layer once"
        if both := {*self.without_mixer} & {*self.without_mlp}:
            yield "without_mlp", f"names layers that without_mixer names, too: {_listed(both)}"

    def conflicts_with(self, model: Any) -> Iterator[tuple[str, str]]:
        """Yields (key, reason) of each conflict with other keys.  model: the ModelConfig that has this section"""
        for name in ("without_mixer", "without_mlp"):
            layers = getattr(self, name)
            if layers and layers[-1] > model.num_layers:
                yield f"halves.{name}", f"names layer {layers[-1]} of {model.num_layers}"
        if self.is_used and model.norm_placement != "pre":
            yield "norm_placement", "must be pre with model.halves: no released model has both"
        if self.is_used and model.linear_attention.norm_placement not in (None, "pre"):
            yield "linear_attention.norm_placement", "must be pre or null with model.halves: no released model has both"
        mixers = {f"{name}.layers": section.named for name, section in model.mixer_sections.items()}
        for key, layers in (mixers | {"sliding_window_layers": model.sliding_window_layers or []}).items():
            if both := {*layers} & {*self.without_mixer}:
                yield key, f"names layers that halves.without_mixer names, too: {_listed(both)}"
        if both := {*(model.moe.layers or ())} & {*self.without_mlp}:
            yield "moe.layers", f"names layers that halves.without_mlp names, too: {_listed(both)}"


def _listed(layers: set[int]) -> str:
    return ", ".join(map(str, sorted(layers)))
