"""Families without experts."""

from sft.hf.families.rules import (
    DEFAULTS,
    KEYS,
    LLAMA_DENSE,
    NO_BIAS,
    OPTIONS,
    QWEN_OPTIONS,
    attention,
    mlp,
    outer,
    qk_norm,
    qkv_bias,
)
from sft.hf.family import LAYER, Family

DENSE = (
    Family(
        model_type="llama",
        class_name="LlamaForCausalLM",
        rules=(*outer(), *attention(), *mlp()),
        implied=LLAMA_DENSE,
        keys=KEYS,
        defaults=DEFAULTS,
        options={**OPTIONS, **NO_BIAS, "mlp_bias": (False,)},
        unread=(f"model.layers.{LAYER}.self_attn.rotary_emb.inv_freq",),  # in files of Llama 2
    ),
    Family(
        model_type="mistral",
        class_name="MistralForCausalLM",
        rules=(*outer(), *attention(), *mlp()),
        implied=LLAMA_DENSE,
        keys=KEYS,
        defaults={**DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        options={**OPTIONS, "sliding_window": (None,)},
    ),
    Family(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        rules=(*outer(), *attention(), *mlp(), *qkv_bias()),
        implied={**LLAMA_DENSE, "qkv_bias": True},
        keys=KEYS,
        defaults={**DEFAULTS, "num_key_value_heads": 32},
        options=QWEN_OPTIONS,
    ),
    Family(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        rules=(*outer(), *attention(), *mlp(), *qk_norm()),
        implied={**LLAMA_DENSE, "qk_norm": True},
        keys=KEYS,
        defaults={**DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
        options={**QWEN_OPTIONS, **NO_BIAS},
    ),
)
