"""The layers of a model: the mixer and the MLP of each, and groups of layers that are alike.

Code about one layer gets a model whose layers are all of its kind.  So `head_dim` and `num_query_groups` of this model
are those of the layer.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sft.config.mixer_section import LayerKind
from sft.config.model import ModelConfig
from sft.layers import mtp
from sft.layers.mixer import Mixer
from sft.layers.mixers import MIXERS
from sft.layers.mlps import mlp_of
from sft.layers.second_half import Mlp
from sft.layers.weight import LayerWeight


def model_of_kind(model: ModelConfig, kind: LayerKind) -> ModelConfig:
    """The model whose layers all have the heads, the window and the positions of this kind of layer.

    The model itself, unless `full_attention` makes a difference.
    """
    return MIXERS[kind].narrowed(model)


class LayerGroup(NamedTuple):
    """The layers of a model that are alike.

    numbers  the numbers of the layers, from 1
    around   weights beside those of mixer and MLP
    """

    mixer: Mixer
    mlp: Mlp
    numbers: Sequence[int]
    around: tuple[LayerWeight, ...] = ()

    @property
    def model(self) -> ModelConfig:
        """A model whose layers are all like these."""
        return self.mixer.model


_latest: list[tuple[ModelConfig, list[LayerGroup]]] = []  # of `layer_groups`, at most one entry


def layer_groups(model: ModelConfig) -> list[LayerGroup]:
    """The groups of a model, in the order of their first layers.

    Groups whose layers differ in nothing but the window have the same `model`, unless `full_attention` is used.  The
    result for the latest model is cached, because a planner calls this thousands of times for one model.
    """
    if not _latest or _latest[0][0] is not model:
        _latest[:] = [(model, _groups(model, range(1, model.num_layers + 1)))]
    return _latest[0][1]


def mtp_groups(model: ModelConfig) -> list[LayerGroup]:
    """The layer of the block for multi-token prediction, which is like those after the last; [] without a block."""
    layer = _groups(model, [model.num_layers + 1]) if model.has_mtp else []
    return [group._replace(around=mtp.WEIGHTS) for group in layer]


def all_layer_groups(model: ModelConfig) -> list[LayerGroup]:
    """The groups of a model, and then that of its block for multi-token prediction."""
    return [*layer_groups(model), *mtp_groups(model)]


def _groups(model: ModelConfig, layers: Sequence[int]) -> list[LayerGroup]:
    numbers: dict[tuple[LayerKind, bool], list[int]] = {}
    for number in layers:
        numbers.setdefault((model.kind_of(number), model.has_experts(number)), []).append(number)
    dense = model.without_experts if model.moe.num_experts is not None else model
    groups = []
    for (kind, has_experts), of_group in numbers.items():
        own = model_of_kind(model if has_experts else dense, kind)
        groups.append(LayerGroup(MIXERS[kind](own), mlp_of(own), of_group))
    return groups


def describe(model: ModelConfig) -> str | None:
    """`layers 12 with windows of 128 tokens, 12 with full attention; attention sinks`; None: all have full attention"""
    kinds = Counter(_kind(model, number + 1) for number in range(model.num_layers))
    marks = _marks(model)
    if list(kinds) == ["full attention"] and not marks:
        return None
    return "layers " + "; ".join([", ".join(f"{count} with {kind}" for kind, count in kinds.items()), *marks])


def _kind(model: ModelConfig, number: int) -> str:
    mixer = MIXERS[model.kind_of(number)]
    skips = mixer.has_positions and number in model.rope.skip_layers
    return mixer.described(model) + (" without rotary positions" if skips else "")


def _marks(model: ModelConfig) -> list[str]:
    marks = {
        f"the first {model.moe.dense_layers} without experts": bool(model.moe.dense_layers),
        "experts added to an MLP, with norms of their own": model.moe.own_norms,
        "a scalar for each layer": model.layer_scalar,
        "attention sinks": model.attention_sinks,
        f"attention scores capped at {model.attention_softcap}": model.attention_softcap is not None,
        f"logits capped at {model.logits_softcap}": model.logits_softcap is not None,
        "a block for multi-token prediction": model.has_mtp,
    }
    return [mark for mark, is_used in marks.items() if is_used]
