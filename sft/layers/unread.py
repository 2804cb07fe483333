"""Which products recomputation leaves out: those whose output nobody reads when backward computes a layer again.

The backward pass of a product reads its input and its weight.  So nobody reads the output of a product if only sums
follow it in what is recomputed.  A norm, a gate or another product after it would read the output.

    down projection of a dense MLP, without a norm after it     recompute = selective, attention_kept or full; mlp_tile
    down projections of experts                                 selective
                      without a norm or a projection after them attention_kept or full
    down projection of a shared expert without a gate           like those of experts
    output projection of linear attention or Mamba-2            selective
    output projection of any mixer, in a layer without an MLP   attention_kept or full

With FP8, everything is repeated: Transformer Engine's checkpoint restores the scales of the first pass.
"""

from typing import NamedTuple

from sft.config import Config, ModelConfig
from sft.layers.weight import LayerWeight


class Unread(NamedTuple):
    """Whether nobody reads the output of a weight's product when backward repeats it.

    in_part   if its mixer, MLP or experts are repeated alone
    in_layer  if its whole layer is repeated
    """

    in_part: bool = False
    in_layer: bool = False

    @classmethod
    def of(cls, model: ModelConfig, weight: LayerWeight, *, has_mlp: bool) -> "Unread":
        """model: a model whose layers are all like the layer; has_mlp: whether the layer has an MLP or experts"""
        if not weight.writes_residual:
            return cls()
        moe, has_norm = model.moe, model.norm_placement != "pre"
        if weight.part == "mlp":
            return cls(not has_norm, not has_norm)
        if weight.part == "experts":
            return cls(True, not (has_norm or moe.own_norms or moe.latent_size))
        if weight.part == "shared":
            return cls(not moe.shared_gate, not (has_norm or moe.own_norms or moe.shared_gate))
        return cls(True, not (has_norm or has_mlp))

    def leaves_out(self, config: Config, part: str) -> bool:
        """Whether recomputation leaves the product out, if the recipe's recomputation reaches it.

        part: `LayerWeight.part`
        """
        if config.run.fp8 is not None:
            return False
        is_tiled = part == "mlp" and config.train.mlp_tile is not None
        return self.in_layer if config.train.repeats_layers and not is_tiled else self.in_part
