"""Checkpoints with a vision tower: their config.json, and the names of their tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from sft.hf.architecture import architecture, read
from sft.hf.family import views_by_tensor
from tests.unit.fixtures import hf, vision
from tests.unit.fixtures.hf import back, model_of, released
from tests.unit.hf.released import VISION, with_text

# --- config.json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [dict(sliding_window=4096), dict(sliding_window=...)], ids=str)
def test_the_window_of_the_language_model(changed: dict[str, Any]) -> None:
    """Without the key, the window is the default of transformers."""
    assert model_of(with_text(released("mistral_small_3_2"), **changed)).sliding_window == 4096


@pytest.mark.parametrize("family", [family for family in vision.VISION if family != "kimi_k25"])
def test_a_silent_config_means_what_transformers_takes(family: str) -> None:
    text = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=32, vocab_size=100)
    if vision.VISION[family] == "Mistral3":
        text |= dict(model_type=family.partition("/")[2] or "mistral", sliding_window=None)
    text |= dict(hidden_size_per_layer_input=0) if family == "gemma4" else {}
    text |= dict(model_type="exaone4") if family == "exaone4_5" else {}
    text |= dict(num_hidden_layers=4) if family == "step3p7" else {}  # the first three have no experts
    named = "mistral3" if vision.VISION[family] == "Mistral3" else family
    content = {"model_type": named, "text_config": text, "tie_word_embeddings": False}
    theirs = getattr(transformers, f"{vision.VISION[family]}Config")(text_config=dict(text)).text_config
    model = model_of(content)
    first = theirs.per_layer_config[0] if family.startswith("gemma4") else theirs  # a layer with a window
    assert model.resolved_query_groups == first.num_key_value_heads
    assert model.resolved_head_dim == (getattr(first, "head_dim", None) or 2)
    assert model.norm_epsilon == theirs.rms_norm_eps
    assert model.rope.base == full_attention(theirs)["rope_theta"]
    scalings = {
        "mistral3/ministral3": "yarn",
        "mistral3/mistral4": "yarn",
        "gemma4": "proportional",
        "gemma4_unified": "proportional",
    }
    assert model.rope.scaling == scalings.get(family, "none")
    count = "n_routed_experts" if family in ("mistral3/mistral4", "step3p7") else "num_experts"
    experts = [getattr(theirs, key, None) for key in (count, "num_experts_per_tok", "moe_intermediate_size")]
    assert [model.moe.num_experts, model.moe.top_k, model.moe.ffn_hidden_size] == experts


@pytest.mark.parametrize("named", ["kimi_k2", "deepseek_v3"])
def test_a_silent_kimi_has_the_language_model_of_deepseek(named: str) -> None:
    """Except that transformers ties the output of Kimi-K2.5; Moonshot's own files say false."""
    text = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=32, vocab_size=100)
    assert transformers.Kimi_K25Config(text_config=dict(text) | {"model_type": named}).tie_word_embeddings is True
    found = model_of({"model_type": "kimi_k25", "text_config": text | {"model_type": named}})
    assert found == model_of({"model_type": "deepseek_v3", **text}).model_copy(update={"tie_embeddings": True})


def full_attention(theirs: Any) -> Any:
    """rope_parameters of layers with full attention."""
    return theirs.rope_parameters.get("full_attention", theirs.rope_parameters)


def test_values_go_back_to_their_group() -> None:
    """Sizes and lengths of the language model go into text_config, a tied output to the top level."""
    content = released("qwen3_vl_8b", dtype="bfloat16")
    found = back(content, seq_length=300_000, dtype="float32", num_layers=2, tie_embeddings=True, **{"rope.base": 1e7})
    expected = with_text(
        content | {"tie_word_embeddings": True, "dtype": "float32"},
        num_hidden_layers=2,
        max_position_embeddings=300_000,
        rope_theta=1e7,
        dtype="float32",
    )
    mrope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    assert found == with_text(expected, rope_scaling={"rope_type": "default", **mrope})
    assert found["vision_config"] == content["vision_config"]


def test_sections_of_mrope_survive_a_new_scaling() -> None:
    scaling = {"rope.scaling": "yarn", "rope.factor": 4.0, "rope.original_max_position": 32768}
    found = back(released("qwen2_5_vl_7b"), **scaling)
    assert found["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 32768,
        "mrope_section": [16, 24, 24],
    }
    assert found["rope_theta"] == 1e6 and "text_config" not in found


# --- tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [*vision.VISION, "qwen3_vl_moe as released"])
def test_every_tensor_is_trained_or_passed_through(tmp_path: Path, family: str, tied: bool) -> None:
    """Tensors of the language model are trained, each element once; tensors of the tower and the projector are passed
    through."""
    vision.save(tmp_path, family.split()[0], tied=tied)
    if family.endswith("as released"):
        vision.as_released(tmp_path)
    found = architecture(read(tmp_path), "config.json")
    shapes = {name: tuple(one.shape) for name, one in hf.tensors(tmp_path).items()}
    declared = found.family.stored_as(shapes, found.model, found.vocab_size)
    views = views_by_tensor(declared.mappings(found.model, found.vocab_size))
    trained = {tensor.name: tensor.shape for tensor in views}
    passed_through = {name for name in shapes if declared.passes_through(name, found.model.num_layers)}
    assert trained == {name: shape for name, shape in shapes.items() if name not in passed_through}
    of_towers = ("visual.", "vision_", "embed_vision.", "multi_", "mm_", "vit_")
    assert passed_through == {name for name in shapes if any(part in name for part in of_towers)}
    assert len(passed_through) >= 10 and (declared.head in trained) is not tied
    hf.assert_covered_once(views)


def test_experts_as_released_are_transposed() -> None:
    """Gate and up of an expert are columns of its matrix, in this order; the down matrix is transposed, too."""
    found = architecture(released("qwen3_vl_30b_a3b"), "config.json")
    mappings = [mapping for mapping in found.family.mappings(found.model, 151936) if mapping.stack_index == (7, 5)]
    gate_up, down = ([view for view in mapping.sources] for mapping in mappings)
    stack = "model.language_model.layers.7.mlp.experts"
    assert [(view.name, view.tensor.shape, view.index) for view in (*gate_up, *down)] == [
        (f"{stack}.gate_up_proj", (128, 2048, 1536), (5,)),
        (f"{stack}.gate_up_proj", (128, 2048, 1536), (5,)),
        (f"{stack}.down_proj", (128, 768, 2048), (5,)),
    ]
    assert [(view.first, view.shape, view.transposed) for view in (*gate_up, *down)] == [
        (0, (768, 2048), True),
        (768, (768, 2048), True),
        (0, (2048, 768), True),
    ]


def test_names_that_other_versions_wrote_are_recognised(tmp_path: Path) -> None:
    """Some versions of transformers saved tensors under their names in memory."""
    vision.save(tmp_path, "mistral3")
    found = architecture(read(tmp_path), "config.json")
    moved = {
        ("" if "lm_head" in name else "model.")
        + name.replace("language_model.lm_head", "lm_head").replace("language_model.model.", "language_model."): tuple(
            one.shape
        )
        for name, one in hf.tensors(tmp_path).items()
    }
    family = found.family.stored_as(moved, found.model, found.vocab_size)
    tensors = {tensor.name for tensor in views_by_tensor(family.mappings(found.model, found.vocab_size))}
    assert family.embedding == "model.language_model.embed_tokens.weight" and family.head == "lm_head.weight"
    assert tensors == {name for name in moved if not family.passes_through(name, 0)}
    moved.pop("lm_head.weight")
    assert found.family.stored_as(moved, found.model, found.vocab_size) is found.family  # the check reports the fault


@pytest.mark.parametrize("name", VISION)
def test_the_config_reads_in_transformers(name: str, tmp_path: Path) -> None:
    """transformers reads the config.json of an export with another rotary base."""
    (tmp_path / "config.json").write_text(json.dumps(back(released(name), **{"rope.base": 2e7})))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    theirs.standardize_rope_params()
    kinds = {"ministral_3_8b": "yarn", "mistral_small_4": "yarn", "gemma_3_27b": "linear"}
    kind = (kinds | {"kimi_k2_5": "yarn", "exaone_4_5_33b": "llama3"}).get(name, "default")
    group = full_attention(theirs)
    assert group["rope_theta"] == 2e7 and group["rope_type"] == kind
    if name.startswith("qwen"):
        sections = [16, 24, 24] if name.startswith("qwen2") else [24, 20, 20]
        assert theirs.rope_parameters["mrope_section"] == sections
