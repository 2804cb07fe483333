"""config.json <-> `model.*` of families whose layers compute more than those of Llama."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Ministral3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sft.config import ModelConfig, MoeConfig, RopeConfig
from sft.errors import ConfigError
from sft.hf.architecture import architecture, nested, write_back
from sft.hf.rotary import rope_of, written
from sft.layers.flops import num_parameters
from sft.recipe.load import parse_recipe
from tests.builders import RECIPE, parsed
from tests.unit.fixtures import hf

FACTOR_TOLERANCE = 1e-12  # float64, the same operations


def config(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a model of a released size; ... removes a key."""
    content = {"model_type": family, **RELEASED[family], **changes}
    return {key: value for key, value in content.items() if value is not ...}


def sizes(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
    }


ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
RELEASED: dict[str, dict[str, Any]] = {
    "granite": {  # granite-3.3-8b-instruct
        **sizes(40, 4096, 12800, 32, 8, 49159),
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e7,
        "tie_word_embeddings": True,
    },
    "smollm3": {  # SmolLM3-3B
        **sizes(36, 2048, 11008, 16, 4, 128256),
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "rope_theta": 5e6,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "olmo2": {**sizes(32, 4096, 11008, 32, 32, 100352), "rms_norm_eps": 1e-6, "rope_theta": 5e5},  # OLMo-2-1124-7B
    "gemma": {  # gemma-2b, as it was released
        **sizes(18, 2048, 16384, 8, 1, 256000),
        "head_dim": 256,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    "cwm": {
        **sizes(64, 6144, 21504, 48, 8, 128256),
        "head_dim": 128,
        "sliding_window": 8192,
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "ministral": {  # the sizes of Ministral-8B-Instruct-2410
        **sizes(36, 4096, 12288, 32, 8, 131072),
        "head_dim": 128,
        "sliding_window": 32768,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 9,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
    },
    "gemma2": {  # gemma-2-9b
        **sizes(42, 3584, 14336, 16, 8, 256000),
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "rope_theta": 10000.0,
    },
    "gemma3_text": {  # gemma-3-1b-it
        **sizes(26, 1152, 6912, 4, 1, 262144),
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "ministral3": {**sizes(34, 4096, 14336, 32, 8, 131072), "head_dim": 128, "rope_parameters": ROPE},  # 8B
    "qwen2_moe": {  # Qwen1.5-MoE-A2.7B
        **sizes(24, 2048, 5632, 16, 16, 151936),
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 21,
    },
}


@pytest.mark.parametrize("family", RELEASED)
def test_parameters_are_as_many_as_in_transformers(family: str) -> None:
    import transformers

    found = architecture(config(family), "config.json")
    with torch.device("meta"):
        model_class = getattr(transformers, f"{hf.FAMILIES[family]}ForCausalLM")
        theirs = model_class(hf.config_class(family)(**config(family)))
    assert num_parameters(found.model, found.vocab_size) == theirs.num_parameters()


def test_values_of_released_models() -> None:
    granite = architecture(config("granite"), "config.json")
    multipliers = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    assert [granite.values[name] for name in multipliers] == [12.0, 0.22, 0.0078125, 16.0]
    assert granite.sources["logits_scaling"] == "logits_scaling"
    smollm = architecture(config("smollm3"), "config.json")
    assert smollm.model.rope == RopeConfig(base=5e6, skip_layers=[4, 8, 12, 16, 20, 24, 28, 32, 36])
    assert smollm.sources["rope.skip_layers"] == "no_rope_layers"
    olmo = architecture(config("olmo2"), "config.json").model
    assert (olmo.norm_placement, olmo.qk_norm, olmo.qk_norm_across_heads) == ("post", True, True)
    gemma = architecture(config("gemma"), "config.json").model
    assert (gemma.norm_placement, gemma.norm_zero_centered, gemma.activation) == ("pre", True, "geglu")
    assert (gemma.embedding_multiplier, gemma.round_embedding_multiplier) == (2048**0.5, True)
    full = [1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61]
    for content in (config("cwm"), config("cwm", rope_theta=..., rope_scaling=..., sliding_window=...)):
        cwm = architecture(content, "config.json").model
        assert cwm.sliding_window == 8192
        assert cwm.sliding_window_layers == [number for number in range(1, 65) if number not in full]
        assert cwm.rope == RopeConfig(base=1e6, scaling="llama3", factor=16.0, original_max_position=8192)
    ministral = architecture(config("ministral"), "config.json").model
    assert ministral.sliding_window_layers is not None and ministral.sliding_window_layers[:4] == [2, 3, 4, 6]
    everywhere = architecture(config("ministral", layer_types=...), "config.json").model
    assert (everywhere.sliding_window, everywhere.sliding_window_layers) == (32768, None)
    moe = architecture(config("qwen2_moe"), "config.json").model
    shared = dict(shared_ffn_hidden_size=5632, shared_gate=True)
    assert moe.moe == MoeConfig(num_experts=60, top_k=4, ffn_hidden_size=1408, normalize_top_k=False, **shared)
    assert moe.qkv_bias and not moe.qk_norm


@pytest.mark.parametrize("family", RELEASED)
def test_nothing_changes_where_nothing_has_changed(family: str) -> None:
    assert back(config(family)) == config(family)


def back(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    values = architecture(content, "config.json").values | changes
    now = ModelConfig.model_validate(nested(values))
    return write_back(content, now, "config.json", dtype="float32", seq_length=None)


def test_changes_are_written() -> None:
    assert back(config("granite"), logits_scaling=8.0) == config("granite", logits_scaling=8.0)
    changed = back(config("smollm3"), **{"rope.skip_layers": [36]})
    assert changed["no_rope_layers"] == [1] * 35 + [0]
    rope = back(config("ministral3"), **{"rope.base": 2e6})["rope_parameters"]
    assert (rope["rope_theta"], rope["llama_4_scaling_beta"], rope["attention_factor"]) == (2e6, 0.1, 1.0)
    rope = back(config("ministral3"), **{"rope.scaling": "none", "rope.factor": 1.0, "rope.attention_factor": None})
    assert rope["rope_parameters"]["original_max_position_embeddings"] == 16384  # positions are counted in it


@pytest.mark.parametrize(
    "family,changes,why",
    [
        ("granite", {"attention_multiplier": None}, "attention_multiplier is missing"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling = 0.0 (logits_scaling) input should be greater than 0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is not a list of 36 numbers 0 and 1"),
        ("smollm3", {"no_rope_layers": [2] * 36}, "no_rope_layers is not a list of 36 numbers 0 and 1"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window = true is not supported"),
        ("olmo2", {"attention_bias": True}, "attention_bias = true is not supported"),
        (
            "ministral3",
            {"rope_parameters": {**ROPE, "llama_4_scaling_beta": None}},
            "llama_4_scaling_beta is missing from rope_parameters",
        ),
        ("ministral3", {"rope_parameters": {**ROPE, "mscale_all_dim": None}}, "mscale = 1.0 is not supported"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias = false is not supported, only true"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0] is not supported"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_refused(family: str, changes: dict[str, Any], why: str) -> None:
    assert why in hf.refusal(config(family, **changes))


def test_the_scale_of_queries_belongs_to_one_family() -> None:
    told = hf.refusal(hf.llama(rope_scaling={**ROPE, "mscale": None, "mscale_all_dim": None}))
    assert "llama_4_scaling_beta = 0.1 is not supported with rope_type = yarn" in told


def test_ministral_3_inside_a_checkpoint_with_a_vision_tower() -> None:
    nested_config = {"model_type": "mistral3", "text_config": config("ministral3"), "vision_config": {}}
    found, plain = architecture(nested_config, "config.json"), architecture(config("ministral3"), "config.json")
    assert found.model == plain.model and found.model.rope.query_scale_beta == 0.1
    names = {mapping.sources[0].name for mapping in found.family.mappings(found.model, found.vocab_size)}
    assert "language_model.model.layers.33.self_attn.q_proj.weight" in names


@pytest.mark.parametrize("mscale, all_dim", [(1.0, 1.0), (0.707, 1.0), (1.0, 0.8)])
def test_the_attention_factor_of_mscale_is_that_of_transformers(mscale: float, all_dim: float) -> None:
    content = config("ministral3", rope_parameters={**ROPE, "mscale": mscale, "mscale_all_dim": all_dim})
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](Ministral3Config(**content), torch.device("cpu"))
    found = architecture(content, "config.json").model.rope.attention_factor
    assert found == pytest.approx(expected, rel=FACTOR_TOLERANCE)


@pytest.mark.parametrize(
    "family,key,own",
    [
        ("smollm3", "rope.skip_layers", "[4]"),
        ("ministral3", "rope.query_scale_beta", "0.2"),
        ("llama", "logits_scaling", "2"),
    ],
)
def test_a_recipe_may_not_change_what_the_model_computes(tmp_path: Path, family: str, key: str, own: str) -> None:
    content = hf.llama() if family == "llama" else config(family)
    (tmp_path / "config.json").write_text(json.dumps(content))
    recipe = [f"model.{name}=null" for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")]
    with pytest.raises(ConfigError, match=rf"model\.{key} = .* but .*config.json, .* says .*Remove model\.{key}"):
        parse_recipe(RECIPE, "a.yaml", [f"model.hf={tmp_path}", f"model.{key}={own}", *recipe])


@pytest.mark.parametrize(
    "overrides,why",
    [
        (["model.rope.skip_layers=[2, 1]"], "model.rope.skip_layers"),
        (["model.rope.skip_layers=[99]"], "names layer 99 of"),
        (["model.rope.query_scale_beta=0.1"], "is required with query_scale_beta"),
        (["model.qk_norm=false", "model.qk_norm_across_heads=true"], "has no effect without qk_norm"),
        (["model.moe.shared_ffn_hidden_size=8"], "has no effect without model.moe.num_experts"),
        (["model.norm_placement=post", "attention.backend=te"], "attention.backend.*use portable or auto"),
        (
            ["model.sliding_window=8", "attention.backend=te"],
            "attention.backend.*does not have model.sliding_window; use portable",
        ),
        (["model.rope.window_base=1e4"], "model.rope.window_base.*has no effect without sliding_window"),
        (["model.sliding_window_layers=[1]"], "model.sliding_window_layers.*has no effect without sliding_window"),
        (["model.sliding_window=8", "model.sliding_window_layers=[2, 1]"], "must be in increasing order"),
        (["model.sliding_window=8", "model.sliding_window_layers=[99]"], "names layer 99 of"),
        (["model.sliding_window=8", "model.sliding_window_layers=[]"], "is empty; use sliding_window = null"),
        (
            ["model.norm_placement=post", "run.fp8=delayed"],
            "run.fp8.*needs Transformer Engine, which does not have model.norm_placement = post",
        ),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_values_that_exclude_each_other(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parsed(*overrides)


def test_the_rotated_part_of_a_head() -> None:
    """Of a family that rotates parts of heads: in rope_parameters, beside them, or the family's own; written back."""
    places = [{"rope_parameters": {"partial_rotary_factor": 0.5}}, {"partial_rotary_factor": 0.5}, {}]
    for content, expected in zip(places, (0.5, 0.5, 0.25)):
        values, problems = rope_of({"rope_theta": 1e4, **content}, fraction=0.25)
        assert values["fraction"] == expected and not problems
    rope = RopeConfig(fraction=0.5)
    for is_new in (False, True):
        assert rope_of(written(rope, is_new=is_new, is_partial=True), fraction=0.25)[0]["fraction"] == 0.5
