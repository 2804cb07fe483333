"""Says which keys of values, gates and MLPs exclude each other; sft/config/model.py has the other conflicts."""

from collections.abc import Iterator
from typing import Any

MOST_EXPERTS_IN_ALL = 1_000_000  # experts of all layers: 23,424 in Kimi K2


def of_values(model: Any) -> Iterator[tuple[str, str]]:
    """The conflicts of values that differ from keys, and of gates.  model: the ModelConfig"""
    if model.value_head_dim is not None and model.resolved_value_head_dim > model.resolved_head_dim:
        yield "value_head_dim", f"is more than the width of a key, {model.resolved_head_dim}; no kernel computes this"
    for name in ("value_head_dim", "value_multiplier", "attention_head_gate"):
        if name in model.changed and model.latent_attention.is_used:
            yield name, "is not supported with latent_attention, which has its own keys; use the default"
        elif name in model.changed and model.attention_output_gate:
            yield name, "is not supported with attention_output_gate: no released model has both"


def of_mlp(model: Any) -> Iterator[tuple[str, str]]:
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
        yield "activation", "must be swiglu or geglu with moe.shared_ffn_hidden_size"
