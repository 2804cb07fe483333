"""Properties of single families: tensors, changed keys of config.json, and positions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Ministral3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sft.config import RopeConfig
from sft.errors import ConfigError
from sft.hf.architecture import architecture
from sft.hf.families import FAMILIES
from sft.hf.families.unsupported import _MISSING
from sft.hf.family import views_by_tensor
from sft.hf.rotary import rope_of, written
from sft.hf.source import open_source
from sft.recipe.load import parse_recipe
from sft.weights.trained import unfrozen
from tests.builders import RECIPE
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import back, model_of, refusal
from tests.unit.hf.released import config

FACTOR_TOLERANCE = 1e-12  # float64, the same operations
QWEN3_NEXT = FAMILIES["qwen3_next"]  # rotates a part of each head


def test_phi_4_stores_joint_projections() -> None:
    """Rows of 40 query heads, 10 key heads and 10 value heads of width 128; gate above up."""
    model = model_of(config("phi_4", num_hidden_layers=1))
    mappings = list(FAMILIES["phi3"].mappings(model, 100352))
    shapes = {tensor.name: tensor.shape for tensor in views_by_tensor(mappings)}
    layer = "model.layers.0"
    assert shapes == {
        "model.embed_tokens.weight": (100352, 5120),
        "model.norm.weight": (5120,),
        "lm_head.weight": (100352, 5120),
        f"{layer}.input_layernorm.weight": (5120,),
        f"{layer}.self_attn.qkv_proj.weight": (7680, 5120),
        f"{layer}.self_attn.o_proj.weight": (5120, 5120),
        f"{layer}.post_attention_layernorm.weight": (5120,),
        f"{layer}.mlp.gate_up_proj.weight": (35840, 5120),
        f"{layer}.mlp.down_proj.weight": (5120, 17920),
    }
    by_key = {mapping.key: [(view.first, view.num_rows) for view in mapping.sources] for mapping in mappings}
    assert by_key["decoder.layers.self_attention.linear_qkv.weight"] == [(0, 5120), (5120, 1280), (6400, 1280)]
    assert by_key["decoder.layers.mlp.linear_fc1.weight"] == [(0, 17920), (17920, 17920)]


def test_an_unsupported_family_is_told_what_it_needs() -> None:
    assert refusal({"model_type": "granitemoeshared"}).startswith(
        'config.json: model_type = "granitemoeshared" is not supported: it needs a table of its tensors: layers of '
        "Granite with a shared expert, which this trainer does not have.  The nearest family is granitemoe.  "
        "Supported: llama, "
    )
    assert all(nearest in FAMILIES and named not in FAMILIES for named, (_, nearest) in _MISSING.items())


# Causal language models of transformers that few people fine-tune, or that are no decoders of text alone.
WITHOUT_HINT = {
    *("bart", "beam", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot"),
    *("blenderbot-small", "blt", "camembert", "codegen", "cpmant", "ctrl", "data2vec-text", "electra", "emu3", "ernie"),
    *("flint", "fuyu", "git", "got_ocr2", "gpt-sw3", "gpt_neox_japanese", "hrm_text", "kolibri1", "marian", "mbart"),
    *("megatron-bert", "modernbert-decoder", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "mvp"),
    *("openai-gpt", "pegasus", "plbart", "prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm"),
    *("roc_bert", "roformer", "trocr", "vaultgemma", "whisper", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl"),
    *("xlnet", "xmod"),
    *("exaone_moe", "hy_v3", "laguna", "mimo_v2_flash"),
}


def test_every_causal_model_of_transformers_is_supported_or_has_a_hint() -> None:
    supported = {name.partition("/")[0] for name in FAMILIES}
    assert not {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - supported - {*_MISSING} - WITHOUT_HINT
    assert {*WITHOUT_HINT} <= {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} and not {*WITHOUT_HINT} & {*_MISSING}


@pytest.mark.parametrize(
    "model_type,needs",
    [
        ("glm_moe_dsa", "sparse attention, for which an indexer chooses keys"),
        ("qwen4_exp", "embeddings of n-grams"),
        ("minimax_m3_vl", "chooses blocks of keys"),
        ("deepseek_v4", "experts chosen by a hash of the token"),
        ("lfm2_moe", "a short convolution in place of attention"),
    ],
)
def test_the_hint_of_a_popular_model(model_type: str, needs: str) -> None:
    assert needs in refusal({"model_type": model_type}).partition(", which this trainer does not have")[0]


def test_experts_of_granite_are_rows_of_one_tensor() -> None:
    """The rows of gate come before those of up, as in our tensor; nothing is transposed."""
    content = {
        **{"model_type": "granitemoe", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 3},
        **{"num_attention_heads": 2, "vocab_size": 10, "num_local_experts": 4, "num_experts_per_tok": 2},
    }
    model = model_of(content)
    mappings = [one for one in FAMILIES["granitemoe"].mappings(model, 10) if one.stack_index == (1, 3)]
    views = [view for mapping in mappings for view in mapping.sources]
    block = "model.layers.1.block_sparse_moe"
    assert [(view.name, view.tensor.shape, view.index, view.first, view.shape) for view in views] == [
        (f"{block}.input_linear.weight", (4, 6, 8), (3,), 0, (3, 8)),
        (f"{block}.input_linear.weight", (4, 6, 8), (3,), 3, (3, 8)),
        (f"{block}.output_linear.weight", (4, 8, 3), (3,), 0, (8, 3)),
    ]
    assert not any(view.transposed for view in views)


def test_a_correction_bias_is_no_weight_that_is_frozen_or_trained(tmp_path: Path) -> None:
    found = architecture(open_source(hf.save(tmp_path / "source", "glm4_moe")).content, "config.json")
    mappings = found.family.mappings(found.model, found.vocab_size)
    weights = unfrozen(["embed_tokens"], found.family, found.model, mappings)
    assert not any("expert_bias" in weight.key for weight in weights)
    assert any("router.weight" in weight.key for weight in weights)


def test_dense_layers_come_first() -> None:
    content = config("glm_4_7_flash", num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "sparse"])
    assert model_of(content).moe.dense_layers == 1
    content["mlp_layer_types"] = ["sparse", "dense", "sparse"]
    assert "is not a list of dense layers and then sparse ones" in refusal(content)


def test_ministral_3_inside_a_checkpoint_with_a_vision_tower() -> None:
    nested_config = {"model_type": "mistral3", "text_config": config("ministral_3_8b text"), "vision_config": {}}
    found = architecture(nested_config, "config.json")
    assert found.model == model_of(config("ministral_3_8b text")) and found.model.rope.query_scale_beta == 0.1
    names = {mapping.sources[0].name for mapping in found.family.mappings(found.model, found.vocab_size)}
    assert "language_model.model.layers.33.self_attn.q_proj.weight" in names


@pytest.mark.parametrize("mscale, all_dim", [(1.0, 1.0), (0.707, 1.0), (1.0, 0.8)])
def test_the_attention_factor_of_mscale_is_that_of_transformers(mscale: float, all_dim: float) -> None:
    content = config("ministral_3_8b text")
    content["rope_parameters"] |= {"mscale": mscale, "mscale_all_dim": all_dim}
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](Ministral3Config(**content), torch.device("cpu"))
    assert model_of(content).rope.attention_factor == pytest.approx(expected, rel=FACTOR_TOLERANCE)


@pytest.mark.parametrize(
    "name,key,own",
    [
        ("smollm3_3b", "rope.skip_layers", "[4]"),
        ("ministral_3_8b text", "rope.query_scale_beta", "0.2"),
        ("llama_3_1_8b", "logits_scaling", "2"),
    ],
)
def test_a_recipe_may_not_change_what_the_model_computes(tmp_path: Path, name: str, key: str, own: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(name)))
    recipe = [f"model.{size}=null" for size in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")]
    with pytest.raises(ConfigError, match=rf"model\.{key} = .* but .*config.json, .* says .*Remove model\.{key}"):
        parse_recipe(RECIPE, "a.yaml", [f"model.hf={tmp_path}", f"model.{key}={own}", *recipe])


# --- changed values in an exported config.json -------------------------------------------------------------

LONGER, HALF = {"rope.base": 2e7}, {"rope_theta": 2e7, "partial_rotary_factor": 0.5}
CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("granite_3_3_8b", {"logits_scaling": 8.0}, {"logits_scaling": 8.0}),
    ("smollm3_3b", {"rope.skip_layers": [36]}, {"no_rope_layers": [1] * 35 + [0]}),
    ("glm_4_5_air", LONGER, HALF),
    ("glm_4_6", LONGER, HALF),
    ("minimax_m2", LONGER, HALF),
    ("gpt_oss_20b", {"activation_limit": 5.0}, {"swiglu_limit": 5.0}),
    (
        "gpt_oss_20b",
        {"sliding_window_layers": [1]},
        {"layer_types": ["sliding_attention"] + ["full_attention"] * 23},
    ),
]


@pytest.mark.parametrize("name,changes,expected", CHANGES)
def test_changes_are_written(name: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    found = back(config(name, quantization_config=...), **changes)
    assert {key: found[key] for key in expected} == expected


def test_changed_positions_are_written() -> None:
    content = config("ministral_3_8b text")
    found = back(content, **{"rope.base": 2e6})["rope_parameters"]
    assert (found["rope_theta"], found["llama_4_scaling_beta"], found["attention_factor"]) == (2e6, 0.1, 1.0)
    found = back(content, **{"rope.scaling": "none", "rope.factor": 1.0, "rope.attention_factor": None})
    # the length from which YaRN computes positions
    assert found["rope_parameters"]["original_max_position_embeddings"] == 16384
    found = back(config("deepseek_v3", quantization_config=...), **{"rope.factor": 80.0})["rope_scaling"]
    assert (found["factor"], found["attention_factor"], found["mscale_all_dim"]) == (80.0, 1.0, 1.0)
    assert found["mscale"] == pytest.approx(1.0)
    found = back(config("gpt_oss_20b", quantization_config=...), **{"rope.factor": 64.0})["rope_scaling"]
    assert found["factor"] == 64.0 and found["truncate"] is False


def test_positions_that_transformers_would_not_compute_are_not_written() -> None:
    scaled = {"rope.scaling": "yarn", "rope.factor": 4.0, "rope.original_max_position": 16384}
    with pytest.raises(ConfigError, match="model.rope.scaling = yarn, but transformers computes a phi3 model only"):
        back(config("phi_4"), **scaled)


def test_the_rotated_part_of_a_head() -> None:
    """The share that is rotated stands in rope_parameters, beside them, or is the family's default; an export writes it
    back."""
    places = [{"rope_parameters": {"partial_rotary_factor": 0.5}}, {"partial_rotary_factor": 0.5}, {}]
    for content, expected in zip(places, (0.5, 0.5, 0.25)):
        values, problems = rope_of({"rope_theta": 1e4, **content}, QWEN3_NEXT, 1e4, 0.25)
        assert values["fraction"] == expected and not problems
    for is_new in (False, True):
        content = written(RopeConfig(fraction=0.5), QWEN3_NEXT, is_new=is_new)
        assert rope_of(content, QWEN3_NEXT, 1e4, 0.25)[0]["fraction"] == 0.5
