"""Whose modules a layer is made of: norms, linear projections, experts, their permutation.

A library says nothing of attention's kernel (`backends/kernels.py`), which a backend puts into the layer.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityOp

from sft.config import Config
from sft.mcore.modules.biases import submodules_of
from sft.mcore.modules.norm import RMSNorm
from sft.mcore.modules.qk_norm import norms_over


class ModuleLibrary(ABC):
    """One library.  All store the same checkpoint keys."""

    final_norm: ClassVar[type[torch.nn.Module]]  # after the last layer
    is_te: ClassVar[bool]  # of Transformer Engine; False: norms mark their outputs as recomputable

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def layer_spec(self, *, has_experts: bool, tp_group: Any) -> ModuleSpec:
        """The modules of one transformer layer, with core's own attention."""

    @property
    def transformer_fields(self) -> dict[str, Any]:
        """Fields of TransformerConfig that the library decides."""
        return {} if self.config.model.moe.num_experts is None else {"moe_grouped_gemm": self.is_te}


class LocalLibrary(ModuleLibrary):
    """Core's linear projections and this trainer's norms, in plain torch."""

    final_norm = RMSNorm
    is_te = False

    def layer_spec(self, *, has_experts: bool, tp_group: Any) -> ModuleSpec:
        model = self.config.model
        spec = get_gpt_layer_local_spec(
            num_experts=model.moe.num_experts if has_experts else None, qk_layernorm=model.qk_norm
        )
        input_norm = IdentityOp if model.norm_placement == "post" else RMSNorm
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = input_norm
        if model.qk_norm:
            attention, across = spec.submodules.self_attention.submodules, model.qk_norm_across_heads
            attention.q_layernorm, attention.k_layernorm = norms_over(tp_group) if across else (RMSNorm, RMSNorm)
        return spec


class TransformerEngineLibrary(ModuleLibrary):
    """Transformer Engine's modules, which compute a norm inside the projection after it."""

    final_norm = TENorm
    is_te = True

    def layer_spec(self, *, has_experts: bool, tp_group: Any) -> ModuleSpec:
        model = self.config.model
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=model.moe.num_experts if has_experts else None,
            moe_grouped_gemm=has_experts,
            qk_layernorm=model.qk_norm,
        )
        if self.config.lora.is_used:
            return with_norms_apart(spec)
        return with_norm_before_attention(spec) if model.latent_attention.is_used else spec


def with_norms_apart(spec: ModuleSpec) -> ModuleSpec:
    """The layer whose norms are modules of their own, under the same keys of a checkpoint.

    Transformer Engine computes the norm before a projection inside the projection, where no adapter can read its
    output.
    """
    layer = with_norm_before_attention(spec).submodules
    layer.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    if layer.pre_mlp_layernorm is IdentityOp:  # with experts, the norm is a module of its own already
        layer.pre_mlp_layernorm = TENorm
        submodules_of(layer.mlp).linear_fc1 = TEColumnParallelLinear
    return spec


def with_norm_before_attention(spec: ModuleSpec) -> ModuleSpec:
    """The layer in which only the norm before attention is a module of its own: its output has several readers."""
    layer = spec.submodules
    layer.input_layernorm, layer.self_attention.submodules.linear_qkv = TENorm, TEColumnParallelLinear
    layer.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    return spec
