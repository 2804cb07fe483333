"""Computes the bytes of activations that layers of each kind save for backward, per local token.  Arithmetic only.

sft/mcore/model_bytes.py and the files activation_bytes.py of attention give the bytes of parts of a layer.  This module
chooses those that train.recompute and train.mlp_tile leave; sft/estimate/memory.py sums them over layers.
"""

from dataclasses import dataclass, replace

from sft.config import Config
from sft.config.layer_kinds import SOFTMAX, num_layers_of, of_kind
from sft.mcore import model_bytes
from sft.mcore.attention.activation_bytes import AttentionBytes
from sft.mcore.latent_attention.activation_bytes import softmax_attention_bytes
from sft.mcore.linear_attention.activation_bytes import LinearAttentionBytes
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
        attention |= {"norms' scales": model_bytes.norm_scales(model, rank), "MLP's norm input": hidden}
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
    """The layers of one kind: how many the model has, and what each saves with the recipe and with recompute none."""

    backend: AttentionBytes
    number: int
    kept: LayerBytes
    everything: LayerBytes

    @staticmethod
    def of(backend: AttentionBytes, number: int, config: Config) -> "LayerKind":
        kept, everything = (LayerBytes.of(backend, recompute) for recompute in (config.train.recompute, "none"))
        if config.train.mlp_tile is not None:
            kept = LayerBytes(attention=kept.attention, mlp={})
        return LayerKind(backend=backend, number=number, kept=kept, everything=everything)

    @property
    def recomputed_attention(self) -> float:
        """Bytes per token."""
        return sum(value for name, value in self.everything.attention.items() if name not in self.kept.attention)

    def attention(self, pack: float, tokens: float) -> tuple[float, float]:
        """Working memory of local tokens, and of gathered keys and values.

        Backward of the MLP comes first, and frees what the layer's MLP has saved.
        """
        more = self.recomputed_attention - sum(self.kept.mlp.values())
        return self.backend.local(tokens) + more * tokens, self.backend.gathered(pack)


def kinds_of(config: Config, layout: Layout, pack: float) -> list[LayerKind]:
    model = config.model
    num_linear, num_dense = len(model.linear_attention.layers), model.moe.dense_layers
    num_full = model.num_layers - num_linear - num_dense
    full = softmax_attention_bytes(config, layout)
    if model.full_attention.is_used:
        numbers = {kind: num_layers_of(model, kind) for kind in SOFTMAX}
        return [
            LayerKind.of(replace(full, model=of_kind(model, kind)), number, config) for kind, number in numbers.items()
        ]
    kinds = [LayerKind.of(full, num_full, config)] if num_full else []
    if num_dense:
        kinds.append(LayerKind.of(replace(full, model=model.without_experts), num_dense, config))
    if num_linear:
        kinds.append(LayerKind.of(LinearAttentionBytes.of(config, layout, pack), num_linear, config))
    return kinds
