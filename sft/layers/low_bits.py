"""Which matrices of the layers may be in low bits (model.base_dtype)."""

from sft.config import ModelConfig
from sft.config.weight_format import NF4, WeightFormat
from sft.layers.kinds import all_layer_groups
from sft.layers.weights import sizes_of

# Experts in low bits are dequantised together up to this size, which keeps a kernel for all their rows busy.
GROUP_BYTES = 512 << 20


def weight_format(model: ModelConfig) -> WeightFormat | None:
    """The format of frozen weights in low bits; None: they have the precision of the run, or the files are not known"""
    if model.base_dtype == "nf4":
        return NF4
    return model.pretrained.stored_format if model.base_dtype == "as_stored" and model.pretrained else None


def split_columns(model: ModelConfig, stored: WeightFormat, *, by_expert: bool) -> dict[str, int]:
    """The number of columns of each matrix in the format `stored` whose columns tp divides, by its name in a layer.

    by_expert: of the matrices of experts, whose columns etp divides
    """
    columns = dict[str, int]()
    for group in all_layer_groups(model):
        sizes = sizes_of(group.model)
        for weight in group.weights:
            if weight.is_linear and weight.split == "columns" and weight.is_of_expert == by_expert:
                if not stored.shares or stored.shares.get(weight.key):
                    columns[weight.key] = weight.sizes(sizes)[-1]
    return columns
