"""The table of families: one `Family` for each supported `model_type`.

Shared rules come first, then the families.  `family.py` explains the letters of a shape.
"""

from typing import Any

from sft.hf.family import EXPERT, LAYER, Family, Rule

_OURS, _THEIRS = "decoder.layers", f"model.layers.{LAYER}"
_OUTER = (
    Rule("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "v h"),), "vocabulary"),
    Rule("decoder.final_layernorm.weight", (("model.norm.weight", "h"),)),
    Rule("output_layer.weight", (("lm_head.weight", "v h"),), "vocabulary", is_head=True),
)
_ATTENTION = (
    Rule(f"{_OURS}.self_attention.linear_qkv.layer_norm_weight", ((f"{_THEIRS}.input_layernorm.weight", "h"),)),
    Rule(
        f"{_OURS}.self_attention.linear_qkv.weight",
        (
            (f"{_THEIRS}.self_attn.q_proj.weight", "q h"),
            (f"{_THEIRS}.self_attn.k_proj.weight", "k h"),
            (f"{_THEIRS}.self_attn.v_proj.weight", "k h"),
        ),
        "groups",
    ),
    Rule(f"{_OURS}.self_attention.linear_proj.weight", ((f"{_THEIRS}.self_attn.o_proj.weight", "h q"),)),
)
_MLP = (
    Rule(f"{_OURS}.mlp.linear_fc1.layer_norm_weight", ((f"{_THEIRS}.post_attention_layernorm.weight", "h"),)),
    Rule(
        f"{_OURS}.mlp.linear_fc1.weight",
        ((f"{_THEIRS}.mlp.gate_proj.weight", "f h"), (f"{_THEIRS}.mlp.up_proj.weight", "f h")),
    ),
    Rule(f"{_OURS}.mlp.linear_fc2.weight", ((f"{_THEIRS}.mlp.down_proj.weight", "h f"),)),
)
_QKV_BIAS = Rule(
    f"{_OURS}.self_attention.linear_qkv.bias",
    (
        (f"{_THEIRS}.self_attn.q_proj.bias", "q"),
        (f"{_THEIRS}.self_attn.k_proj.bias", "k"),
        (f"{_THEIRS}.self_attn.v_proj.bias", "k"),
    ),
    "groups",
)
_QK_NORM = (
    Rule(f"{_OURS}.self_attention.q_layernorm.weight", ((f"{_THEIRS}.self_attn.q_norm.weight", "d"),)),
    Rule(f"{_OURS}.self_attention.k_layernorm.weight", ((f"{_THEIRS}.self_attn.k_norm.weight", "d"),)),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The rules of a mixture of experts, which replace `_MLP`.

    block: name of the module that contains router and experts; gate, up, down: names of an expert's matrices
    """
    router, expert = f"{_THEIRS}.{block}.gate.weight", f"{_THEIRS}.{block}.experts.{EXPERT}"
    return (
        Rule(f"{_OURS}.pre_mlp_layernorm.weight", ((f"{_THEIRS}.post_attention_layernorm.weight", "h"),)),
        Rule(f"{_OURS}.mlp.router.weight", ((router, "x h"),)),
        Rule(
            f"{_OURS}.mlp.experts.experts.linear_fc1.weight",
            ((f"{expert}.{gate}.weight", "e h"), (f"{expert}.{up}.weight", "e h")),
        ),
        Rule(f"{_OURS}.mlp.experts.experts.linear_fc2.weight", ((f"{expert}.{down}.weight", "h e"),)),
    )


_DENSE: dict[str, Any] = {"qkv_bias": False, "qk_norm": False, "moe.num_experts": None}
_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
# Options of all families.  The first value is transformers' default for a key that config.json omits.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0, None),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
    "auto_map": (None,),  # the repository contains its own model code
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
}
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}  # true adds a bias to the output projection, too
_QWEN: dict[str, tuple[Any, ...]] = {**_OPTIONS, "use_sliding_window": (False,)}
_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}

_ALL = (
    Family(
        model_type="llama",
        class_name="LlamaForCausalLM",
        rules=(*_OUTER, *_ATTENTION, *_MLP),
        implied=_DENSE,
        keys=_KEYS,
        defaults=_DEFAULTS,
        options={**_OPTIONS, **_NO_BIAS, "mlp_bias": (False,)},
        unread=(f"{_THEIRS}.self_attn.rotary_emb.inv_freq",),  # in files of Llama 2
    ),
    Family(
        model_type="mistral",
        class_name="MistralForCausalLM",
        rules=(*_OUTER, *_ATTENTION, *_MLP),
        implied=_DENSE,
        keys=_KEYS,
        defaults={**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        options={**_OPTIONS, "sliding_window": (None,)},
    ),
    Family(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        rules=(*_OUTER, *_ATTENTION, *_MLP, _QKV_BIAS),
        implied={**_DENSE, "qkv_bias": True},
        keys=_KEYS,
        defaults={**_DEFAULTS, "num_key_value_heads": 32},
        options=_QWEN,
    ),
    Family(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        rules=(*_OUTER, *_ATTENTION, *_MLP, *_QK_NORM),
        implied={**_DENSE, "qk_norm": True},
        keys=_KEYS,
        defaults={**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
        options={**_QWEN, **_NO_BIAS},
    ),
    Family(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        rules=(*_OUTER, *_ATTENTION, *_experts("mlp", "gate_proj", "up_proj", "down_proj"), *_QK_NORM),
        implied={"qkv_bias": False, "qk_norm": True},
        keys={
            **_KEYS,
            "moe.num_experts": "num_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.ffn_hidden_size": "moe_intermediate_size",
            "moe.normalize_top_k": "norm_topk_prob",
        },
        aliases={"num_experts": "num_local_experts"},  # the name that transformers 5 writes
        defaults={
            **_DEFAULTS,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        options={**_QWEN, **_NO_BIAS, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    ),
    Family(
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        rules=(*_OUTER, *_ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2")),
        implied={"qkv_bias": False, "qk_norm": False, "moe.normalize_top_k": True},
        keys={**_KEYS, "moe.num_experts": "num_local_experts", "moe.top_k": "num_experts_per_tok"},
        aliases={"num_local_experts": "num_experts"},
        defaults={
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        options={**_OPTIONS, "sliding_window": (None,), "router_jitter_noise": (0.0,)},
    ),
)
FAMILIES = {family.model_type: family for family in _ALL}
