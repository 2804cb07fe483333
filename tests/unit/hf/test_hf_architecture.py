"""config.json <-> `model.*`, with configs that transformers writes and reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sft.config import MoeConfig, RopeConfig
from sft.config.full_attention import FullAttentionConfig
from sft.config.latent_attention import LatentAttentionConfig
from sft.config.linear_attention import LinearAttentionConfig
from sft.errors import ConfigError
from sft.hf.architecture import architecture, write_back
from sft.hf.families import FAMILIES
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import back, llama, mixtral, model_of, qwen3_moe, refusal


def saved(folder: Path, family: str, **fields: Any) -> dict[str, Any]:
    """The config.json that transformers writes for this family."""
    hf.config_class(family)(**fields).save_pretrained(folder)
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


LIKE_LLAMA = {
    "norm_placement": "pre",
    "norm_zero_centered": False,
    "qk_norm_across_heads": False,
    **{"qk_norm_weights": True, "embedding_norm": False, "final_norm_zero_centered": None, "output_norm_epsilon": None},
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "moe.shared_ffn_hidden_size": None,
    "moe.shared_gate": False,
    "moe.own_norms": False,
    **{"value_norm": False, "layer_scalar": False, "full_attention.keys_as_values": False},
    **dict.fromkeys(("full_attention.head_dim", "full_attention.num_query_groups")),
    **{"moe.score_function": "softmax", "moe.scaling_factor": 1.0, "moe.num_groups": 1, "moe.top_groups": 1},
    **{"moe.correction_bias": False, "moe.dense_layers": 0},
    **{"full_attention.num_attention_heads": None, "full_attention.sinks": True, "value_head_dim": None},
    **{"value_multiplier": 1.0, "attention_head_gate": None, "qk_norm_after_rotary": False},
    **{"swiglu_limits": [], "moe.swiglu_limits": [], "rope.window_fraction": None},
    "rope.skip_layers": [],
    **dict.fromkeys(("sliding_window", "sliding_window_layers", "attention_softcap")),
    "activation": "swiglu",
    "round_embedding_multiplier": False,
    **dict.fromkeys(("activation_limit", "activation_alpha", "logits_softcap")),
    "rope.fraction": 1.0,
    "attention_output_gate": False,
    **{"linear_attention.layers": [], "mamba.layers": [], "halves.without_mixer": [], "halves.without_mlp": []},
    **{"moe.layers": None, "moe.latent_size": None},
    **{"linear_attention.layers": [], "linear_attention.beta_factor": 1.0},
    **{"linear_attention.norm_epsilon": None, "linear_attention.norm_placement": None},
    **dict.fromkeys(("attention_sinks", "attention_output_bias", "mlp_bias", "moe.router_bias"), False),
    "rope.query_scale_beta": None,
    "rope.window_base": None,
    **{"rope.interleaved": False, "rope.mscale_all_dim": None, "latent_attention.kv_lora_rank": None},
}


def test_llama_3_1_as_released() -> None:
    found = architecture(llama(), "config.json")
    assert found.family.model_type == "llama"
    assert found.values == {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "norm_epsilon": 1e-05,
        "tie_embeddings": False,
        "qkv_bias": False,
        "qk_norm": False,
        "moe.num_experts": None,
        **LIKE_LLAMA,
        "rope.base": 500000.0,
        "rope.scaling": "llama3",
        "rope.factor": 8.0,
        "rope.low_freq_factor": 1.0,
        "rope.high_freq_factor": 4.0,
        "rope.original_max_position": 8192,
    }
    assert found.sources["ffn_hidden_size"] == "intermediate_size"
    assert found.sources["rope.base"] == "rope_theta" and found.sources["rope.factor"] == "rope_scaling"


ROPE_OF = {
    "ministral3": RopeConfig(
        base=1e6,
        scaling="yarn",
        factor=16.0,
        original_max_position=16384,
        attention_factor=1.0,  # mscale and mscale_all_dim are equal
        query_scale_beta=0.1,
    ),
    "cwm": RopeConfig(base=1e6, scaling="llama3", factor=16.0, original_max_position=8192),
    "gpt_oss": RopeConfig(base=150000.0, scaling="yarn", factor=32.0, original_max_position=4096, truncate=False),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), RopeConfig(base=5e5, interleaved=True)),
    "laguna": RopeConfig(base=5e5, fraction=0.5, window_base=1e4, window_fraction=1.0),
    "mimo_v2_flash": RopeConfig(base=5e6, fraction=0.334, window_base=1e4),
    **dict.fromkeys(hf.LATENT_FAMILIES, RopeConfig(base=1e4, interleaved=True)),
    "kimi_linear": RopeConfig(base=1e4),
    "bailing_hybrid": RopeConfig(base=6e6, interleaved=True),
    "mistral4": RopeConfig(
        base=1e4,
        interleaved=True,
        scaling="yarn",
        factor=128.0,
        original_max_position=8192,
        attention_factor=1.0,
        mscale_all_dim=1.0,
        query_scale_beta=0.1,
    ),
}
# Layers with a window; None: all layers.  The last layer of Gemma 4 has no window.
WINDOWS_OF = {"cwm": [2], "gpt_oss": [1], "gemma2": [1], "olmo3": None, "gemma3_text": None, "gemma4_text": [1]}
WINDOWS_OF |= {"gemma4_unified_text": [1], "afmoe": None, "laguna": [1], "mimo_v2_flash": [2]}
WINDOWS_OF |= {"granite_swa": [2], "granitemoe_swa": [2]}


@pytest.mark.parametrize("family", [family for family in hf.FAMILIES if family != "nemotron_h"])
def test_what_a_silent_config_means_is_what_transformers_takes(tmp_path: Path, family: str) -> None:
    """The file has only sizes; all other values are the defaults of the family's config class in transformers."""
    silent = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=32, vocab_size=100)
    silent |= dict(sliding_window=None) if family == "mistral" else {}
    silent |= dict(sliding_window=None, layer_types=["full_attention"] * 2) if family == "exaone4" else {}
    silent |= dict(no_rope_layer_interval=2) if family == "smollm3" else {}
    silent |= dict(first_k_dense_replace=1) if family in ("deepseek_v3", "bailing_hybrid") else {}
    silent |= dict(hidden_size_per_layer_input=0) if family == "gemma4_text" else {}
    silent |= dict(layer_types=["sliding_attention", "full_attention"]) if family == "laguna" else {}
    silent |= dict(num_experts=4, moe_topk=2) if family == "hunyuan_v1_moe" else {}  # one expert would need no router
    silent |= dict(n_routed_experts=4, num_experts_per_tok=2) if family == "dots1" else {}  # no defaults
    silent |= dict(num_attention_heads=16) if family == "glm4_moe" else {}  # so that half of a head has an even width
    theirs = hf.config_class(family)(**silent)
    model = architecture({**silent, "model_type": family}, "config.json").model
    if family in hf.LATENT_FAMILIES:
        sizes = LatentAttentionConfig.model_fields.keys() - {"norm_epsilon", "head_gate"}
        sizes -= set() if hasattr(theirs, "q_lora_rank") else {"q_lora_rank"}
        assert {name: getattr(model.latent_attention, name) for name in sizes} == {n: getattr(theirs, n) for n in sizes}
        assert (model.resolved_head_dim, model.resolved_value_head_dim) == (theirs.qk_head_dim, theirs.v_head_dim)
    else:
        first = theirs.per_layer_config[0] if family.startswith("gemma4") else theirs  # a layer with a window
        doubled = 2 if family == "mimo_v2_flash" else 1  # the key heads of layers with a window
        assert model.resolved_query_groups == doubled * first.num_key_value_heads
        assert model.resolved_head_dim == (getattr(first, "head_dim", None) or 64 // silent["num_attention_heads"])
    assert model.norm_epsilon == theirs.rms_norm_eps
    assert model.tie_embeddings is theirs.tie_word_embeddings
    if family in ROPE_OF:
        assert model.rope == ROPE_OF[family]
    elif "full_attention" in theirs.rope_parameters:
        bases = {kind: group["rope_theta"] for kind, group in theirs.rope_parameters.items()}
        assert bases == {"full_attention": model.rope.base, "sliding_attention": model.rope.window_base}
    else:
        skipped = [2] if family == "smollm3" else []
        fraction = theirs.rope_parameters.get("partial_rotary_factor", 1.0)
        base = theirs.rope_parameters["rope_theta"]
        assert model.rope == RopeConfig(base=base, fraction=fraction, skip_layers=skipped)
    if family in WINDOWS_OF:
        assert (model.sliding_window, model.sliding_window_layers) == (theirs.sliding_window, WINDOWS_OF[family])
    if family == "olmo_hybrid":  # one of two layers has full attention
        assert model.linear_attention == LinearAttentionConfig(
            layers=[1], num_key_heads=32, num_value_heads=32, key_head_dim=1, value_head_dim=2, beta_factor=2.0
        ).model_copy(update=dict(norm_epsilon=1e-5, norm_placement="pre"))
        assert (theirs.linear_key_head_dim, theirs.linear_value_head_dim) == (1, 2)
    elif family in hf.LINEAR_FAMILIES:
        assert model.linear_attention == LinearAttentionConfig(layers=[1, 2], num_key_heads=16, num_value_heads=32)
    if family == "gemma2":
        assert (model.attention_softcap, model.logits_softcap) == (50.0, 30.0)
        assert theirs.attn_logit_softcapping == 50.0 and theirs.final_logit_softcapping == 30.0
    assert model.moe.num_experts == getattr(theirs, "num_experts", getattr(theirs, "num_local_experts", None))
    assert model.moe.top_k == getattr(theirs, "num_experts_per_tok", None)
    if family == "qwen3_moe":
        assert model.resolved_expert_ffn == theirs.moe_intermediate_size == 768
        assert model.moe.normalize_top_k is theirs.norm_topk_prob is False
    if family == "granite":
        assert (model.attention_multiplier, model.logits_scaling) == (theirs.attention_multiplier, 1.0) == (1.0, 1.0)
    if family == "qwen2_moe":
        assert (model.resolved_expert_ffn, model.moe.shared_ffn_hidden_size, model.qkv_bias) == (1408, 5632, True)
        assert model.moe.shared_gate and model.moe.normalize_top_k is theirs.norm_topk_prob is False
    if family == "mimo_v2_flash":
        assert (model.value_head_dim, model.value_multiplier) == (theirs.v_head_dim, theirs.attention_value_scale)
        full = FullAttentionConfig(num_query_groups=4, sinks=False)
        assert model.full_attention == full and theirs.num_key_value_heads == 4
    if family == "mixtral":
        assert model.resolved_expert_ffn == theirs.intermediate_size == 96
        assert model.moe.normalize_top_k and model.rope.base == 1e6 and model.norm_epsilon == 1e-5


# --- refusals ----------------------------------------------------------------------------------------------


def test_everything_wrong_is_told_at_once() -> None:
    told = refusal(llama(hidden_act="gelu", attention_dropout=0.5, vocab_size=..., rope_scaling={"type": "dynamic"}))
    assert told.startswith("1 of 4: config.json: hidden_act")
    for name in ("attention_dropout = 0.5", "vocab_size is missing", 'rope_type = "dynamic"'):
        assert name in told


def test_an_unknown_model_type_is_told_with_the_known_ones() -> None:
    assert refusal(llama(model_type="xlnet")) == (
        f'config.json: model_type = "xlnet" is not supported.  Supported: {", ".join(FAMILIES)}.  '
        "docs/reference/models.md says how to add one."
    )
    assert "model_type = null" in refusal({})
    assert "model_type = [1]" in refusal({"model_type": [1]})


def windows(content: dict[str, Any]) -> tuple[int | None, list[int] | None, list[int]]:
    model = model_of(content)
    return model.sliding_window, model.sliding_window_layers, model.rope.skip_layers


def test_sliding_windows_where_transformers_has_them() -> None:
    base = llama(rope_scaling=..., model_type="mistral", architectures=["MistralForCausalLM"])
    assert windows(base) == (4096, None, [])  # the default of transformers
    assert windows(base | {"sliding_window": 1024}) == (1024, None, [])
    assert windows(base | {"sliding_window": None}) == (None, None, [])
    qwen = base | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024}
    assert windows(qwen) == (None, None, [])
    slides = qwen | {"use_sliding_window": True}
    assert windows(slides) == (1024, [29, 30, 31, 32], [])  # max_window_layers is 28 by default
    assert windows(slides | {"max_window_layers": 0}) == (1024, None, [])
    assert windows(slides | {"max_window_layers": 40}) == (None, None, [])
    kinds = ["sliding_attention", "full_attention"] * 16
    assert windows(slides | {"layer_types": kinds}) == (1024, list(range(1, 32, 2)), [])
    assert "layer_types has chunked_attention; only full_attention and sliding_attention" in refusal(
        slides | {"layer_types": ["chunked_attention"] * 32}
    )
    assert "layer_types is not a list of 32 names" in refusal(slides | {"layer_types": kinds[:3]})
    exaone = base | {"model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "sliding_window": 1024}
    full = list(range(4, 33, 4))  # without rotary positions
    assert windows(exaone) == (1024, [n for n in range(1, 33) if n not in full], full)
    assert windows(exaone | {"sliding_window": None}) == (None, None, [])
    del exaone["sliding_window"]
    assert windows(exaone)[0] == 4096  # the default of transformers


# --- experts -----------------------------------------------------------------------------------------------


def test_experts_as_released() -> None:
    found = architecture(qwen3_moe(), "config.json")
    assert found.model.moe == MoeConfig(num_experts=128, top_k=8, ffn_hidden_size=768)
    assert found.model.ffn_hidden_size == 6144 and found.model.qk_norm  # no layer has this width
    assert found.sources["moe.normalize_top_k"] == "norm_topk_prob"
    found = architecture(mixtral(), "config.json")
    assert found.model.moe == MoeConfig(num_experts=8, top_k=2)
    assert found.model.resolved_expert_ffn == 14336 and found.model.rope == RopeConfig(base=1e6)
    assert found.sources["moe.normalize_top_k"] == "model_type"


def test_options_that_change_no_model() -> None:
    """Qwen2's qkv projections have a bias and its output projection has none, whatever attention_bias is."""
    content = llama(model_type="qwen2", architectures=["Qwen2ForCausalLM"], attention_bias=True, use_cache=False)
    assert model_of(content).qkv_bias
    expected = architecture(qwen3_moe(), "config.json").model
    for changes in (dict(router_aux_loss_coef=0.5, output_router_logits=True), dict(mlp_only_layers=None)):
        assert architecture(qwen3_moe(**changes), "config.json").model == expected


@pytest.mark.parametrize("made", [qwen3_moe, mixtral])
def test_the_number_of_experts_has_two_names(made: Any) -> None:
    """transformers reads both names; if both are given, the name that it writes since version 5 wins."""
    base = made(num_experts=..., num_local_experts=...)
    theirs = transformers.Qwen3MoeConfig if made is qwen3_moe else transformers.MixtralConfig
    for name in ("num_experts", "num_local_experts"):
        content = {**base, name: 16}
        found = architecture(content, "config.json")
        assert found.model.moe.num_experts == 16 == theirs(**content).num_experts
        assert found.sources["moe.num_experts"] == name
    both = {**base, "num_experts": 16, "num_local_experts": 16}
    assert architecture(both, "config.json").model.moe.num_experts == 16
    told = refusal({**base, "num_experts": 16, "num_local_experts": 8})
    assert "num_experts = 16" in told and "num_local_experts = 8" in told and "are two names of one setting" in told


# --- from a recipe to config.json --------------------------------------------------------------------------


def test_a_changed_base_is_written_in_the_form_of_the_file(tmp_path: Path) -> None:
    silent = back(mixtral(rope_theta=...), **{"rope.base": 5e5})
    assert silent["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}
    # model.rope.original_max_position has no effect if the scaling does not use it.
    assert back(llama(rope_scaling=None), **{"rope.original_max_position": 4096}) == llama(rope_scaling=None)
    assert back(llama(), **{"rope.base": 1e6}) == llama(rope_theta=1e6)
    new = saved(tmp_path, "qwen3", dtype=torch.bfloat16)
    assert back(new, **{"rope.base": 1e6}) == new | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}


def test_scaling_is_written_so_that_transformers_reads_it(tmp_path: Path) -> None:
    scaling = {"rope.scaling": "yarn", "rope.factor": 4.0, "rope.original_max_position": 32768, "rope.base": 1e6}
    new = saved(tmp_path, "qwen3", dtype=torch.bfloat16)
    old = llama(rope_scaling=None)
    for content, kind in ((new, transformers.Qwen3Config), (old, transformers.LlamaConfig)):
        read = kind(**back(content, **scaling)).rope_parameters
        assert read == {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32768,
        }


def test_an_original_length_beside_the_group_does_not_survive() -> None:
    """Outside of rope_parameters, it would override the value that is written inside."""
    scaling = {"rope.scaling": "yarn", "rope.factor": 4.0, "rope.original_max_position": 32768}
    written = back(llama(original_max_position_embeddings=8192), **scaling)
    assert "original_max_position_embeddings" not in written


def test_sizes_type_and_length_are_written() -> None:
    content = llama(num_hidden_layers=4)
    now = architecture(llama(num_hidden_layers=2, tie_word_embeddings=True), "config.json").model
    found = write_back(content, now, "config.json", dtype="float32", seq_length=262144)
    assert found == llama(
        num_hidden_layers=2, tie_word_embeddings=True, torch_dtype="float32", max_position_embeddings=262144
    )
    assert write_back(content, now, "config.json", dtype="float32", seq_length=10)["max_position_embeddings"] == 131072


def test_experts_are_written_under_the_names_of_the_file() -> None:
    change = {"moe.num_experts": 64, "moe.top_k": 4, "moe.ffn_hidden_size": 512, "moe.normalize_top_k": False}
    theirs = dict(num_experts_per_tok=4, moe_intermediate_size=512, norm_topk_prob=False)
    assert back(qwen3_moe(), **change) == qwen3_moe(num_experts=64, **theirs)
    new = qwen3_moe(num_experts=..., num_local_experts=128)
    assert back(new) == new
    assert back(new, **change) == {**new, **theirs, "num_local_experts": 64}
    both = {**new, "num_experts": 128}
    assert back(both, **change) == {**both, **theirs, "num_experts": 64, "num_local_experts": 64}
    assert back(qwen3_moe(num_experts=...), **change) == qwen3_moe(num_experts=64, **theirs)


def test_the_width_of_an_expert_is_the_one_that_counts() -> None:
    """Mixtral has a single width of an expert, whichever of our two keys gives it."""
    assert back(mixtral(), **{"moe.ffn_hidden_size": 96}) == mixtral(intermediate_size=96)
    assert back(mixtral(), ffn_hidden_size=96) == mixtral(intermediate_size=96)
    assert back(mixtral(), **{"moe.ffn_hidden_size": 14336, "ffn_hidden_size": 1}) == mixtral()


@pytest.mark.parametrize(
    "content,change,why",
    [
        (llama(), {"moe.num_experts": 4, "moe.top_k": 2}, "model.moe.num_experts = 4, but it must be null for llama"),
        (mixtral(), {"moe.num_experts": None, "moe.top_k": None}, "model.moe.num_experts = null, but mixtral models"),
        (qwen3_moe(), {"qk_norm": False}, "model.qk_norm = false, but it must be true for qwen3_moe"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_model_of_another_kind(content: dict[str, Any], change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        back(content, **change)
    assert why in str(error.value)


# --- rotary positions, in both forms of config.json --------------------------------------------------------

PLAIN: dict[str, Any] = dict(rope_scaling=..., rope_theta=...)


def rope(**changes: Any) -> RopeConfig:
    return architecture(llama(**{**PLAIN, **changes}), "config.json").model.rope


def yarn(**fields: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, **fields}


FOURFOLD = {"rope_type": "yarn", "factor": 4.0}
YARN = RopeConfig(scaling="yarn", factor=4.0, original_max_position=4096)


@pytest.mark.parametrize(
    "fields,expected",
    [
        ({}, RopeConfig(base=10000.0)),
        ({"rope_theta": 1000000}, RopeConfig(base=1e6)),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 2e6}, RopeConfig(base=2e6)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(scaling="linear", factor=2.0)),
        ({"rope_scaling": {"type": "linear", "factor": 1.0}}, RopeConfig()),
        ({"rope_scaling": yarn()}, YARN),
        ({"rope_scaling": yarn(attention_factor=None, truncate=True, mscale=None)}, YARN),
        ({"rope_scaling": yarn(truncate=False)}, YARN.model_copy(update={"truncate": False})),
        ({"rope_scaling": yarn(truncate=None)}, YARN.model_copy(update={"truncate": False})),
        ({"rope_scaling": yarn(attention_factor=1.3)}, YARN.model_copy(update={"attention_factor": 1.3})),
        ({"rope_scaling": yarn(beta_fast=8, beta_slow=0.5)}, YARN.model_copy(update=dict(beta_fast=8, beta_slow=0.5))),
        # Without an original length inside: the one outside of the group, or the maximum length.
        ({"rope_scaling": FOURFOLD, "max_position_embeddings": 4096}, YARN),
        ({"rope_scaling": FOURFOLD, "original_max_position_embeddings": 4096}, YARN),
        ({"rope_scaling": yarn(factor=None), "max_position_embeddings": 16384}, YARN),
        # If a file has both forms, the old form wins.
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}},
            RopeConfig(base=10000.0, scaling="linear", factor=2.0),
        ),
    ],
    ids=lambda v: json.dumps(v) if isinstance(v, dict) else "",
)
def test_positions_are_read_as_transformers_reads_them(fields: dict[str, Any], expected: RopeConfig) -> None:
    assert rope(**fields) == expected
    sizes = dict(hidden_size=64, num_attention_heads=4, max_position_embeddings=131072)
    theirs = transformers.LlamaConfig(**{**sizes, **json.loads(json.dumps(fields))})
    theirs.standardize_rope_params()  # every model calls this before it computes
    theirs = theirs.rope_parameters
    kind = {"default": "none"}.get(theirs["rope_type"], theirs["rope_type"])
    assert theirs["rope_theta"] == expected.base
    if theirs.get("factor") != 1.0:
        assert kind == expected.scaling
    if kind == "yarn":
        assert theirs["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    "fields,why",
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_type = "dynamic" is not supported'),
        ({"rope_scaling": {"rope_type": "yarn", **yarn(mscale=1.0)}}, "mscale = 1.0 is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention = "),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": "linear"}, "is not a group"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, 'rope_type = ["yarn"] is not supported'),
        ({"rope_scaling": yarn(factor=0.5)}, "rope_scaling = 0.5 (rope.factor)"),
        (
            {"rope_scaling": yarn(), "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 4096 in rope_scaling, but 1 outside it",
        ),
    ],
    ids=str,
)
def test_positions_that_are_refused(fields: dict[str, Any], why: str) -> None:
    assert why in refusal(llama(**{**PLAIN, **fields}))


def test_positions_of_each_layer_type() -> None:
    """OLMo 3 in the form of transformers 5, and in the form of its files of 2025: only full attention is scaled."""
    base = llama(model_type="olmo3", architectures=["Olmo3ForCausalLM"], rope_theta=5e5, sliding_window=64)
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    expected = RopeConfig(base=5e5, scaling="yarn", factor=8.0, original_max_position=8192, window_base=5e5)
    assert architecture(base | {"rope_scaling": scaling}, "config.json").model.rope == expected
    groups = {"full_attention": {"rope_theta": 5e5, **scaling}, "sliding_attention": {"rope_theta": 5e5}}
    del base["rope_theta"], base["rope_scaling"]
    assert architecture(base | {"rope_parameters": groups}, "config.json").model.rope == expected
    groups["sliding_attention"]["rope_type"] = "linear"
    assert 'rope_type = "linear" of sliding_attention is not supported' in refusal(base | {"rope_parameters": groups})
