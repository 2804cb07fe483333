"""Collects the sizes of a model's layers that a layout divides.  `alignment.misfits` compares them with a layout."""

from collections.abc import Sequence
from dataclasses import dataclass

from sft.config import ModelConfig
from sft.layers.kinds import LayerGroup, all_layer_groups
from sft.layers.low_bits import SharedScales
from sft.layers.mixers import MIXERS, softmax
from sft.layers.mlps import MLPS


@dataclass(frozen=True, kw_only=True)
class SplitSizes:
    """The sizes of a model that tensor parallelism, all-to-all and FP8 must divide.

    heads   the numbers of heads, by key of the recipe
    by_tp   all sizes that tp must divide, by key of the recipe
    groups  the groups of layers; `te_widths` of their mixers and MLPs has the widths of a rank's weights
    scales  the columns that share scales in frozen weights in low bits; None: there are none
    """

    heads: dict[str, int]
    by_tp: dict[str, int]
    groups: Sequence[LayerGroup]
    scales: SharedScales | None

    @staticmethod
    def of(model: ModelConfig) -> "SplitSizes":
        groups = all_layer_groups(model)
        mixers, mlps = {type(group.mixer) for group in groups}, {type(group.mlp) for group in groups}
        heads = softmax.heads(model)
        by_tp = dict(heads)  # core divides heads in any case
        for mixer in MIXERS.values():
            by_tp |= mixer.divided_by_tp(model) if mixer in mixers else {}
        for mlp in MLPS.values():
            by_tp |= mlp.divided_by_tp(model) if mlp in mlps else {}
        return SplitSizes(heads=heads, by_tp=by_tp, groups=groups, scales=SharedScales.of(model, groups))
