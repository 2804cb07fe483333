"""Defines the libraries from whose modules layers are built: norms, linear projections and experts.

The kernel of attention is not part of a library: the backend puts attention into the layer (`backend.py`).  So layers
with any attention can have Transformer Engine's linear layers and experts, and FP8.  `choice.py` chooses the library
of a run.
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

from sft.config import Config, ModelConfig
from sft.mcore.modules.biases import submodules_of
from sft.mcore.modules.norm import RMSNorm, UnscaledNorm
from sft.mcore.modules.qk_norm import norms_over

# Our names of norms within a layer -> their names in a checkpoint, where a norm belongs to the projection after it.
_STORED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class ModuleLibrary(ABC):
    """One library.  A checkpoint has the same keys with every library.

    reason: why this run uses this library, for the log
    """

    name: ClassVar[str]  # the value of run.modules
    norm: ClassVar[type[torch.nn.Module]]  # class of norms that are not computed inside a projection
    is_te: ClassVar[bool]  # whether linear layers and experts are Transformer Engine's
    marks_norms: ClassVar[bool]  # whether norms mark their outputs as recomputable

    def __init__(self, config: Config, reason: str = "") -> None:
        self.config, self.reason = config, reason

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name

    @abstractmethod
    def layer_spec(self, model: ModelConfig, *, has_experts: bool, tp_group: Any) -> ModuleSpec:
        """The modules of one transformer layer, with core's own attention.

        model: a model whose layers are all like this one (`kinds.model_of_kind`)
        """

    @property
    def final_norm(self) -> type[torch.nn.Module]:
        """Class of the norm after the last layer."""
        return self._norm_with(is_zero_centered=self.config.model.final_norm_zero_centered)

    @property
    def output_norm(self) -> type[torch.nn.Module]:
        """Class of the norms on the outputs of attention and MLP."""
        return self._norm_with(epsilon=self.config.model.output_norm_epsilon)

    def _norm_with(self, **own: Any) -> type[torch.nn.Module]:
        """A subclass of `norm` with these class attributes, without those that are None; `norm` if none remain."""
        own = {name: value for name, value in own.items() if value is not None}
        return type("Norm", (self.norm,), own) if own else self.norm

    @property
    def transformer_fields(self) -> dict[str, Any]:
        """Fields of TransformerConfig that the library decides."""
        return {} if self.config.model.moe.num_experts is None else {"moe_grouped_gemm": self.is_te}


class LocalLibrary(ModuleLibrary):
    """Core's linear projections and this trainer's norms, in plain torch."""

    name = "local"
    norm = RMSNorm
    is_te = False
    marks_norms = True

    def layer_spec(self, model: ModelConfig, *, has_experts: bool, tp_group: Any) -> ModuleSpec:
        spec = get_gpt_layer_local_spec(
            num_experts=model.moe.num_experts if has_experts else None, qk_layernorm=model.qk_norm
        )
        return _with_own_norms(spec, model, tp_group)


class TransformerEngineLibrary(ModuleLibrary):
    """Transformer Engine's linear projections and experts, with this trainer's norms.

    These norms suit every model: they can follow a projection, and backward can compute their outputs again.
    """

    name = "te"
    norm = RMSNorm
    is_te = True
    marks_norms = True

    def layer_spec(self, model: ModelConfig, *, has_experts: bool, tp_group: Any) -> ModuleSpec:
        spec = self._spec(has_experts)
        layer = spec.submodules
        layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        if not has_experts:
            submodules_of(layer.mlp).linear_fc1 = TEColumnParallelLinear
        layer.sharded_state_dict_keys_map = dict(_STORED)
        return _with_own_norms(spec, model, tp_group)

    def _spec(self, has_experts: bool) -> ModuleSpec:
        model = self.config.model
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=model.moe.num_experts if has_experts else None,
            moe_grouped_gemm=has_experts,
            qk_layernorm=model.qk_norm,
        )


class FusedNormLibrary(TransformerEngineLibrary):
    """Transformer Engine's modules, which compute a norm inside the projection after it.

    The projection saves the outputs of these norms, so backward cannot compute them again.
    """

    norm = TENorm
    marks_norms = False

    @staticmethod
    def fits(model: ModelConfig) -> bool:
        """Whether each norm of the model, apart from norms of heads, is directly before a projection."""
        has_own_norms = model.moe.own_norms or model.qk_norm_across_heads or not model.qk_norm_weights
        placements = {model.norm_placement, model.linear_attention.norm_placement or "pre"}
        return placements == {"pre"} and not has_own_norms

    def layer_spec(self, model: ModelConfig, *, has_experts: bool, tp_group: Any) -> ModuleSpec:
        spec = self._spec(has_experts)
        if self.config.lora.is_used:
            return with_norms_apart(spec)
        sections = self.config.model.mixer_sections.values()
        return with_norm_before_attention(spec) if any(x.shares_input_norm for x in sections) else spec


def _with_own_norms(spec: ModuleSpec, model: ModelConfig, tp_group: Any) -> ModuleSpec:
    """Change the layer `spec` so that all its norms are this trainer's."""
    input_norm = IdentityOp if model.norm_placement == "post" else RMSNorm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = input_norm
    if model.qk_norm:
        attention, across = spec.submodules.self_attention.submodules, model.qk_norm_across_heads
        of_heads = RMSNorm if model.qk_norm_weights else UnscaledNorm
        attention.q_layernorm, attention.k_layernorm = norms_over(tp_group) if across else (of_heads, of_heads)
    return spec


def with_norms_apart(spec: ModuleSpec) -> ModuleSpec:
    """Change the layer `spec` so that all its norms are separate modules; the keys of checkpoints do not change.

    Transformer Engine computes the norm before a projection inside the projection.  An adapter needs the norm's output.
    """
    layer = with_norm_before_attention(spec).submodules
    layer.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    if layer.pre_mlp_layernorm is IdentityOp:  # with experts, this norm is a separate module already
        layer.pre_mlp_layernorm = TENorm
        submodules_of(layer.mlp).linear_fc1 = TEColumnParallelLinear
    return spec


def with_norm_before_attention(spec: ModuleSpec) -> ModuleSpec:
    """Change the layer `spec` so that the norm before attention is a separate module, whose output others can read."""
    layer = spec.submodules
    layer.input_layernorm, layer.self_attention.submodules.linear_qkv = TENorm, TEColumnParallelLinear
    layer.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    return spec
