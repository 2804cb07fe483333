"""The spec of one transformer layer: the attention backend's modules, with this trainer's layer, router and experts."""

from typing import Any

from megatron.core.transformer import ModuleSpec

from sft.config import Config
from sft.layers.mlps.limits import limits_of
from sft.mcore.backend import AttentionBackend
from sft.mcore.experts.spec import with_experts
from sft.mcore.model.layer import Layer
from sft.mcore.model.mixers import with_mixer
from sft.mcore.modules.biases import bias_mlp, submodules_of, with_bias
from sft.mcore.modules.gated_activation import GatedActivation


def layer_spec(config: Config, backend: AttentionBackend, tp_group: Any, layer_number: int) -> ModuleSpec:
    """The spec of one transformer layer.  layer_number: the layer's number, from 1"""
    model, train = config.model, config.train
    is_selective, has_experts = train.recompute == "selective", model.has_experts(layer_number)
    spec = backend.with_attention(backend.library.layer_spec(has_experts=has_experts, tp_group=tp_group))
    spec = with_mixer(spec, config, backend, layer_number)
    spec.module = Layer
    spec.params = {
        "residual_multiplier": model.residual_multiplier,
        "output_norm": None if model.norm_placement == "pre" else backend.library.final_norm,
        "has_scalar": model.layer_scalar,
        "frees_memory": config.parallel.shard == "weights",
    }
    if model.attention_output_bias:
        attention = spec.submodules.self_attention.submodules
        attention.linear_proj = with_bias(attention.linear_proj)
    if model.mlp_bias:
        bias_mlp(spec.submodules.mlp, has_experts=has_experts)
    if has_experts:
        return with_experts(spec, model, backend.library, layer_number, recompute=is_selective)
    if activation := GatedActivation.fields(model, limits_of(model, layer_number)[0]):
        submodules_of(spec.submodules.mlp).activation_func = GatedActivation.spec(activation)
    spec.params |= {"recompute": is_selective or train.mlp_tile is not None, "tile": train.mlp_tile}
    return spec
