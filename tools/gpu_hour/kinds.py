"""Declares a small model with each kind of layer, as overrides of the recipe of curves.py.

Heads are as wide as in released models, because the width decides which kernel runs.
"""

from collections.abc import Mapping, Sequence

_EXPERTS = ("model.moe={num_experts: 8, top_k: 2, ffn_hidden_size: 64, aux_loss_coef: 0.01}", "model.init_std=0.1")
_WINDOWS = ("model.sliding_window=100", "model.sliding_window_layers=[1, 3]")

KINDS: Mapping[str, Sequence[str]] = {
    "windows": ("model.head_dim=128", *_WINDOWS),
    "gpt-oss": (
        *_EXPERTS,
        *_WINDOWS,
        *(f"model.{key}=true" for key in ("attention_sinks", "attention_output_bias", "mlp_bias", "moe.router_bias")),
        *("model.activation=clamped_swiglu", "model.activation_limit=7", "model.activation_alpha=1.702"),
        "model.qk_norm=false",
    ),
    "gemma-2": (
        *("model.head_dim=256", *_WINDOWS, "model.attention_softcap=50", "model.logits_softcap=30"),
        *("model.norm_placement=both", "model.norm_zero_centered=true", "model.activation=geglu"),
    ),
    "gemma-4": (
        *("model.head_dim=256", *_WINDOWS, "model.norm_placement=both", "model.activation=geglu"),
        *("model.full_attention={head_dim: 512, num_query_groups: 2, keys_as_values: true}", "model.value_norm=true"),
        *("model.rope={base: 1e6, window_base: 1e4, scaling: proportional, fraction: 0.25}", "model.logits_softcap=30"),
        *("model.layer_scalar=true", "model.attention_multiplier=0.0625"),
    ),
    "qwen-3.6": (
        *("model.head_dim=256", "model.linear_attention.layers=[1, 2, 3]", "model.attention_output_gate=true"),
        *("model.linear_attention.num_key_heads=4", "model.linear_attention.num_value_heads=8"),
        *("model.linear_attention.key_head_dim=128", "model.linear_attention.value_head_dim=128"),
        *("model.norm_zero_centered=true", "model.rope.fraction=0.25"),
    ),
    "kimi-linear": (
        *("model.linear_attention.layers=[1, 2, 3]", "model.linear_attention={decay: channel, low_rank: 64}"),
        *("model.linear_attention.num_key_heads=4", "model.linear_attention.num_value_heads=4"),
        *("model.linear_attention.gate=sigmoid", "model.qk_norm=false"),
    ),
    "nemotron-3": (
        "model.mamba={layers: [1, 3], num_heads: 8, num_groups: 2, head_dim: 64, state_dim: 128}",
        *("model.halves={without_mlp: [1, 3], without_mixer: [2]}", "model.activation=relu2", "model.qk_norm=false"),
    ),
    "latent": (
        *("model.latent_attention.kv_lora_rank=64", "model.latent_attention.q_lora_rank=96"),
        *("model.latent_attention.qk_nope_head_dim=128", "model.latent_attention.qk_rope_head_dim=64"),
        *("model.latent_attention.v_head_dim=128", "model.rope.interleaved=true", "model.head_dim=null"),
        *("model.num_query_groups=null", "model.qk_norm=false"),
    ),
    "experts": _EXPERTS,
    "adapters": (*_EXPERTS, "lora.rank=4"),
}
