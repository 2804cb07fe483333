"""Computes the bytes of activations that layers of each kind save for backward, per local token.  Arithmetic only.

The files *_bytes.py beside this one give the bytes of parts of a layer.  This module chooses those that
train.recompute and train.mlp_tile leave; sft/estimate/memory.py sums them over layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sft.config import Config
from sft.layers import model_bytes
from sft.layers.delta_bytes import LinearAttentionBytes
from sft.layers.kinds import layer_groups
from sft.layers.latent_bytes import softmax_attention_bytes
from sft.layers.softmax_bytes import GATED, AttentionBytes
from sft.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of activations that one layer saves for backward, per local token, by name.

    attention  saved by the attention block, with the input of the MLP block
    mlp        saved by the MLP block
    """

    attention: dict[str, float]
    mlp: dict[str, float]

    @staticmethod
    def of(backend: AttentionBytes, recompute: str) -> "LayerBytes":
        """The bytes that one layer saves with train.recompute = `recompute`.

        Llama-8B: full 8 KiB; selective 36 KiB and none 136 KiB, each plus a few bytes per head
        """
        model, rank = backend.model, backend.rank
        hidden = model_bytes.hidden_state(model, rank)
        attention = {"layer's input": hidden}
        if recompute == "full":
            return LayerBytes(attention=attention, mlp={})
        if recompute == "none" or not backend.is_recomputed:
            attention |= backend.saved
        attention |= {"norms' scales": model_bytes.norm_scales(model, rank), model_bytes.RESIDUAL: hidden}
        if model.norm_placement != "pre":
            attention["attention's projected output"] = hidden  # the input of the norm
        if model.norm_placement != "post" and (recompute == "none" or backend.norm_outputs_are_saved):
            attention["normed input"] = hidden
        if recompute == "none" or backend.norm_outputs_are_saved:
            attention |= backend.norm_outputs
        mlp = model_bytes.mlp(model, rank)
        if recompute == "selective":
            kept = model_bytes.kept_by_selective(model, norm_outputs_are_saved=backend.norm_outputs_are_saved)
            mlp = {name: mlp[name] for name in mlp if name in kept}
        return LayerBytes(attention=attention, mlp=mlp)

    @property
    def by_name(self) -> dict[str, float]:
        return {**self.attention, **self.mlp}

    @property
    def total(self) -> float:
        return sum(self.by_name.values())


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The layers of one kind: their numbers from 1, and what each saves with the recipe and with recompute none."""

    backend: AttentionBytes
    layers: tuple[int, ...]
    kept: LayerBytes
    everything: LayerBytes

    @staticmethod
    def of(backend: AttentionBytes, layers: Iterable[int], config: Config) -> "LayerKind":
        kept, everything = (LayerBytes.of(backend, recompute) for recompute in (config.train.recompute, "none"))
        if config.train.mlp_tile is not None:
            kept = LayerBytes(attention=kept.attention, mlp={})
        return LayerKind(backend=backend, layers=tuple(layers), kept=kept, everything=everything)

    @property
    def number(self) -> int:
        return len(self.layers)

    @property
    def has_experts(self) -> bool:
        return self.backend.model.moe.num_experts is not None

    def number_in(self, *layers: range) -> int:
        return sum(number in chunk for chunk in layers for number in self.layers)

    @property
    def recomputed_attention(self) -> float:
        """Bytes per token."""
        return sum(value for name, value in self.everything.attention.items() if name not in self.kept.attention)

    @property
    def freed_before_attention(self) -> float:
        """Bytes per token that are free while backward computes attention: of what follows it in the layer."""
        kept = self.kept.attention
        return kept.get(model_bytes.RESIDUAL, 0.0) + kept.get(GATED, 0.0) + sum(self.kept.mlp.values())


def kinds_of(config: Config, layout: Layout, pack: float) -> list[LayerKind]:
    """The kinds of layers that save different bytes; that of the model's last layer is the first."""
    softmax = softmax_attention_bytes(config, layout)
    kinds: list[tuple[AttentionBytes, list[int]]] = []
    for group in layer_groups(config.model):
        if group.kind == "linear attention":
            backend: AttentionBytes = LinearAttentionBytes.of(group.model, config, layout, pack)
        else:
            backend = replace(softmax, model=group.model)
        alike = next((numbers for other, numbers in kinds if other.model is backend.model), None)
        if alike is None:
            kinds.append((backend, list(group.numbers)))
        else:  # layers with and without a window save the same
            alike += group.numbers
    ordered = sorted(kinds, key=lambda kind: -max(kind[1]))
    return [LayerKind.of(backend, sorted(layers), config) for backend, layers in ordered]
