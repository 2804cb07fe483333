"""Declares families whose layers compute something that layers of Llama, Qwen and Mixtral do not."""

from collections.abc import Mapping
from typing import Any

from sft.hf.families.rules import (
    BIAS_KEYS,
    DEFAULTS,
    EXPERT_KEYS,
    KEYS,
    LLAMA_DENSE,
    NO_BIAS,
    NO_BIAS_DEFAULTS,
    OPTIONS,
    QWEN_OPTIONS,
    attention,
    attention_output_bias,
    experts,
    interleaved_expert_biases,
    mlp,
    optional_biases,
    outer,
    output_norms,
    qk_norm,
    qkv_bias,
    shared_expert,
    sinks,
    stacked_experts,
)
from sft.hf.families.windows import ALL_LAYERS, all_but_every
from sft.hf.family import Family
from sft.hf.model_keys import Computed

_NO_ROPE, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"


def _skipped_layers(content: Mapping[str, Any]) -> list[int]:
    """The layers without rotary positions, counted from 1: "no_rope_layers": [1, 1, 0, 1] -> [3]

    If no_rope_layers is absent, these are the layers n, 2 n, ..., where n is no_rope_layer_interval, by default 4.
    """
    count, interval = content.get("num_hidden_layers"), content.get(_INTERVAL, 4)
    if type(count) is not int or type(interval) is not int or interval < 1:
        raise ValueError(f"{_INTERVAL} = {interval} and num_hidden_layers = {count} are not both positive integers")
    uses_rope = content.get(_NO_ROPE)
    if uses_rope is None:
        return list(range(interval, count + 1, interval))
    if not isinstance(uses_rope, list) or len(uses_rope) < count or any(flag not in (0, 1) for flag in uses_rope):
        raise ValueError(f"{_NO_ROPE} is not a list of {count} numbers 0 and 1, one for each layer")
    return [number for number, flag in enumerate(uses_rope[:count], 1) if not flag]


def _no_rope_layers(skipped: list[int], count: int) -> dict[str, Any]:
    return {_NO_ROPE: [int(number not in skipped) for number in range(1, count + 1)]}


_EXAONE_WINDOW = 4096  # the window if config.json has no sliding_window
_EXAONE_WINDOWS = all_but_every(4, "sliding_window_pattern", default=_EXAONE_WINDOW)


def _layers_without_rotation(content: Mapping[str, Any]) -> list[int]:
    """The layers of EXAONE 4 without rotary positions, counted from 1.

    If config.json has sliding_window, these are all layers without a window, even if no layer has one.  If
    sliding_window is null, the result is [].
    """
    if content.get("sliding_window", _EXAONE_WINDOW) is None:
        return []
    is_used = _EXAONE_WINDOWS["sliding_window"].read(content) is not None
    layers = _EXAONE_WINDOWS["sliding_window_layers"].read(content) if is_used else []
    count = content.get("num_hidden_layers")
    if type(count) is not int:
        raise ValueError(f"num_hidden_layers = {count} is not a number of layers")
    return [] if layers is None else [number for number in range(1, count + 1) if number not in layers]


def _window_of_no_layer(skipped: list[int], count: int) -> dict[str, Any]:
    """The keys of config.json that an export adds to layer_types if the layers `skipped` have no rotary positions.

    If no layer has positions, no layer has a window, but config.json must have sliding_window.
    """
    return {"sliding_window": _EXAONE_WINDOW} if len(skipped) == count else {}


# In EXAONE 4 and K-EXAONE, layers have a window and rotary positions, or neither.
EXAONE_LAYERS = {
    **_EXAONE_WINDOWS,
    "rope.skip_layers": Computed("layer_types", _layers_without_rotation, _window_of_no_layer),
}

VARIANTS = (
    Family(
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        rules=(*outer(), *attention(), *mlp(), *optional_biases()),
        implied=LLAMA_DENSE,
        keys={**KEYS, **BIAS_KEYS},
        computed={"rope.skip_layers": Computed(_NO_ROPE, _skipped_layers, _no_rope_layers)},
        defaults={
            **DEFAULTS,
            **NO_BIAS_DEFAULTS,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
        },
        options=QWEN_OPTIONS,
    ),
    Family(
        model_type="olmo2",
        class_name="Olmo2ForCausalLM",
        rules=(*outer(), *attention(norm=None), *mlp(norm=None), *output_norms(), *qk_norm(across_heads=True)),
        implied={**LLAMA_DENSE, "norm_placement": "post", "qk_norm": True, "qk_norm_across_heads": True},
        keys=KEYS,
        defaults={**DEFAULTS, "rms_norm_eps": 1e-5},
        options={**OPTIONS, **NO_BIAS},
    ),
    Family(
        model_type="olmo3",
        class_name="Olmo3ForCausalLM",
        rules=(*outer(), *attention(norm=None), *mlp(norm=None), *output_norms(), *qk_norm(across_heads=True)),
        implied={**LLAMA_DENSE, "norm_placement": "post", "qk_norm": True, "qk_norm_across_heads": True},
        keys=KEYS,
        computed=all_but_every(4),
        defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
        options={**OPTIONS, **NO_BIAS},
        rope_by_layer_type=True,
    ),
    Family(
        model_type="ministral3",
        class_name="Ministral3ForCausalLM",
        rules=(*outer(), *attention(), *mlp()),
        implied=LLAMA_DENSE,
        keys={**KEYS, **ALL_LAYERS},
        rope_keys={"llama_4_scaling_beta": "query_scale_beta"},
        defaults={
            **DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        options=OPTIONS,
    ),
    Family(
        model_type="qwen2_moe",
        class_name="Qwen2MoeForCausalLM",
        rules=(
            *outer(),
            *attention(),
            *qkv_bias(),
            *experts("mlp", "gate_proj", "up_proj", "down_proj"),
            *shared_expert(),
        ),
        implied={"qkv_bias": True, "qk_norm": False, "moe.shared_gate": True},
        keys={**KEYS, **EXPERT_KEYS, "moe.shared_ffn_hidden_size": "shared_expert_intermediate_size"},
        defaults={
            **DEFAULTS,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
        },
        options={**QWEN_OPTIONS, "qkv_bias": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    ),
    Family(
        model_type="exaone4",
        class_name="Exaone4ForCausalLM",
        rules=(*outer(), *attention(norm=None), *mlp(norm=None), *output_norms(), *qk_norm()),
        implied={**LLAMA_DENSE, "norm_placement": "post", "qk_norm": True},
        keys=KEYS,
        computed=EXAONE_LAYERS,
        defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 32},
        options=OPTIONS,
    ),
    Family(
        model_type="olmoe",
        class_name="OlmoeForCausalLM",
        rules=(
            *outer(),
            *attention(),
            *experts("mlp", "gate_proj", "up_proj", "down_proj"),
            *qk_norm(across_heads=True),
        ),
        implied={"qkv_bias": False, "qk_norm": True, "qk_norm_across_heads": True},
        keys={
            key: hf_key
            for key, hf_key in {**KEYS, **EXPERT_KEYS}.items()
            if key not in ("head_dim", "moe.ffn_hidden_size")
        },
        aliases={"num_experts": "num_local_experts"},
        defaults={
            **DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        options={**OPTIONS, **NO_BIAS, "clip_qkv": (None,), "head_dim": (None,)},
    ),
)

# Every second layer has a window.  The rules have the names and shapes that transformers saves.  Released files have
# experts in MXFP4, which mxfp4.py converts to these tensors.
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
            *interleaved_expert_biases(),
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
