"""Takes a half out of the spec of a layer: the mixer, or the MLP.  Core has modules that return their input."""

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp


def without_mixer(spec: ModuleSpec) -> ModuleSpec:
    """`spec`, a layer that is only an MLP."""
    layer = spec.submodules
    layer.input_layernorm = layer.self_attention = IdentityOp
    layer.self_attn_bda = IdentityFuncOp
    return spec


def without_mlp(spec: ModuleSpec) -> ModuleSpec:
    """`spec`, a layer that is only a mixer."""
    layer = spec.submodules
    layer.pre_mlp_layernorm = layer.mlp = IdentityOp
    layer.mlp_bda = IdentityFuncOp
    return spec
