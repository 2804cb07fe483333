"""Makes the spec of a transformer layer: the backend's modules, with this trainer's layer, router and experts."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.transformer import ModuleSpec

from sft.config import Config
from sft.config.halves import MlpKind
from sft.layers.kinds import model_of_kind
from sft.layers.mlps.limits import limits_of
from sft.mcore.backend import AttentionBackend
from sft.mcore.experts.spec import with_experts
from sft.mcore.model.halves import without_mlp
from sft.mcore.model.layer import Layer
from sft.mcore.model.mixers import with_mixer
from sft.mcore.modules.activation import Activation
from sft.mcore.modules.biases import bias_mlp, submodules_of
from sft.mcore.modules.library import ModuleLibrary
from sft.mcore.modules.unrepeated import leave_out_products


def layer_spec(config: Config, backend: AttentionBackend, tp_group: Any, layer_number: int) -> ModuleSpec:
    """The spec of one transformer layer.  layer_number: the layer's number, from 1"""
    model, kind = config.model, config.model.mlp_kind_of(layer_number)
    alike = model_of_kind(model, model.kind_of(layer_number))
    spec = backend.library.layer_spec(alike, has_experts=kind == "experts", tp_group=tp_group)
    if model.mlp_bias and kind != "no MLP":
        bias_mlp(spec.submodules.mlp, has_experts=kind == "experts")
    if config.train.repeats_parts:
        leave_out_products(spec, config, layer_number)
    spec = with_mixer(backend.with_attention(spec), config, backend, layer_number)
    spec.module = Layer
    spec.params = {
        "residual_multiplier": model.residual_multiplier,
        "output_norm": None if alike.norm_placement == "pre" else backend.library.output_norm,
        "has_scalar": model.layer_scalar,
        "frees_memory": config.parallel.shard == "weights" or model.base_dtype != "bf16",
    }
    return _SECOND_HALVES[kind](spec, config, backend.library, layer_number)


def _dense(spec: ModuleSpec, config: Config, library: ModuleLibrary, layer_number: int) -> ModuleSpec:
    model, train = config.model, config.train
    if activation := Activation.fields(model, limits_of(model, layer_number)[0]):
        submodules_of(spec.submodules.mlp).activation_func = Activation.spec(activation)
    spec.params |= {"recompute": train.recompute == "selective" or train.mlp_tile is not None, "tile": train.mlp_tile}
    return spec


def _experts(spec: ModuleSpec, config: Config, library: ModuleLibrary, layer_number: int) -> ModuleSpec:
    is_selective = config.train.recompute == "selective"
    return with_experts(spec, config.model, library, layer_number, recompute=is_selective)


_SECOND_HALVES: Mapping[MlpKind, Callable[[ModuleSpec, Config, ModuleLibrary, int], ModuleSpec]] = {
    "dense": _dense,
    "experts": _experts,
    "no MLP": lambda spec, *_: without_mlp(spec),
}
