"""Families whose layers have experts."""

from sft.hf.families.rules import (
    DEFAULTS,
    EXPERT_KEYS,
    KEYS,
    NO_BIAS,
    OPTIONS,
    attention,
    experts,
    outer,
    qk_norm,
)
from sft.hf.families.windows import ALL_LAYERS, in_all_layers
from sft.hf.family import Family

EXPERTS = (
    Family(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        rules=(*outer(), *attention(), *experts("mlp", "gate_proj", "up_proj", "down_proj"), *qk_norm()),
        implied={"qkv_bias": False, "qk_norm": True},
        keys={**KEYS, **EXPERT_KEYS},
        computed=in_all_layers(),
        aliases={"num_experts": "num_local_experts"},  # the name that transformers 5 writes
        defaults={
            **DEFAULTS,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        options={**OPTIONS, **NO_BIAS, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    ),
    Family(
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        rules=(*outer(), *attention(), *experts("block_sparse_moe", "w1", "w3", "w2")),
        implied={"qkv_bias": False, "qk_norm": False, "moe.normalize_top_k": True},
        keys={**KEYS, **ALL_LAYERS, "moe.num_experts": "num_local_experts", "moe.top_k": "num_experts_per_tok"},
        aliases={"num_local_experts": "num_experts"},
        defaults={
            **DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        options={**OPTIONS, "router_jitter_noise": (0.0,)},
    ),
)
