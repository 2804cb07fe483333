"""gpt-oss: attention sinks, biases, windows in every second layer, and experts with gate and up interleaved.

The released files hold the experts in MXFP4 (mxfp4.py).  The tensors here are those that transformers saves.
"""

from sft.hf.families.rules import (
    DEFAULTS,
    KEYS,
    OPTIONS,
    attention,
    attention_output_bias,
    outer,
    qkv_bias,
    sinks,
    stacked_expert_biases,
    stacked_experts,
)
from sft.hf.families.windows import all_but_every
from sft.hf.family import Family

GPT_OSS = (
    Family(
        model_type="gpt_oss",
        class_name="GptOssForCausalLM",
        rules=(
            *outer(),
            *attention(),
            *qkv_bias(),
            *attention_output_bias(),
            *sinks(),
            *stacked_experts(router="router.weight", transposed=True, interleaved=True),
            *stacked_expert_biases(interleaved=True),
        ),
        implied={
            "qkv_bias": True,
            "qk_norm": False,
            "attention_output_bias": True,
            "attention_sinks": True,
            "mlp_bias": True,
            "activation": "clamped_swiglu",
            "moe.router_bias": True,
            "moe.normalize_top_k": True,
        },
        keys={
            **KEYS,
            "activation_limit": "swiglu_limit",
            "activation_alpha": "swiglu_alpha",
            "moe.num_experts": "num_local_experts",
            "moe.top_k": "num_experts_per_tok",
        },
        computed=all_but_every(2, default=128),
        aliases={"num_local_experts": "num_experts"},
        defaults={
            **DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        options={**OPTIONS, "attention_bias": (True,)},
    ),
)
