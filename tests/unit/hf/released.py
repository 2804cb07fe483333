"""The config.json of released models: the files of fixtures/released, and the sizes of other models."""

from typing import Any

from tests.unit.fixtures.hf import released


def _sizes(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
    }


_GEMMA = {"head_dim": 256, "rope_theta": 10000.0}
_GEMMA2 = {**_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
SIZES: dict[str, dict[str, Any]] = {
    "granite_3_3_8b": {
        "model_type": "granite",
        **_sizes(40, 4096, 12800, 32, 8, 49159),
        **{"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0},
        **{"logits_scaling": 16.0, "residual_multiplier": 0.22},
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e7, "tie_word_embeddings": True},
    },
    "smollm3_3b": {
        "model_type": "smollm3",
        **_sizes(36, 2048, 11008, 16, 4, 128256),
        **{"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "rope_theta": 5e6},
        **{"use_sliding_window": False, "sliding_window": None},
    },
    "olmo2_7b": {  # OLMo-2-1124-7B
        "model_type": "olmo2",
        **_sizes(32, 4096, 11008, 32, 32, 100352),
        **{"rms_norm_eps": 1e-6, "rope_theta": 5e5},
    },
    "gemma_2b": {  # the released values
        "model_type": "gemma",
        **_sizes(18, 2048, 16384, 8, 1, 256000),
        **{**_GEMMA, "hidden_act": "gelu", "rms_norm_eps": 1e-6},
    },
    "cwm": {
        "model_type": "cwm",
        **_sizes(64, 6144, 21504, 48, 8, 128256),
        **{"head_dim": 128, "sliding_window": 8192, "rope_theta": 1e6},
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "ministral_8b": {  # Ministral-8B-Instruct-2410
        "model_type": "ministral",
        **_sizes(36, 4096, 12288, 32, 8, 131072),
        **{"head_dim": 128, "sliding_window": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e8},
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 9,
    },
    "gemma2_9b": {
        "model_type": "gemma2",
        **_sizes(42, 3584, 14336, 16, 8, 256000),
        **{**_GEMMA2, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    },
    "gemma2_27b": {
        "model_type": "gemma2",
        **_sizes(46, 4608, 36864, 32, 16, 256000),
        **{**_GEMMA2, "head_dim": 128, "query_pre_attn_scalar": 144},
        **{"hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    },
    "gemma3_1b": {
        "model_type": "gemma3_text",
        **_sizes(26, 1152, 6912, 4, 1, 262144),
        **{**_GEMMA2, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None},
        **{"sliding_window": 512, "sliding_window_pattern": 6},
    },
    "qwen1_5_moe_a2_7b": {
        "model_type": "qwen2_moe",
        **_sizes(24, 2048, 5632, 16, 16, 151936),
        **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False},
        **{"num_experts": 60, "num_experts_per_tok": 4},
        **{"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21},
    },
    "solar_open_100b": {
        "model_type": "solar_open",
        **_sizes(48, 4096, 10240, 64, 8, 196608),
        **{"head_dim": 128, "rms_norm_eps": 1e-5, "first_k_dense_replace": 0, "use_qk_norm": False},
        **{"moe_intermediate_size": 1280, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        **{"rope_theta": 1e6, "partial_rotary_factor": 1.0},
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
    },
    "hy3": {
        "model_type": "hy_v3",
        **_sizes(80, 4096, 13312, 64, 8, 120832),
        **{"head_dim": 128, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        **{"moe_intermediate_size": 1536, "num_experts": 192, "num_shared_experts": 1, "num_experts_per_tok": 8},
        **{"qk_norm": True, "route_norm": True, "router_scaling_factor": 2.826, "expert_hidden_dim": 1536},
        **{"moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True, "enable_moe_fp32_combine": False},
        "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    },
    "k_exaone": {  # K-EXAONE-236B-A23B
        "model_type": "exaone_moe",
        "architectures": ["ExaoneMoEForCausalLM"],
        **_sizes(48, 6144, 18432, 64, 8, 153600),
        **{"head_dim": 128, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "sliding_window": 128},
        **{"moe_intermediate_size": 2048, "num_experts": 128, "num_shared_experts": 1, "num_experts_per_tok": 8},
        **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        **{"rope_theta": 1e6, "sliding_window_pattern": "LLLG"},
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12,
        "mlp_layer_types": ["dense"] + ["sparse"] * 47,
    },
    "olmo_hybrid_7b": {
        "model_type": "olmo_hybrid",
        **_sizes(32, 3840, 11008, 30, 30, 100352),
        **{"linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_key_head_dim": 96},
        **{"linear_value_head_dim": 192, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
        **{"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    },
    "granite_4_h_small": {
        "model_type": "granitemoehybrid",
        **_sizes(40, 4096, 768, 32, 8, 100352),
        **{"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_head": 64, "mamba_d_conv": 4},
        **{"mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False},
        **{"num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536},
        **{"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
        **{"logits_scaling": 16.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        **{"position_embedding_type": "nope", "attention_bias": False},
        "layer_types": ["attention" if number % 10 == 5 else "mamba" for number in range(40)],
    },
}

VISION = (
    *("qwen2_5_vl_7b", "qwen3_vl_8b", "qwen3_vl_30b_a3b", "mistral_small_3_2", "ministral_3_8b", "gemma_3_27b"),
    *("muse_glimmer_30b", "mistral_small_4"),  # their values are the defaults of transformers
    *("kimi_k2_5", "exaone_4_5_33b"),
)


def config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a released model.  "gemma_3_27b text": only its language model; ... removes a key."""
    base, _, part = name.partition(" ")
    content = SIZES[base] if base in SIZES else released(base)
    content = {**(content["text_config"] if part else content), **changes}
    return {key: value for key, value in content.items() if value is not ...}


def with_text(content: dict[str, Any], **values: Any) -> dict[str, Any]:
    """The content with other keys of its language model."""
    text = {key: value for key, value in (content["text_config"] | values).items() if value is not ...}
    return content | {"text_config": text}
