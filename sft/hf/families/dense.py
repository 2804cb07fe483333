"""Families without experts."""

from sft.hf.families.rules import (
    BIAS_KEYS,
    DEFAULTS,
    KEYS,
    LLAMA_DENSE,
    NO_BIAS,
    NO_BIAS_DEFAULTS,
    OPTIONS,
    attention,
    joint_attention,
    joint_mlp,
    mlp,
    optional_biases,
    outer,
    qk_norm,
    qkv_bias,
)
from sft.hf.families.windows import ALL_LAYERS, all_but_every, from_a_layer_on, in_all_layers
from sft.hf.family import Family

DENSE = (
    Family(
        model_type="llama",
        class_name="LlamaForCausalLM",
        rules=(*outer(), *attention(), *mlp(), *optional_biases()),
        implied=LLAMA_DENSE,
        keys={**KEYS, **BIAS_KEYS},
        defaults={**DEFAULTS, **NO_BIAS_DEFAULTS},
        options=OPTIONS,
        passed_through=("model.layers.*.self_attn.rotary_emb.inv_freq",),  # in files of Llama 2
    ),
    Family(
        model_type="mistral",
        class_name="MistralForCausalLM",
        rules=(*outer(), *attention(), *mlp()),
        implied=LLAMA_DENSE,
        keys={**KEYS, **ALL_LAYERS},
        defaults={**DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        options=OPTIONS,
    ),
    Family(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        rules=(*outer(), *attention(), *mlp(), *qkv_bias()),
        implied={**LLAMA_DENSE, "qkv_bias": True},
        keys=KEYS,
        computed=from_a_layer_on(),
        defaults={**DEFAULTS, "num_key_value_heads": 32},
        options=OPTIONS,
    ),
    Family(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        rules=(*outer(), *attention(), *mlp(), *qk_norm()),
        implied={**LLAMA_DENSE, "qk_norm": True},
        keys=KEYS,
        computed=from_a_layer_on(),
        defaults={**DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
        options={**OPTIONS, **NO_BIAS},
    ),
    Family(
        model_type="seed_oss",
        class_name="SeedOssForCausalLM",
        rules=(*outer(), *attention(), *mlp(), *qkv_bias()),
        implied={**LLAMA_DENSE, "qkv_bias": True},
        keys=KEYS,
        defaults={**DEFAULTS, "num_key_value_heads": 8, "head_dim": 128},
        options={
            **OPTIONS,
            "attention_bias": (True,),
            "attention_out_bias": (False,),
            "mlp_bias": (False,),
            # The released value, 0.1, matters only to training in transformers.  This trainer has no dropout.
            "attention_dropout": (0.1, 0.0),
            "residual_dropout": (0.1, 0.0),
        },
    ),
    Family(
        model_type="phi3",  # Phi-4, too
        class_name="Phi3ForCausalLM",
        rules=(*outer(), *joint_attention(), *joint_mlp()),
        implied=LLAMA_DENSE,
        keys={**KEYS, **ALL_LAYERS},
        defaults={**DEFAULTS, "rms_norm_eps": 1e-5},
        options={**OPTIONS, **NO_BIAS, "resid_pdrop": (0.0,), "embd_pdrop": (0.0,)},
        scalings=("none",),  # transformers reads yarn as longrope, and knows no other kind
    ),
    Family(
        model_type="ministral",
        class_name="MinistralForCausalLM",
        rules=(*outer(), *attention(), *mlp()),
        implied=LLAMA_DENSE,
        keys=KEYS,
        computed=in_all_layers(switch=None),
        defaults={**DEFAULTS, "num_key_value_heads": 8},
        options={**OPTIONS, **NO_BIAS},
    ),
    Family(
        model_type="cwm",
        class_name="CwmForCausalLM",
        rules=(*outer(), *attention(), *mlp()),
        implied=LLAMA_DENSE,
        keys=KEYS,
        computed=all_but_every(4, default=8192, first_is_full=True),
        defaults={
            **DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1e6,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        options={**OPTIONS, **NO_BIAS, "mlp_bias": (False,)},
    ),
)
