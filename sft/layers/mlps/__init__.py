"""The second halves of layers: a dense MLP, and experts."""

from sft.config import ModelConfig
from sft.layers.mlps.dense import DenseMlp
from sft.layers.mlps.experts import Experts
from sft.layers.second_half import Mlp

MLPS: tuple[type[Mlp], ...] = (Experts, DenseMlp)


def mlp_of(model: ModelConfig) -> Mlp:
    """The second half of the model's layers, which must all have experts or all have a dense MLP."""
    return DenseMlp(model) if model.moe.num_experts is None else Experts(model)
