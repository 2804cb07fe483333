"""The kinds of second halves of layers, one file each, and the table of all kinds."""

from collections.abc import Mapping

from sft.config import ModelConfig
from sft.config.halves import MlpKind
from sft.layers.mlps.dense import DenseMlp
from sft.layers.mlps.experts import Experts
from sft.layers.mlps.none import NoMlp
from sft.layers.second_half import Mlp

MLPS: Mapping[MlpKind, type[Mlp]] = {"experts": Experts, "dense": DenseMlp, "no MLP": NoMlp}


def mlp_of(model: ModelConfig) -> Mlp:
    """The second half of the model's layers, which must all have the same."""
    return MLPS[model.mlp_kind_of(1)](model)
