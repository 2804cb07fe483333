"""The spec of one transformer layer: the attention backend's modules, with this trainer's layer, router and experts."""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityOp

from sft.config import Config, ModelConfig
from sft.mcore.backend import AttentionBackend
from sft.mcore.experts.grouped import with_gated_activation
from sft.mcore.experts.layer import ExpertLayer
from sft.mcore.experts.normed import NormedExperts, NormedRouter
from sft.mcore.experts.router import Router
from sft.mcore.model.layer import Layer
from sft.mcore.model.mixers import with_mixer
from sft.mcore.modules.biases import bias_mlp, submodules_of, with_bias, with_submodules
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
        return _with_experts(spec, model, backend, recompute=is_selective, activation=GatedActivation.fields(model))
    if GatedActivation.fields(model):
        submodules_of(spec.submodules.mlp).activation_func = GatedActivation.spec(model)
    spec.params |= {"recompute": is_selective or train.mlp_tile is not None, "tile": train.mlp_tile}
    return spec


def _with_experts(spec: ModuleSpec, model: ModelConfig, backend: AttentionBackend, **arguments: Any) -> ModuleSpec:
    mlp, keys = spec.submodules.mlp, spec.submodules.sharded_state_dict_keys_map
    # Core's local spec renames the checkpoint key of the norm before an MLP, but not of the norm before experts.
    spec.submodules.sharded_state_dict_keys_map = {k: v for k, v in keys.items() if not k.startswith("pre_mlp")}
    submodules_of(mlp).router = partial(NormedRouter if model.moe.own_norms else Router, moe=model.moe)
    if GatedActivation.fields(model) and backend.library.is_te:
        parts = submodules_of(mlp)
        parts.experts = with_gated_activation(parts.experts, GatedActivation.fields(model))
    if GatedActivation.fields(model) and model.moe.shared_ffn_hidden_size is not None:
        shared = submodules_of(mlp).shared_experts
        parts = replace(submodules_of(shared), activation_func=GatedActivation.spec(model))
        submodules_of(mlp).shared_experts = with_submodules(shared, parts)
    layer: type[ExpertLayer] = ExpertLayer
    if model.moe.own_norms:
        spec.submodules.pre_mlp_layernorm = IdentityOp
        layer, arguments = NormedExperts, arguments | {"norm": backend.library.final_norm}
    if isinstance(mlp, ModuleSpec):  # up to core 0.18
        mlp.module, mlp.params = layer, arguments
    else:
        spec.submodules.mlp = partial(layer, **mlp.keywords, **arguments)
    return spec
