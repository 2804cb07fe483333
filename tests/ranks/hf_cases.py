"""The models that test_hf_variants.py compares with transformers, and the layouts on which it does."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.unit.fixtures import hf

# Layouts of models without and with experts that `make test-all` runs, and further ones of models with four layers.
DENSE = "tp tp_whole cp pp dp_sharded cp4+selective pp_dp tp_whole_cp+full"
MIXTURE = "tp cp pp ep tp_ep cp_ep cp4+selective pp_dp tp_cp_ep2+full"
DEEP = " tp_virtual tp_pp+full"


@dataclass(frozen=True)
class Case:
    """A model, given by arguments of `hf.save` or `vision.save`, and the layouts on which it is compared, separated by
    spaces.

    layouts: beside one process; more: further layouts, which only `make test-all` runs
    """

    model: dict[str, Any]
    layouts: str = ""
    more: str = DENSE


LINEAR_SEED = 8  # seed of models with linear attention, see `hf.LINEAR`
# With two stages, and with four virtual stages, each stage begins with another kind of layer.
FOUR_LAYERS = dict(num_hidden_layers=4, no_rope_layers=[1, 0, 0, 1])
FOUR_KINDS = dict(
    num_hidden_layers=4, layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
)
ORIGINAL = 64  # context before scaling; samples of 200 tokens are longer


def rope(kind: str, theta: float, **more: float) -> dict[str, Any]:
    original = {} if kind == "linear" else {"original_max_position_embeddings": ORIGINAL}
    return dict(rope_parameters={"rope_type": kind, "rope_theta": theta, **original, **more})


# A family whose rules are those of another family, and a language model of a checkpoint with a vision tower, have no
# layouts of their own in CI: their weights are divided by code that a case above or below covers.
CASES: dict[str, Case] = {
    "llama": Case(dict(family="llama", rms_norm_eps=1e-5), "cp"),
    "llama all heads": Case(dict(family="llama", num_key_value_heads=8, tied=True), "tp_whole", "cp pp"),
    "llama_biased": Case(dict(family="llama", attention_bias=True, mlp_bias=True), "tp_whole_cp+full"),
    "mistral": Case(dict(family="mistral")),
    "qwen2": Case(dict(family="qwen2"), "cp"),
    "qwen3 tied": Case(dict(family="qwen3", tied=True), "tp_whole"),
    # The settings of the models that Qwen released.
    "qwen3 moe": Case(dict(family="qwen3_moe", norm_topk_prob=True), "cp_ep", MIXTURE),
    "qwen3 moe, weights of the softmax": Case(dict(family="qwen3_moe", tied=True), "", MIXTURE),
    "mixtral": Case(dict(family="mixtral"), "tp_ep", MIXTURE),
    "seed oss": Case(dict(family="seed_oss")),
    "phi 4": Case(dict(family="phi3", rms_norm_eps=1e-5), "cp"),
    "linear positions": Case(dict(family="llama", **rope("linear", 1e4, factor=4.0))),
    "llama3 positions": Case(
        dict(family="llama", **rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0))
    ),
    "yarn": Case(dict(family="qwen2", **rope("yarn", 1e6, factor=4.0))),
    "yarn with everything set": Case(
        dict(family="llama", **rope("yarn", 1e4, factor=4.0, beta_fast=8.0, beta_slow=0.5, attention_factor=1.3)),
        "tp_whole",
    ),
    "granite": Case(dict(family="granite"), "tp_cp+selective"),
    "granite_tied": Case(dict(family="granite", tied=True), "pp", "tp"),
    "arcee": Case(
        dict(family="arcee", attention_bias=True, mlp_bias=True),
        "tp_whole_cp+full",
        f"{DENSE} tp_cp+selective tp_tiles",
    ),
    "smollm3": Case(dict(family="smollm3", tied=True, **FOUR_LAYERS), "pp", DENSE + DEEP),
    "smollm3_yarn": Case(
        dict(family="smollm3", **rope("yarn", 1e4, factor=4.0), **FOUR_LAYERS), "tp_virtual", DENSE + DEEP
    ),
    # Windows shorter and longer than documents and chunks; each of two stages has layers of both kinds.
    "qwen2_windows": Case(dict(family="qwen2", use_sliding_window=True, sliding_window=11, max_window_layers=1)),
    "qwen3_windows": Case(
        dict(family="qwen3", use_sliding_window=True, sliding_window=60, **FOUR_KINDS),
        "cp tp_cp+selective",
        DENSE + DEEP,
    ),
    "qwen3_moe_windows": Case(
        dict(family="qwen3_moe", use_sliding_window=True, sliding_window=11, norm_topk_prob=True),
        "tp_cp_ep+selective",
        MIXTURE,
    ),
    "exaone4": Case(dict(family="exaone4"), "tp"),
    "exaone4_windows": Case(dict(family="exaone4", sliding_window=11, **FOUR_KINDS), "tp_cp+selective", DENSE + DEEP),
    # The config names a window, but no layer has one; then no layer has rotary positions.
    "exaone4_unrotated": Case(dict(family="exaone4", sliding_window=11, layer_types=["full_attention"] * 2), more="cp"),
    "olmo2": Case(dict(family="olmo2"), "tp tp_cp+selective", f"{DENSE} tp_tiles"),
    "olmo3": Case(dict(family="olmo3", **FOUR_KINDS), "tp_cp+selective", DENSE + DEEP),
    "gemma": Case(dict(family="gemma", tied=True), "tp_cp+selective"),
    "cwm": Case(dict(family="cwm")),
    "ministral": Case(dict(family="ministral", **FOUR_KINDS)),
    "gemma2": Case(
        dict(family="gemma2", tied=True, num_hidden_layers=4),
        "tp_virtual cp4+selective",
        f"{DENSE + DEEP} tp_tiles cp_dp tp_dp",
    ),
    "gemma3": Case(
        dict(family="gemma3_text", tied=True, **FOUR_KINDS),
        "tp_cp+selective",
        f"{DENSE + DEEP} tp_tiles cp_dp tp_dp",
    ),
    "gemma4": Case(
        dict(family="gemma4_text", tied=True, **FOUR_KINDS), "tp_cp+selective", f"{DENSE + DEEP} tp_tiles cp_dp tp_dp"
    ),
    "gemma4_experts": Case(
        dict(family="gemma4_text", **FOUR_KINDS, **hf.GEMMA4_MIXTURE), "tp_cp_ep+selective", MIXTURE + DEEP
    ),
    "gemma4_unified_text": Case(dict(family="gemma4_unified_text", tied=True, **FOUR_KINDS), "", "tp_cp+selective"),
    "ministral3": Case(dict(family="ministral3"), "tp_cp+selective"),
    "qwen2_moe": Case(dict(family="qwen2_moe"), "tp_cp_ep+selective", MIXTURE),
    "qwen2_moe_normalised": Case(dict(family="qwen2_moe", norm_topk_prob=True, tied=True), "ep", "cp_ep"),
    "olmoe": Case(dict(family="olmoe"), "tp_ep", MIXTURE),
    "granitemoe": Case(dict(family="granitemoe", tied=True), "ep", MIXTURE),
    "gpt_oss": Case(dict(family="gpt_oss", **FOUR_KINDS), "tp_cp_ep+selective", MIXTURE + DEEP),
    # With two stages, one has a layer without experts.
    "glm4_moe": Case(dict(family="glm4_moe", num_hidden_layers=4), "tp_cp_ep+selective", MIXTURE + DEEP),
    # With two stages, one has a dense layer; a scaled embedding; layers without a window have no positions.
    "afmoe": Case(dict(family="afmoe", **FOUR_KINDS), "tp_cp_ep+selective", MIXTURE + DEEP),
    # With seed 5, gradients of the norms of heads in transformers in fp32 differ by 1.5e-5 from its float64 gradients.
    "laguna": Case(
        dict(family="laguna", seed=7, num_attention_heads_per_layer=[4, 8, 8, 4], **FOUR_KINDS),
        "tp_cp_ep+selective",
        MIXTURE + DEEP,
    ),
    "mimo": Case(dict(family="mimo_v2_flash", **FOUR_KINDS), "tp_cp_ep2+selective", MIXTURE + DEEP),
    "ernie": Case(dict(family="ernie4_5"), "tp_cp+selective"),
    "ernie_moe": Case(dict(family="ernie4_5_moe", tied=True), "tp_cp_ep+selective", MIXTURE),
    "hunyuan": Case(dict(family="hunyuan_v1_dense"), "tp_cp+selective"),
    "hunyuan_moe": Case(dict(family="hunyuan_v1_moe"), "cp_ep+selective", MIXTURE),
    "minimax_m2": Case(dict(family="minimax_m2"), "tp_cp_ep+selective", MIXTURE),
    "solar_open": Case(dict(family="solar_open"), "tp_cp_ep+selective", MIXTURE),
    "hy_v3": Case(dict(family="hy_v3", num_hidden_layers=4), "tp_virtual", MIXTURE + DEEP),
    # The layers of the two kinds of attention are not those of the two kinds of MLP.
    "exaone_moe": Case(
        dict(family="exaone_moe", mlp_layer_types=["dense"] * 2 + ["sparse"] * 2, **FOUR_KINDS),
        "tp_cp_ep+selective",
        MIXTURE + DEEP,
    ),
    "dots1": Case(dict(family="dots1", **FOUR_KINDS), "tp_cp_ep+selective", MIXTURE + DEEP),
    "granite_swa": Case(dict(family="granite_swa", tied=True), "tp_cp+selective"),
    "granitemoe_swa": Case(
        dict(family="granitemoe_swa", layer_rope_theta=[0, 1e4, 0, 1e4], **FOUR_KINDS), "tp_virtual", MIXTURE + DEEP
    ),
    "granitemoehybrid": Case(
        dict(family="granitemoehybrid", time_step_limit=(0.01, 0.3)), "tp_cp_ep2+selective", MIXTURE
    ),
    # No experts, and attention with rotary positions.
    "granite_hybrid_dense": Case(
        dict(family="granitemoehybrid", tied=True, num_local_experts=0, position_embedding_type="rope"), "pp"
    ),
    "nemotron_h": Case(
        dict(family="nemotron_h"), "tp_cp_ep+selective pp", f"{MIXTURE + DEEP} cp_ep+full tp_dp cp_dp dp_sharded"
    ),
    # Layers of both kinds; keys and values have unequal widths, and each key head has two value heads.
    "qwen3_5_text": Case(
        dict(family="qwen3_5_text", seed=LINEAR_SEED),
        "cp4+selective tp_virtual+selective",
        "tp_whole+full dp+selective pp tp_cp",
    ),
    "qwen3_next": Case(dict(family="qwen3_next", seed=LINEAR_SEED), "tp_cp_ep2+selective", MIXTURE + DEEP),
    "qwen3_5_moe_text": Case(dict(family="qwen3_5_moe_text", seed=LINEAR_SEED), "pp", MIXTURE + DEEP),
    # Beta reaches 2; layers with and without linear attention have norms at other places.
    "olmo_hybrid": Case(
        dict(family="olmo_hybrid", seed=3), "tp_cp", "tp_virtual+selective tp_whole+full dp+selective pp cp4+selective"
    ),
    "olmo_hybrid, no positions": Case(
        dict(family="olmo_hybrid", seed=3, rope_parameters=dict(rope_type="default", rope_theta=None)), "", "cp"
    ),
    "deepseek": Case(
        dict(family="deepseek_v3"),
        "cp+selective tp_cp_ep tp_pp+selective",
        f"{MIXTURE} one+selective dp_sharded tp4 cp_dp tp_dp",
    ),
    # With an epsilon of 1e-6, the norm after the delta rule magnifies rounding: in fp32, gradients of transformers then
    # differ from its float64 gradients by 2e-5, with this one by 3e-6.
    "kimi_linear": Case(
        dict(family="kimi_linear", seed=LINEAR_SEED, rms_norm_eps=1e-3),
        "tp_cp_ep2+selective",
        f"{MIXTURE + DEEP} cp+full dp_sharded",
    ),
    "ling": Case(dict(family="bailing_hybrid", seed=7, rms_norm_eps=1e-3), "tp_virtual", f"{MIXTURE + DEEP} cp+full"),
    "moonlight": Case(
        dict(
            family="deepseek_v3",
            q_lora_rank=None,
            rms_norm_eps=1e-2,
            n_group=1,
            topk_group=1,
            rope_parameters=dict(rope_type="default", rope_theta=5e4),
        ),
        "one+selective tp_ep pp_cp+full",
        f"{MIXTURE} dp_sharded tp4 cp_dp",
    ),
    "kimi_k2": Case(dict(family="kimi_k2"), "", "tp_cp_ep+selective"),
    "flash": Case(dict(family="glm4_moe_lite"), "", MIXTURE),
    "mistral4": Case(dict(family="mistral4"), "tp_cp_ep pp_cp+full", f"{MIXTURE} dp_sharded tp_dp"),
    # A latent has 84 elements; keys and values of a rank have 136 elements with tp 1, and 68 with tp 2.
    "wide": Case(
        dict(family="deepseek_v3", kv_lora_rank=80, rope_interleave=False, first_k_dense_replace=0),
        "tp_cp+full",
        "cp+selective tp tp_dp tp_pp+selective",
    ),
    # Language models in a checkpoint with a vision tower, on text.
    "qwen2_vl": Case(dict(family="qwen2_vl with flat keys")),
    "qwen2_5_vl, flat": Case(dict(family="qwen2_5_vl with flat keys"), "", "tp_whole"),
    "qwen2_5_vl": Case(dict(family="qwen2_5_vl")),
    "qwen3_vl": Case(dict(family="qwen3_vl"), "tp"),
    "qwen3_vl_moe, released": Case(dict(family="qwen3_vl_moe as released"), "tp_ep", MIXTURE),
    "qwen3_vl_moe": Case(dict(family="qwen3_vl_moe"), "cp_ep", ""),
    "mistral3": Case(dict(family="mistral3", tied=True)),
    "mistral3/ministral3": Case(dict(family="mistral3/ministral3")),
    "mistral3/mistral4": Case(dict(family="mistral3/mistral4"), "", "cp_ep"),
    "gemma3_vision": Case(dict(family="gemma3", tied=True)),
    "gemma4_vision": Case(dict(family="gemma4", tied=True), "ep", MIXTURE),
    "gemma4_unified": Case(dict(family="gemma4_unified")),
    "qwen3_5_vision": Case(dict(family="qwen3_5", seed=3)),
    "qwen3_5_moe_vision": Case(dict(family="qwen3_5_moe"), "", "ep"),
    "exaone4_5": Case(dict(family="exaone4_5")),
    "kimi_k25": Case(dict(family="kimi_k25"), "", MIXTURE),
    "muse_glimmer": Case(
        dict(family="muse_glimmer"), "tp_cp+selective tp_virtual", f"{DENSE + DEEP} tp_tiles cp_dp tp_dp"
    ),
    "step": Case(dict(family="step3p7"), "tp_cp_ep+selective", MIXTURE + DEEP),
    "step3p5": Case(dict(family="step3p5"), "", "tp_cp_ep+selective"),
}


def pairs() -> list[Any]:
    """(name, layout) of all cases; layouts of `more` are marked `grid`."""
    return [
        pytest.param(name, layout, marks=pytest.mark.grid if layout in further else ())
        for name, case in CASES.items()
        for quick, further in [(["one", *case.layouts.split()], {*case.more.split()} - {*case.layouts.split()})]
        for layout in [*quick, *(layout for layout in case.more.split() if layout in further)]
    ]
