"""Which matrices of the layers may be in low bits (model.base_dtype)."""

from collections.abc import Iterable
from dataclasses import dataclass

from sft.config import ModelConfig
from sft.config.weight_format import NF4, WeightFormat
from sft.layers.kinds import LayerGroup
from sft.layers.weights import sizes_of

# Experts in low bits are dequantised together up to this size, which keeps a kernel for all their rows busy.
GROUP_BYTES = 512 << 20


def weight_format(model: ModelConfig) -> WeightFormat | None:
    """The format of frozen weights in low bits; None: they have the precision of the run, or the files are not known"""
    if model.base_dtype == "nf4":
        return NF4
    return model.pretrained.stored_format if model.base_dtype == "as_stored" and model.pretrained else None


@dataclass(frozen=True, kw_only=True)
class SharedScales:
    """The matrices in low bits whose columns a layout divides.

    stored  their format
    by_tp   the number of columns of each matrix that tp divides, by its name in a layer
    by_etp  the same of the matrices of experts, whose columns etp divides
    """

    stored: WeightFormat
    by_tp: dict[str, int]
    by_etp: dict[str, int]

    @staticmethod
    def of(model: ModelConfig, groups: Iterable[LayerGroup]) -> "SharedScales | None":
        """None: no weights are in low bits, or all columns of a row share its scale.  groups: those of `model`"""
        stored = weight_format(model)
        if stored is None or stored.columns is None:
            return None
        columns: dict[bool, dict[str, int]] = {False: {}, True: {}}
        for group in groups:
            sizes = sizes_of(group.model)
            for weight in group.weights:
                if (
                    weight.is_linear
                    and weight.split == "columns"
                    and (not stored.shares or stored.shares.get(weight.key))
                ):
                    columns[weight.is_of_expert][weight.key] = weight.sizes(sizes)[-1]
        return SharedScales(stored=stored, by_tp=columns[False], by_etp=columns[True])
