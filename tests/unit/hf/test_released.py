"""Released models: the recipe values of their config.json, their numbers of parameters, and the config.json of an
export."""

import math
from operator import attrgetter
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import transformers
from pytest import approx

from sft.config import MoeConfig, RopeConfig
from sft.config.full_attention import FullAttentionConfig
from sft.config.latent_attention import LatentAttentionConfig
from sft.hf.architecture import architecture
from sft.layers.flops import active_parameters, num_parameters
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import back, model_of, refusal
from tests.unit.hf.released import SIZES, VISION, config, with_text

SIGMOID: dict[str, Any] = dict(score_function="sigmoid", correction_bias=True, top_k=8)
LATENT_YARN: dict[str, Any] = dict(scaling="yarn", original_max_position=4096, mscale_all_dim=1.0, attention_factor=1.0)
CWM_ROPE = RopeConfig(base=1e6, scaling="llama3", factor=16.0, original_max_position=8192)
CWM_WINDOWS = [number for number in range(1, 65) if number % 4 != 1]
VALUES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (config("phi_4"), {
        **dict(num_layers=40, hidden_size=5120, ffn_hidden_size=17920, num_attention_heads=40, vocab_size=100352),
        **dict(resolved_query_groups=10, resolved_head_dim=128, rope=RopeConfig(base=250000.0)),
        **dict(tie_embeddings=False, qkv_bias=False),
    }),
    (config("seed_oss_36b"), {  # all heads together are wider than the hidden state
        **dict(num_layers=64, hidden_size=5120, num_attention_heads=80, resolved_head_dim=128),
        **dict(resolved_query_groups=8, qkv_bias=True, rope=RopeConfig(base=1e7)),
    }),
    (config("gemma_3_27b"), {  # every sixth layer has full attention, whose positions are scaled by 8
        **dict(num_layers=62, hidden_size=5376, ffn_hidden_size=21504, vocab_size=262208, num_attention_heads=32),
        **dict(resolved_query_groups=16, resolved_head_dim=128, qk_norm=True, tie_embeddings=True, norm_epsilon=1e-6),
        **dict(rope=RopeConfig(base=1e6, scaling="linear", factor=8.0, window_base=1e4), sliding_window=1024),
        **dict(sliding_window_layers=[number for number in range(1, 63) if number % 6]),
        **dict(norm_placement="both", norm_zero_centered=True, activation="geglu", round_embedding_multiplier=True),
        **dict(embedding_multiplier=approx(73.3212111), attention_multiplier=approx(1 / math.sqrt(168))),
        **dict(attention_softcap=None, logits_softcap=None),
    }),
    # every sixth layer has 4 key heads of 512, whose keys are also values; the other layers have 16 of 256
    (config("gemma_4_31b"), {
        **dict(num_layers=60, hidden_size=5376, ffn_hidden_size=21504, vocab_size=262144, sliding_window=1024),
        "full_attention": FullAttentionConfig(head_dim=512, num_query_groups=4, keys_as_values=True),
        "rope": RopeConfig(base=1e6, scaling="proportional", fraction=0.25, window_base=1e4),
        "sliding_window_layers": [number for number in range(1, 61) if number % 6],
        **dict(qk_norm=True, value_norm=True, layer_scalar=True, attention_multiplier=1.0, logits_softcap=30.0),
        **dict(norm_placement="both", norm_zero_centered=False, activation="geglu", tie_embeddings=True),
        "moe.num_experts": None,
    }),
    (config("gemma_4_26b_a4b text"), {
        **{"moe.num_experts": 128, "moe.top_k": 8, "moe.ffn_hidden_size": 704, "moe.shared_ffn_hidden_size": 2112},
        **{"moe.own_norms": True, "moe.normalize_top_k": True, "ffn_hidden_size": 2112},
    }),
    (config("deepseek_v3"), {
        "latent_attention": LatentAttentionConfig(kv_lora_rank=512, q_lora_rank=1536),
        **dict(resolved_head_dim=192, resolved_value_head_dim=128, rotary_dim=64, num_query_groups=128),
        "rope": RopeConfig(base=1e4, interleaved=True, factor=40, **LATENT_YARN),
        "moe": MoeConfig(
            num_experts=256, num_groups=8, top_groups=4, ffn_hidden_size=2048, shared_ffn_hidden_size=2048,
            dense_layers=3, scaling_factor=2.5, **SIGMOID,
        ),
    }),
    (config("kimi_k2"), {  # its YaRN has no ramp
        "rope": RopeConfig(base=5e4, interleaved=True, factor=64, beta_fast=1.0, beta_slow=1.0, **LATENT_YARN),
        **{"moe.num_experts": 384, "moe.num_groups": 1, "moe.scaling_factor": 2.827},
    }),
    (config("kimi_k2_5"), {
        "rope": RopeConfig(base=5e4, interleaved=True, factor=64, beta_fast=32.0, beta_slow=1.0, **LATENT_YARN),
        **{"moe.num_experts": 384, "moe.scaling_factor": 2.827, "num_layers": 61, "tie_embeddings": False},
    }),
    (config("moonlight_16b_a3b"), {  # queries have no latent; two shared experts are stored as one of twice the width
        "latent_attention": LatentAttentionConfig(kv_lora_rank=512),
        "rope": RopeConfig(base=5e4, interleaved=True),
        **{"moe.shared_ffn_hidden_size": 2816, "moe.dense_layers": 1, "moe.top_k": 6},
    }),
    (config("mistral_small_4"), {
        "latent_attention": LatentAttentionConfig(
            kv_lora_rank=256, q_lora_rank=1024, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128
        ),
        "moe": MoeConfig(num_experts=128, top_k=4, ffn_hidden_size=2048, shared_ffn_hidden_size=2048),
        **{"rope.factor": 128.0, "rope.query_scale_beta": 0.1, "rope.mscale_all_dim": 1.0, "stacks_layers": True},
    }),
    (config("glm_4_7_flash"), {
        "latent_attention": LatentAttentionConfig(
            kv_lora_rank=512, q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256
        ),
        **{"moe.dense_layers": 1, "moe.num_experts": 64, "moe.scaling_factor": 1.8},
    }),
    (config("glm_4_5_air"), {
        "moe": MoeConfig(
            num_experts=128, ffn_hidden_size=1408, shared_ffn_hidden_size=1408, dense_layers=1, **SIGMOID
        ),
        **{"qkv_bias": True, "attention_output_bias": False, "qk_norm": False, "stacks_layers": False},
        **{"rope.base": 1e6, "rotary_dim": 64, "ffn_hidden_size": 10944},
    }),
    (config("glm_4_6"), {  # GLM-4.5 and 4.7 have the same sizes
        "moe": MoeConfig(
            num_experts=160, ffn_hidden_size=1536, shared_ffn_hidden_size=1536, dense_layers=3, scaling_factor=2.5,
            **SIGMOID,
        ),
        **{"qkv_bias": True, "qk_norm": True, "rope.base": 1e6, "rotary_dim": 64},
    }),
    (config("minimax_m2"), {  # half of each head is rotated; the file gives it as a number of elements
        "moe": MoeConfig(num_experts=256, **SIGMOID),
        **dict(rotary_dim=64, qk_norm_across_heads=True, resolved_expert_ffn=1536),
    }),
    (config("solar_open_100b"), {
        "moe": MoeConfig(num_experts=128, ffn_hidden_size=1280, shared_ffn_hidden_size=1280, **SIGMOID),
        **{"qkv_bias": False, "attention_output_bias": False, "qk_norm": False, "rotary_dim": 128},
        "rope": RopeConfig(base=1e6, scaling="yarn", factor=2.0, original_max_position=65536),
    }),
    (config("hy3"), {  # its block for multi-token prediction is passed through
        "moe": MoeConfig(
            num_experts=192, ffn_hidden_size=1536, shared_ffn_hidden_size=1536, dense_layers=1, scaling_factor=2.826,
            **SIGMOID,
        ),
        **{"qk_norm": True, "qkv_bias": False, "rope": RopeConfig(base=11158840.0), "tie_embeddings": False},
    }),
    (config("k_exaone"), {  # layers without a window have no rotary positions
        "moe": MoeConfig(
            num_experts=128, ffn_hidden_size=2048, shared_ffn_hidden_size=2048, dense_layers=1, scaling_factor=2.5,
            **SIGMOID,
        ),
        **dict(sliding_window=128, sliding_window_layers=[number for number in range(1, 49) if number % 4]),
        **dict(rope=RopeConfig(base=1e6, skip_layers=[number for number in range(4, 49, 4)]), norm_placement="pre"),
    }),
    (config("k_exaone", mlp_layer_types=..., first_k_dense_replace=2), {"moe.dense_layers": 2}),
    (config("exaone_4_5_33b"), {
        **dict(num_layers=64, hidden_size=5120, norm_placement="post", qk_norm=True, sliding_window=4096),
        **{"rope.skip_layers": list(range(4, 65, 4)), "rope.scaling": "llama3", "tie_embeddings": False},
    }),
    (config("qwen2_5_vl_7b"), {  # all keys are at the top level; text has plain positions
        **dict(num_layers=28, hidden_size=3584, ffn_hidden_size=18944, vocab_size=152064, num_attention_heads=28),
        **dict(resolved_query_groups=4, resolved_head_dim=128, qkv_bias=True, qk_norm=False, norm_epsilon=1e-6),
        "rope": RopeConfig(base=1e6),
    }),
    (config("qwen3_vl_8b"), {
        **dict(num_layers=36, hidden_size=4096, ffn_hidden_size=12288, vocab_size=151936),
        **dict(qk_norm=True, qkv_bias=False, rope=RopeConfig(base=5e6)),
    }),
    (config("qwen3_vl_30b_a3b"), {
        "moe": MoeConfig(num_experts=128, top_k=8, ffn_hidden_size=768, normalize_top_k=True),
        **{"num_layers": 48, "resolved_query_groups": 4, "rope.base": 5e6},
    }),
    (config("mistral_small_3_2"), {
        **dict(num_layers=40, hidden_size=5120, ffn_hidden_size=32768, vocab_size=131072),
        **{"resolved_head_dim": 128, "rope.base": 1e9, "tie_embeddings": False},
    }),
    (config("ministral_3_8b"), {
        **dict(num_layers=34, hidden_size=4096, ffn_hidden_size=14336, vocab_size=131072),
        **{"rope.scaling": "yarn", "rope.factor": 16.0, "rope.query_scale_beta": 0.1},
    }),
    (config("muse_glimmer_30b"), {  # every fourth layer has neither window nor positions
        **dict(num_layers=52, hidden_size=6656, resolved_query_groups=2, resolved_head_dim=128, sliding_window=2048),
        **dict(sliding_window_layers=[number for number in range(1, 53) if number % 4], logits_softcap=20.0),
        "rope": RopeConfig(base=1e4, skip_layers=list(range(4, 53, 4))),
        **dict(qk_norm=True, qk_norm_weights=False, embedding_norm=True, attention_output_gate=True),
        **dict(norm_placement="both", norm_zero_centered=True, final_norm_zero_centered=False),
        **dict(norm_epsilon=1e-5, output_norm_epsilon=1e-8, logits_scaling=approx(26**0.5)),
        "attention_multiplier": approx(3.87 / 128**0.5),
    }),
    (config("granite_3_3_8b"), {
        **dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0078125),
        "logits_scaling": 16.0,
    }),
    (config("smollm3_3b"), {"rope": RopeConfig(base=5e6, skip_layers=[4, 8, 12, 16, 20, 24, 28, 32, 36])}),
    (config("olmo2_7b"), dict(norm_placement="post", qk_norm=True, qk_norm_across_heads=True)),
    (config("gemma_2b"), {
        **dict(norm_placement="pre", norm_zero_centered=True, activation="geglu"),
        **dict(embedding_multiplier=2048**0.5, round_embedding_multiplier=True),
    }),
    (config("cwm"), dict(sliding_window=8192, sliding_window_layers=CWM_WINDOWS, rope=CWM_ROPE)),
    (config("cwm", rope_theta=..., rope_scaling=..., sliding_window=...),  # the defaults of transformers
     dict(sliding_window=8192, sliding_window_layers=CWM_WINDOWS, rope=CWM_ROPE)),
    (config("ministral_8b"),
     dict(sliding_window=32768, sliding_window_layers=[number for number in range(1, 37) if number % 4 != 1])),
    (config("ministral_8b", layer_types=...), dict(sliding_window=32768, sliding_window_layers=None)),
    (config("gemma2_9b"), dict(attention_softcap=50.0, logits_softcap=30.0, sliding_window=4096, qk_norm=False)),
    (config("gemma2_9b", attn_logit_softcapping=..., final_logit_softcapping=..., sliding_window=...), {
        **dict(attention_softcap=50.0, logits_softcap=30.0, sliding_window=4096, rope=RopeConfig(base=1e4)),
        **dict(sliding_window_layers=list(range(1, 42, 2))),
    }),
    (config("gemma2_9b", attn_logit_softcapping=None, final_logit_softcapping=None),
     dict(attention_softcap=None, logits_softcap=None)),
    (config("qwen1_5_moe_a2_7b"), {
        "moe": MoeConfig(
            num_experts=60, top_k=4, ffn_hidden_size=1408, normalize_top_k=False, shared_ffn_hidden_size=5632,
            shared_gate=True,
        ),
        **dict(qkv_bias=True, qk_norm=False),
    }),
]  # fmt: skip


@pytest.mark.parametrize("content,values", VALUES, ids=lambda value: value.get("model_type", ""))
def test_what_a_config_means(content: dict[str, Any], values: dict[str, Any]) -> None:
    model = model_of(content)
    assert {key: attrgetter(key)(model) for key in values} == values


@pytest.mark.parametrize(
    "name,key,source",
    [
        ("gemma_3_27b", "attention_multiplier", "text_config.query_pre_attn_scalar"),
        ("granite_3_3_8b", "logits_scaling", "logits_scaling"),
        ("smollm3_3b", "rope.skip_layers", "no_rope_layers"),
        ("qwen2_5_vl_7b", "num_layers", "num_hidden_layers"),
        ("qwen3_vl_8b", "num_layers", "text_config.num_hidden_layers"),
        ("qwen3_vl_8b", "tie_embeddings", "tie_word_embeddings"),
        ("qwen3_vl_8b", "rope.base", "text_config.rope_theta"),
        ("ministral_3_8b", "rope.factor", "text_config.rope_parameters"),
    ],
)
def test_the_key_that_gives_a_value(name: str, key: str, source: str) -> None:
    assert architecture(config(name), "config.json").sources[key] == source


# All parameters, and those that one token uses: exact, or about the numbers in the models' names (A12B).
PARAMETERS: dict[str, tuple[Any, Any]] = {
    "gpt_oss_20b": (20_914_757_184, 20_914_757_184 - 24 * 28 * (3 * 2880 * 2880 + 3 * 2880)),  # 4 of 32 experts
    "gemma_4_31b text": (30_697_345_280, ANY),
    "gemma_4_26b_a4b text": (25_233_141_760, 3_822_530_560),
    "deepseek_v3": (approx(671.0e9, rel=0.01), approx(37.6e9, rel=0.03)),
    "kimi_k2": (approx(1.026e12, rel=0.01), approx(32.9e9, rel=0.03)),
    "moonlight_16b_a3b": (approx(15.96e9, rel=0.01), approx(2.9e9, rel=0.03)),
    "glm_4_7_flash": (approx(29.9e9, rel=0.01), approx(3.9e9, rel=0.03)),
    "mistral_small_4 text": (118_972_826_624, 6_632_588_288),
    "glm_4_5_air": (ANY, approx(12e9, rel=0.12)),
    "glm_4_6": (ANY, approx(32e9, rel=0.12)),
    "minimax_m2": (ANY, approx(10e9, rel=0.12)),
    **dict.fromkeys((*SIZES, "ministral_3_8b text"), (ANY, ANY)),
    "solar_open_100b": (approx(102.6e9, rel=0.01), approx(12e9, rel=0.03)),
    "hy3": (approx(295e9, rel=0.01), approx(21e9, rel=0.03)),
    "k_exaone": (approx(236e9, rel=0.01), approx(23e9, rel=0.05)),
    "granite_4_h_small": (approx(32.2e9, rel=0.01), approx(9e9, rel=0.05)),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_in_transformers(name: str) -> None:
    content = config(name, quantization_config=..., auto_map=..., architectures=...)
    family = {"kimi_k2": "deepseek_v3"}.get(name, content.pop("model_type"))  # transformers has no type of this name
    found = architecture(config(name), "config.json")
    with torch.device("meta"):
        theirs = getattr(transformers, f"{hf.FAMILIES[family]}ForCausalLM")(hf.config_class(family)(**content))
    theirs.tie_weights()
    total = num_parameters(found.model, found.vocab_size)
    assert total == theirs.num_parameters()
    assert (total, active_parameters(found.model, found.vocab_size)) == PARAMETERS[name]


def test_parameters_of_a_language_model_that_transformers_has_only_with_a_tower() -> None:
    """The number is that of transformers, without the 1,921,845,760 parameters of tower, adapter and projection."""
    model = model_of(config("muse_glimmer_30b"))
    assert num_parameters(model, 202_048) == active_parameters(model, 202_048) == 27_854_780_928


WRITTEN_BACK = [*SIZES, *VISION, "phi_4", "seed_oss_36b", "ministral_3_8b text", "gemma_4_26b_a4b text", "gpt_oss_20b"]
WRITTEN_BACK += ["deepseek_v3", "kimi_k2", "moonlight_16b_a3b", "glm_4_7_flash", "glm_4_5_air", "glm_4_6", "minimax_m2"]


@pytest.mark.parametrize("name", WRITTEN_BACK)
def test_what_has_not_changed_is_written_as_it_was(name: str) -> None:
    content = config(name, quantization_config=...)
    names_dtype = {"dtype", "torch_dtype"} & {*content, *content.get("text_config", {})}
    assert back(content, dtype="bfloat16" if names_dtype else "float32") == content


# --- refusals ----------------------------------------------------------------------------------------------

QWEN3_MOE, GEMMA4 = "qwen3_30b_a3b", "gemma_4_26b_a4b text"
FULL, ROPE = "full_attention", config(GEMMA4)["rope_parameters"]
MINISTRAL_ROPE = config("ministral_3_8b text")["rope_parameters"]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama_3_1_8b", {"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported, only "silu" or "swish"'),
    ("llama_3_1_8b", {"quantization_config": {"bits": 4}}, "quantization_config has quant_method = null, which is not"),
    ("llama_3_1_8b", {"auto_map": {"AutoModel": "own.Code"}}, "auto_map"),
    ("llama_3_1_8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ("llama_3_1_8b", {"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM is supported"),
    ("llama_3_1_8b", {"num_hidden_layers": ...}, "num_hidden_layers is missing"),
    ("llama_3_1_8b", {"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5 (num_layers)"),
    ("llama_3_1_8b", {"num_key_value_heads": 5}, "num_key_value_heads = 5 (num_query_groups) does not divide 32 heads"),
    ("llama_3_1_8b", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama_3_1_8b", {"rope_scaling": {"type": "mrope"}}, 'rope_type = "mrope" is not supported'),
    ("llama_3_1_8b", {"rope_scaling": MINISTRAL_ROPE}, "llama_4_scaling_beta = 0.1 is not supported with rope_type ="),
    (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported, only 1"),
    (QWEN3_MOE, {"mlp_only_layers": [0, 3]}, "mlp_only_layers = [0, 3] is not supported, only [] or null"),
    (QWEN3_MOE, {"norm_topk_prob": None}, "norm_topk_prob is missing"),
    (QWEN3_MOE, {"num_experts": 0}, "num_experts = 0 (moe.num_experts)"),
    (QWEN3_MOE, {"num_experts": None}, "num_experts is missing"),
    (QWEN3_MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok = 129 (moe.top_k) is more than num_experts = 128"),
    (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ("mixtral_8x7b", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported, only 0.0"),
    ("mixtral_8x7b", {"num_local_experts": 1}, "num_experts_per_tok = 2 (moe.top_k) is more than num_experts = 1"),
    ("gpt_oss_20b", {"attention_bias": False}, "attention_bias = false is not supported, only true"),
    ("gpt_oss_20b", {"swiglu_limit": 0.0}, "swiglu_limit = 0.0 (activation_limit)"),
    ("gpt_oss_20b", {"num_experts": 16}, "num_local_experts = 32 and num_experts = 16 are two names of one setting"),
    ("gpt_oss_20b", {"quantization_config": {"quant_method": "mxfp4", "group_size": 16}},
     "group_size = 16 is not supported"),
    ("phi_4", {"rope_scaling": {"type": "longrope"}}, 'rope_type = "longrope" is not supported'),
    ("phi_4", {"rope_scaling": {"type": "su"}}, 'rope_type = "su" is not supported'),
    ("phi_4", {"rope_scaling": {"type": "yarn", "factor": 4.0}},
     'rope_type = "yarn", but transformers computes a phi3 model only with none'),
    ("phi_4", {"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75 is not supported"),
    ("phi_4", {"resid_pdrop": 0.1}, "resid_pdrop = 0.1 is not supported, only 0.0"),
    ("seed_oss_36b", {"attention_out_bias": True}, "attention_out_bias = true is not supported, only false"),
    ("seed_oss_36b", {"attention_bias": False}, "attention_bias = false is not supported, only true"),
    ("seed_oss_36b", {"mlp_bias": True}, "mlp_bias = true is not supported, only false"),
    ("olmo2_7b", {"model_type": "olmoe", "clip_qkv": 8}, "clip_qkv = 8 is not supported"),
    ("olmo2_7b", {"attention_bias": True}, "attention_bias = true is not supported"),
    ("gemma3_1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention = true is not supported"),
    ("gemma3_1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
    ("gemma3_1b", {"hidden_activation": "gelu"}, 'hidden_activation = "gelu" is not supported'),
    ("gemma3_1b", {"attention_bias": True}, "attention_bias = true is not supported"),
    ("gemma3_1b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 is not a number above 0"),
    ("gemma3_1b", {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    (GEMMA4, {"hidden_size_per_layer_input": 256}, "256, an embedding for each layer (E2B, E4B), is not supported"),
    (GEMMA4, {"hidden_size_per_layer_input": ...}, "256 (the default of transformers), an embedding for each layer"),
    (GEMMA4, {"num_kv_shared_layers": 20}, "20, layers with the keys of other layers (E2B, E4B), is not supported"),
    (GEMMA4, {"use_double_wide_mlp": True}, "use_double_wide_mlp = true is not supported"),
    (GEMMA4, {"use_bidirectional_attention": "all"}, 'use_bidirectional_attention = "all" is not supported'),
    (GEMMA4, {"attention_bias": True}, "attention_bias = true is not supported"),
    (GEMMA4, {"num_experts": None}, "num_experts is missing, but enable_moe_block = true"),
    (GEMMA4, {"layer_types": ["sliding_attention"] * 30}, "layer_types ends with sliding_attention"),
    (GEMMA4, {"rope_parameters": ROPE | {FULL: {"rope_type": "linear", "factor": 4.0}}}, "only with proportional"),
    (GEMMA4, {"rope_parameters": ROPE | {FULL: ROPE[FULL] | {"factor": 8.0}}}, "factor = 8.0"),
    ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func = "softmax" is not supported'),
    ("deepseek_v3", {"topk_method": "greedy"}, 'topk_method = "greedy" is not supported'),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias = true is not supported"),
    ("deepseek_v3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
    ("glm_4_5_air", {"n_shared_experts": 0}, "n_shared_experts = 0 with moe_intermediate_size = 1408 is no shared"),
    ("glm_4_5_air", {"n_group": 3}, "num_groups) does not cut 128 experts into groups of two or more"),
    ("glm_4_5_air", {"first_k_dense_replace": 46}, "leaves no layer of 46 for experts"),
    ("solar_open_100b", {"first_k_dense_replace": 1}, "first_k_dense_replace = 1 is not supported, only 0"),
    ("hy3", {"route_norm": False}, "route_norm = false is not supported, only true"),
    ("hy3", {"mlp_bias": True}, "mlp_bias = true is not supported"),
    ("k_exaone", {"mlp_layer_types": ["sparse"] + ["dense"] * 47}, "is not a list of dense layers and then"),
    ("k_exaone", {"mlp_layer_types": None, "first_k_dense_replace": None}, "first_k_dense_replace = None is not a"),
    ("k_exaone", {"layer_types": None}, "sliding_window_pattern = LLLG is not supported without layer_types"),
    ("k_exaone", {"architectures": 5}, "architectures = 5, but only ExaoneMoeForCausalLM is supported"),
    ("minimax_m2", {"scoring_func": "softmax"}, 'scoring_func = "softmax" is not supported'),
    ("granite_3_3_8b", {"attention_multiplier": None}, "attention_multiplier is missing"),
    ("granite_3_3_8b", {"logits_scaling": 0.0}, "logits_scaling = 0.0 (logits_scaling) input should be greater than 0"),
    ("smollm3_3b", {"no_rope_layers": [1, 0]}, "no_rope_layers is not a list of 36 numbers 0 and 1"),
    ("smollm3_3b", {"no_rope_layers": [2] * 36}, "no_rope_layers is not a list of 36 numbers 0 and 1"),
    ("smollm3_3b", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
    ("smollm3_3b", {"use_sliding_window": True}, "use_sliding_window = true is not supported"),
    ("ministral_3_8b text", {"rope_parameters": MINISTRAL_ROPE | {"llama_4_scaling_beta": None}},
     "llama_4_scaling_beta is missing from rope_parameters"),
    ("ministral_3_8b text", {"rope_parameters": MINISTRAL_ROPE | {"mscale_all_dim": None}}, "mscale = 1.0 is not supp"),
    ("qwen1_5_moe_a2_7b", {"qkv_bias": False}, "qkv_bias = false is not supported, only true"),
    ("qwen1_5_moe_a2_7b", {"mlp_only_layers": [0]}, "mlp_only_layers = [0] is not supported"),
    ("qwen1_5_moe_a2_7b", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
    ("qwen3_vl_8b", {"text_config": ...}, "num_hidden_layers is missing"),
    ("qwen3_vl_8b", {"architectures": ["Qwen3VLModel"]}, "only Qwen3VLForConditionalGeneration is supported"),
    ("mistral_small_3_2", {"text_config": {"model_type": "qwen3"}}, 'model_type = "mistral3"'),
    ("mistral_small_3_2", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("mistral_small_3_2", with_text(config("mistral_small_3_2"), rope_scaling={"mrope_section": [2, 1, 1]}),
     "mrope_section = [2, 1, 1] is not supported"),
    ("qwen2_5_vl_7b", {"use_sliding_window": True}, "use_sliding_window = true is not supported"),
    ("qwen2_5_vl_7b", {"head_dim": 64}, "head_dim = 64 is not supported"),
    ("qwen3_vl_30b_a3b", with_text(config("qwen3_vl_30b_a3b"), norm_topk_prob=False),
     "norm_topk_prob = false is not supported"),
]  # fmt: skip


@pytest.mark.parametrize("name,changes,why", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_refused(name: str, changes: dict[str, Any], why: str) -> None:
    assert why in refusal(config(name, **changes))
