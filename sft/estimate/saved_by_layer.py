"""Computes the bytes of activations that layers save for backward, per local token.  Arithmetic only.

The files of sft/layers give the bytes of the two halves of a layer.  This module selects the tensors that are saved
with the recipe's train.recompute and train.mlp_tile.  working_sets.py sums their bytes over layers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sft.config import Config, RopeConfig
from sft.layers.kinds import LayerGroup
from sft.layers.mixer import MixerBytes
from sft.layers.mlps import mlp_of
from sft.layers.rank_share import RankShare
from sft.layers.second_half import RESIDUAL, Mlp


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of activations that one layer saves for backward, per local token, by name.

    attention  bytes that the attention block saves, and the input of the MLP block
    mlp        bytes that the MLP block saves
    """

    attention: dict[str, float]
    mlp: dict[str, float]

    @staticmethod
    def of(mixer: MixerBytes, recompute: str) -> "LayerBytes":
        """The bytes that one layer saves with train.recompute = `recompute`.

        Llama-8B: full 8 KiB, attention_kept 16 KiB; selective 36 KiB and none 136 KiB, each plus a few bytes per head
        """
        model, rank = mixer.model, mixer.rank
        attention = {"layer's input": rank.hidden(model)}
        if recompute == "attention_kept":
            attention |= mixer.kept
        if recompute in ("attention_kept", "full"):
            return LayerBytes(attention=attention, mlp={})
        if recompute == "none" or not mixer.is_recomputed:
            attention |= mixer.saved
        half = mlp_of(model)
        attention |= mixer.frame(recompute, half.residual(rank))
        mlp = half.saved(rank)
        if recompute == "selective":
            kept = half.kept_by_selective(norm_outputs_are_saved=mixer.norm_outputs_are_saved)
            mlp = {name: mlp[name] for name in mlp if name in kept}
        return LayerBytes(attention=attention, mlp=mlp)

    @property
    def by_name(self) -> dict[str, float]:
        return {**self.attention, **self.mlp}

    @property
    def total(self) -> float:
        return sum(self.by_name.values())


@dataclass(frozen=True, kw_only=True)
class SavingLayers:
    """Layers that save the same bytes.

    layers      numbers of the layers, from 1
    kept        bytes that each saves with the recipe's recomputation
    everything  bytes that each would save without recomputation
    """

    mixer: MixerBytes
    mlp: Mlp
    layers: tuple[int, ...]
    kept: LayerBytes
    everything: LayerBytes

    @staticmethod
    def of(mixer: MixerBytes, layers: Iterable[int], config: Config) -> "SavingLayers":
        kept, everything = (LayerBytes.of(mixer, recompute) for recompute in (config.train.recompute, "none"))
        if config.train.mlp_tile is not None:
            kept = LayerBytes(attention=kept.attention, mlp={})
        return SavingLayers(
            mixer=mixer, mlp=mlp_of(mixer.model), layers=tuple(layers), kept=kept, everything=everything
        )

    @property
    def recomputed_attention(self) -> float:
        """Bytes per token of attention's tensors that backward computes again."""
        return sum(value for name, value in self.everything.attention.items() if name not in self.kept.attention)

    @property
    def waits_for_attention(self) -> float:
        """Bytes per token of recomputed attention tensors while backward computes attention.

        The input of the MLP's norm is free by then.
        """
        is_kept = RESIDUAL in self.kept.attention
        return self.recomputed_attention - (0.0 if is_kept else self.everything.attention.get(RESIDUAL, 0.0))

    @property
    def freed_before_attention(self) -> float:
        """Bytes per token of saved tensors that are free when backward computes attention.

        These tensors belong to operations that follow attention in the layer.
        """
        kept = self.kept.attention
        return sum(kept.get(name, 0.0) for name in (RESIDUAL, *self.mixer.freed)) + sum(self.kept.mlp.values())


def saving_layers(groups: Sequence[LayerGroup], config: Config, rank: RankShare, pack: float) -> list[SavingLayers]:
    """These layers, grouped by the bytes that they save.  The group of the last layer comes first.

    pack: tokens of a pack
    """
    alike: list[tuple[MixerBytes, list[int]]] = []
    for group in groups:
        own = group.mixer.bytes(config, rank, pack)
        same = next((n for other, n in alike if type(other) is type(own) and other.model is own.model), None)
        if same is None:
            alike.append((own, list(group.numbers)))
        else:  # layers with and without a window save the same bytes
            same += group.numbers
    alike.sort(key=lambda layers: -max(layers[1]))
    return [SavingLayers.of(mixer, sorted(layers), config) for mixer, layers in alike]


def rotary_tables(kinds: Iterable[SavingLayers], pack: float) -> float:
    """Bytes of all rotary tables.

    Layers with the same settings model.rope and the same rotary width share a table.
    """
    tables: list[tuple[int, RopeConfig]] = []
    num_bytes: list[float] = []
    for kind in kinds:
        table = (kind.mixer.model.rotary_dim, kind.mixer.model.rope)
        if table not in tables:
            tables.append(table)
            num_bytes.append(0.0)
        number = tables.index(table)
        num_bytes[number] = max(num_bytes[number], kind.mixer.rotary(pack))
    return sum(num_bytes)
