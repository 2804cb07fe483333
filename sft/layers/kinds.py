"""The layers of a model: the mixer and the MLP of each, and groups of layers that are alike.

Code that works on one layer gets a model config whose layers all have the kind of this layer.  So its `head_dim` and
`num_query_groups` are the sizes of the layer.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sft.config.halves import MlpKind
from sft.config.mixer_section import LayerKind
from sft.config.model import ModelConfig
from sft.layers import mtp
from sft.layers.mixer import Mixer
from sft.layers.mixers import MIXERS
from sft.layers.mlps import MLPS, mlp_of
from sft.layers.parameters import LayerParameters
from sft.layers.second_half import Mlp
from sft.layers.weight import LayerWeight
from sft.layers.weights import AFTER_MIXER, AFTER_MLP, sizes_of


def model_of_kind(model: ModelConfig, kind: LayerKind) -> ModelConfig:
    """A model whose layers all have the heads, the window and the positions of this kind of layer.

    The result is `model` itself, unless layers with a window have other sizes.
    """
    return MIXERS[kind].narrowed(model)


@dataclass(frozen=True)
class LayerGroup:
    """The layers of a model that are alike.

    numbers  the numbers of the layers, from 1
    around   for the block of multi-token prediction, its weights outside of mixer and MLP; () for other layers
    """

    mixer: Mixer
    mlp: Mlp
    numbers: Sequence[int]
    around: tuple[LayerWeight, ...] = ()

    @property
    def model(self) -> ModelConfig:
        """A model whose layers are all like these."""
        return self.mixer.model

    @property
    def is_mtp(self) -> bool:
        """Whether this is the layer of the block for multi-token prediction."""
        return bool(self.around)

    @cached_property
    def weights(self) -> list[LayerWeight]:
        """The weights of one of these layers, in the order of their use, and then `around`.

        One row describes the weight of every expert.
        """
        rows = (*self.mixer.weights, *AFTER_MIXER, *self.mlp.weights, *AFTER_MLP, *self.around)
        return [weight for weight in rows if weight.is_in(self.model)]

    @cached_property
    def num_elements(self) -> list[int]:
        """The number of elements of each of `weights`, of all tp ranks together."""
        sizes = sizes_of(self.model)
        return [weight.size(sizes) for weight in self.weights]

    @cached_property
    def parameters(self) -> LayerParameters:
        """The parameters of one of these layers, counted by the way in which they are split."""
        return LayerParameters.of(self.model, self.weights, self.mlp.num_experts, self.mixer.state_products)


_latest: list[tuple[ModelConfig, list[LayerGroup]]] = []  # the latest argument and result of `all_layer_groups`


def all_layer_groups(model: ModelConfig) -> list[LayerGroup]:
    """The groups of a model, in the order of their first layers.  The block for multi-token prediction comes last.

    Groups that differ only in the window have the same `model` (`ModelConfig.has_own_windows`).  The block's layer has
    the kind that one more layer of the model would have.  The result for the latest model is cached, because the
    planner asks for it thousands of times.
    """
    if _latest and _latest[0][0] is model:
        return _latest[0][1]
    numbers: dict[tuple[LayerKind, MlpKind, bool], list[int]] = {}
    for number in range(1, model.num_layers + model.has_mtp + 1):
        alike = model.kind_of(number), model.mlp_kind_of(number), number > model.num_layers
        numbers.setdefault(alike, []).append(number)
    of_layers = {mlp for _, mlp, is_mtp in numbers if not is_mtp}
    by_mlp = {mlp: model if of_layers == {mlp} else MLPS[mlp].narrowed(model) for _, mlp, _ in numbers}
    groups = []
    for (kind, mlp, is_mtp), of_group in numbers.items():
        own = MIXERS[kind].narrowed(by_mlp[mlp])
        groups.append(LayerGroup(MIXERS[kind](own), mlp_of(own), of_group, mtp.WEIGHTS if is_mtp else ()))
    _latest[:] = [(model, groups)]
    return groups


def layer_groups(model: ModelConfig) -> list[LayerGroup]:
    """The groups of a model, without its block for multi-token prediction."""
    return [group for group in all_layer_groups(model) if not group.is_mtp]


def describe(model: ModelConfig) -> str | None:
    """The kinds of layers, for `sft check`; None: all layers have full attention, and nothing else is special.

    `layers 12 with windows of 128 tokens, 12 with full attention; attention sinks`
    """
    kinds = Counter(_kind(model, number + 1) for number in range(model.num_layers))
    marks = _marks(model)
    if list(kinds) == ["full attention"] and not marks:
        return None
    return "layers " + "; ".join([", ".join(f"{count} with {kind}" for kind, count in kinds.items()), *marks])


def _kind(model: ModelConfig, number: int) -> str:
    mixer = MIXERS[model.kind_of(number)]
    skips = mixer.has_positions and number in model.rope.skip_layers
    has_mlp = number not in model.halves.without_mlp
    return mixer.described(model) + " without rotary positions" * skips + " and no MLP" * (not has_mlp)


def _marks(model: ModelConfig) -> list[str]:
    marks = {
        f"the first {model.moe.dense_layers} without experts": bool(model.moe.dense_layers),
        "experts added to an MLP, with norms of their own": model.moe.own_norms,
        "a scalar for each layer": model.layer_scalar,
        "attention sinks" + " in windows" * (not model.full_attention.sinks): model.attention_sinks,
        f"values of {model.value_head_dim} multiplied by {model.value_multiplier:g}": model.value_head_dim is not None,
        f"a {model.attention_head_gate} gate for each head": model.attention_head_gate is not None,
        f"attention scores capped at {model.attention_softcap}": model.attention_softcap is not None,
        f"logits capped at {model.logits_softcap}": model.logits_softcap is not None,
        "a block for multi-token prediction": model.has_mtp,
    }
    return [mark for mark, is_used in marks.items() if is_used]
