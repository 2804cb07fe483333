"""Removes the mixer or the MLP from the spec of a layer: modules of core that return their input replace it."""

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp


def without_mixer(spec: ModuleSpec) -> ModuleSpec:
    """Remove the mixer and its norm from the layer `spec`, and return the spec."""
    layer = spec.submodules
    layer.input_layernorm = layer.self_attention = IdentityOp
    layer.self_attn_bda = IdentityFuncOp
    return spec


def without_mlp(spec: ModuleSpec) -> ModuleSpec:
    """Remove the MLP and its norm from the layer `spec`, and return the spec."""
    layer = spec.submodules
    layer.pre_mlp_layernorm = layer.mlp = IdentityOp
    layer.mlp_bda = IdentityFuncOp
    return spec
