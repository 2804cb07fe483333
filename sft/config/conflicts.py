"""Finds keys of norms, values, gates and MLPs that exclude each other; sft/config/model.py finds the other
conflicts."""

from collections.abc import Iterator
from typing import Any

MOST_EXPERTS_IN_ALL = 1_000_000  # experts of all layers: 23,424 in Kimi K2


def of_norms(model: Any) -> Iterator[tuple[str, str]]:
    """Yields (key, reason) of each conflict of norms.  model: the ModelConfig"""
    if model.qk_norm_across_heads and not model.qk_norm:
        yield "qk_norm_across_heads", "has no effect without qk_norm; use qk_norm = true"
    if model.qk_norm_across_heads and model.norm_zero_centered:
        yield "qk_norm_across_heads", "is not supported with norm_zero_centered; no released model has both"
    if not model.qk_norm_weights and (not model.qk_norm or model.qk_norm_across_heads):
        yield "qk_norm_weights", "needs qk_norm = true and qk_norm_across_heads = false"
    if model.qk_norm_after_rotary and (not model.qk_norm or model.qk_norm_across_heads):
        yield "qk_norm_after_rotary", "needs qk_norm = true and qk_norm_across_heads = false"
    if model.final_norm_zero_centered is not None and model.norm_placement != "both":
        yield "final_norm_zero_centered", "needs norm_placement = both; no other released model has it"
    if model.output_norm_epsilon is not None and model.norm_placement == "pre":
        yield "output_norm_epsilon", "has no effect with norm_placement = pre; use null"
    if model.embedding_norm and model.embedding_multiplier != 1.0:
        yield "embedding_norm", "is not supported with embedding_multiplier; no released model has both"


def of_values(model: Any) -> Iterator[tuple[str, str]]:
    """Yields (key, reason) of each conflict of gates, and of values whose width differs.  model: the ModelConfig"""
    if model.value_head_dim is not None and model.resolved_value_head_dim > model.resolved_head_dim:
        yield "value_head_dim", f"is more than the width of a key, {model.resolved_head_dim}; no kernel computes this"
    for name in ("value_head_dim", "value_multiplier", "attention_head_gate"):
        if name in model.changed and model.latent_attention.is_used:
            yield name, "is not supported with latent_attention, which has its own keys; use the default"
        elif name in model.changed and model.attention_output_gate:
            yield name, "is not supported with attention_output_gate: no released model has both"


def of_mlp(model: Any) -> Iterator[tuple[str, str]]:
    """Yields (key, reason) of each conflict of MLPs and experts.  model: the ModelConfig"""
    if model.moe.latent_size is not None and model.mlp_bias:
        yield "moe.latent_size", "is not supported with mlp_bias; use null"
    if model.num_layers * (model.moe.num_experts or 1) > MOST_EXPERTS_IN_ALL:
        yield "moe.num_experts", f"makes more than {MOST_EXPERTS_IN_ALL:,} experts in all layers"
    for name in ("activation_limit", "activation_alpha"):
        is_set, is_read = getattr(model, name) is not None, model.activation == "clamped_swiglu"
        if is_set and not is_read:
            yield name, f"has no effect with activation = {model.activation}; use null"
        elif is_read and not is_set:
            yield name, "is required with activation = clamped_swiglu (gpt-oss: limit 7, alpha 1.702)"
    for name, limits in {"swiglu_limits": model.swiglu_limits, "moe.swiglu_limits": model.moe.swiglu_limits}.items():
        if limits and model.activation != "swiglu":
            yield name, f"has no effect with activation = {model.activation}; use []"
        elif limits and len(limits) != model.num_layers:
            yield name, f"has {len(limits)} entries, but num_layers is {model.num_layers}; use one for each layer"
    if model.activation == "clamped_swiglu" and model.moe.shared_ffn_hidden_size is not None:
        yield "activation", "must be swiglu, geglu or relu2 with moe.shared_ffn_hidden_size"
