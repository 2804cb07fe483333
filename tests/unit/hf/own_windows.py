"""The config.json of Laguna, MiMo-V2-Flash, Step-3.7, ERNIE 4.5 and Hunyuan v1, by public descriptions of them."""

from typing import Any

FULL, WINDOW = "full_attention", "sliding_attention"
EVERY_FOURTH = [FULL, WINDOW, WINDOW, WINDOW]
YARN = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=64.0, beta_slow=1.0)
LAGUNA: dict[str, Any] = {
    **dict(model_type="laguna", num_hidden_layers=40, hidden_size=2048, intermediate_size=8192, vocab_size=100352),
    **dict(num_attention_heads=48, num_key_value_heads=8, head_dim=128, sliding_window=512, gating="per-head"),
    **dict(num_attention_heads_per_layer=[48, 64, 64, 64] * 10, layer_types=EVERY_FOURTH * 10),
    **dict(mlp_layer_types=["dense"] + ["sparse"] * 39, num_experts=256, num_experts_per_tok=8),
    **dict(moe_intermediate_size=512, shared_expert_intermediate_size=512, moe_routed_scaling_factor=2.5),
    "rope_parameters": {
        FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5, **YARN},
        WINDOW: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}
MIMO: dict[str, Any] = {  # with the keys of its authors' own code
    **dict(model_type="mimo_v2_flash", num_hidden_layers=48, hidden_size=4096, intermediate_size=16384),
    **dict(num_attention_heads=64, num_key_value_heads=4, head_dim=192, v_head_dim=128, vocab_size=152576),
    **dict(rope_theta=5000000, swa_rope_theta=10000, partial_rotary_factor=0.334, rope_scaling=None),
    **dict(hybrid_layer_pattern=[int(n > 1 and n % 6 > 0) for n in range(1, 49)], sliding_window_size=128),
    **dict(sliding_window=128, swa_num_key_value_heads=8, attention_value_scale=0.707, attention_bias=False),
    **dict(add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, n_routed_experts=256),
    **dict(moe_intermediate_size=2048, num_experts_per_tok=8, scoring_func="sigmoid", n_shared_experts=None),
    **dict(n_group=1, topk_group=1, topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=None),
}
STEP: dict[str, Any] = {  # lists have 3 entries more, for layers for multi-token prediction
    "model_type": "step3p7",
    "text_config": {
        **dict(num_hidden_layers=45, hidden_size=4096, intermediate_size=11264, vocab_size=128896, head_dim=128),
        **dict(num_attention_heads=64, num_attention_groups=8, sliding_window=512, num_nextn_predict_layers=3),
        **dict(attention_other_setting={"num_attention_heads": 96}, layer_types=EVERY_FOURTH * 12),
        **dict(moe_layers_enum=",".join(map(str, range(3, 45))), moe_num_experts=288, moe_top_k=8),
        **dict(moe_intermediate_size=1280, share_expert_dim=1280, moe_router_scaling_factor=3.0),
        **dict(rope_theta=[5e6, 1e4, 1e4, 1e4] * 12, partial_rotary_factors=[0.5, 1.0, 1.0, 1.0] * 12),
        **dict(swiglu_limits=[0.0] * 43 + [7.0] * 2 + [0.0] * 3, swiglu_limits_shared=[0.0] * 44 + [16.0] + [0.0] * 3),
        "rope_scaling": dict(rope_type="llama3", factor=2.0, original_max_position_embeddings=131072)
        | dict(low_freq_factor=1.0, high_freq_factor=32.0),
    },
}


ERNIE: dict[str, Any] = {
    **dict(model_type="ernie4_5_moe", num_hidden_layers=28, hidden_size=2560, intermediate_size=12288, moe_k=6),
    **dict(num_attention_heads=20, num_key_value_heads=4, vocab_size=103424, rope_theta=500000, use_bias=False),
    **dict(moe_num_experts=64, moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1),
    **dict(moe_layer_end_index=27, moe_layer_interval=1, tie_word_embeddings=True, rms_norm_eps=1e-5),
}
HUNYUAN: dict[str, Any] = {
    **dict(model_type="hunyuan_v1_moe", num_hidden_layers=32, hidden_size=4096, intermediate_size=3072),
    **dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=128167, num_experts=64, moe_topk=[8] * 32),
    **dict(head_dim=128, rope_theta=10000.0, tie_word_embeddings=True, attention_bias=False),
    "rope_scaling": dict(type="dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0),
}
