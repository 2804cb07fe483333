"""Makes the spec of a layer with experts from core's spec: with this trainer's router and experts."""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityOp

from sft.config import ModelConfig
from sft.layers.mlps.limits import limits_of
from sft.mcore.experts.grouped import with_own_activation
from sft.mcore.experts.latent import LatentExperts, with_latent_size
from sft.mcore.experts.layer import ExpertLayer
from sft.mcore.experts.normed import NormedExperts, NormedRouter
from sft.mcore.experts.router import Router
from sft.mcore.modules.activation import Activation
from sft.mcore.modules.biases import submodules_of, with_submodules
from sft.mcore.modules.library import ModuleLibrary


def with_experts(
    spec: ModuleSpec, model: ModelConfig, library: ModuleLibrary, layer_number: int, *, recompute: bool
) -> ModuleSpec:
    """`spec`, the library's spec of a layer with experts, with this trainer's router and experts.

    layer_number: from 1; recompute: as in `ExpertLayer`
    """
    of_shared, activation = (Activation.fields(model, limit) for limit in limits_of(model, layer_number))
    arguments: dict[str, Any] = {
        "recompute": recompute,
        "activation": activation,
        "in_low_bits": model.base_dtype != "bf16",
    }
    mlp, keys = spec.submodules.mlp, spec.submodules.sharded_state_dict_keys_map
    # Core's local spec renames the checkpoint key of the norm before an MLP, but not of the norm before experts.
    spec.submodules.sharded_state_dict_keys_map = {k: v for k, v in keys.items() if not k.startswith("pre_mlp")}
    submodules_of(mlp).router = partial(NormedRouter if model.moe.own_norms else Router, moe=model.moe)
    if activation and library.is_te:
        parts = submodules_of(mlp)
        parts.experts = with_own_activation(parts.experts, activation)
    if activation and model.moe.shared_ffn_hidden_size is not None:
        shared = submodules_of(mlp).shared_experts
        parts = replace(submodules_of(shared), activation_func=Activation.spec(of_shared))
        submodules_of(mlp).shared_experts = with_submodules(shared, parts)
    layer: type[ExpertLayer] = ExpertLayer
    if model.moe.own_norms:
        spec.submodules.pre_mlp_layernorm = IdentityOp
        layer, arguments = NormedExperts, arguments | {"norm": library.norm}
    if model.moe.latent_size is not None:
        parts = submodules_of(mlp)
        parts.experts = with_latent_size(parts.experts, model.moe.latent_size)
        layer, arguments = LatentExperts, arguments | {"latent_size": model.moe.latent_size}
    if isinstance(mlp, ModuleSpec):  # up to core 0.18
        mlp.module, mlp.params = layer, arguments
    else:
        spec.submodules.mlp = partial(layer, **mlp.keywords, **arguments)
    return spec
