"""Checkpoints with a vision tower: their config.json, and the names of their tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.config import ModelConfig, MoeConfig, RopeConfig
from sft.hf.architecture import architecture, nested, read, write_back
from sft.hf.family import Family, TensorMapping, views_by_tensor
from tests.unit.fixtures import hf, vision
from tests.unit.fixtures.hf import refusal, released

RELEASED = ("qwen2_5_vl_7b", "qwen3_vl_8b", "qwen3_vl_30b_a3b", "mistral_small_3_2", "ministral_3_8b", "gemma_3_27b")


# --- config.json -------------------------------------------------------------------------------------------


def test_qwen2_5_vl_as_released() -> None:
    """All keys stand at the top level; positions of text are plain."""
    found = architecture(released("qwen2_5_vl_7b"), "config.json")
    model = found.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.vocab_size) == (28, 3584, 18944, 152064)
    assert (model.num_attention_heads, model.resolved_query_groups, model.resolved_head_dim) == (28, 4, 128)
    assert model.qkv_bias and not model.qk_norm and model.norm_epsilon == 1e-6
    assert model.rope == RopeConfig(base=1e6)
    assert found.sources["num_layers"] == "num_hidden_layers"


def test_qwen3_vl_as_released() -> None:
    found = architecture(released("qwen3_vl_8b"), "config.json")
    model = found.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.vocab_size) == (36, 4096, 12288, 151936)
    assert model.qk_norm and not model.qkv_bias and model.rope == RopeConfig(base=5e6)
    assert found.sources["num_layers"] == "text_config.num_hidden_layers"
    assert found.sources["tie_embeddings"] == "tie_word_embeddings"
    assert found.sources["rope.base"] == "text_config.rope_theta"


def test_qwen3_vl_moe_as_released() -> None:
    model = architecture(released("qwen3_vl_30b_a3b"), "config.json").model
    assert model.moe == MoeConfig(num_experts=128, top_k=8, ffn_hidden_size=768, normalize_top_k=True)
    assert (model.num_layers, model.resolved_query_groups, model.rope.base) == (48, 4, 5e6)


def test_mistral_small_as_released() -> None:
    model = architecture(released("mistral_small_3_2"), "config.json").model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.vocab_size) == (40, 5120, 32768, 131072)
    assert (model.resolved_head_dim, model.rope.base, model.tie_embeddings) == (128, 1e9, False)


def test_ministral_as_released() -> None:
    found = architecture(released("ministral_3_8b"), "config.json")
    model = found.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.vocab_size) == (34, 4096, 14336, 131072)
    assert (model.rope.scaling, model.rope.factor, model.rope.query_scale_beta) == ("yarn", 16.0, 0.1)
    assert found.sources["rope.factor"] == "text_config.rope_parameters"


@pytest.mark.parametrize(
    "content,why",
    [
        (released("qwen3_vl_8b", text_config=...), "num_hidden_layers is missing"),
        (released("mistral_small_3_2", text_config={"model_type": "mistral4"}), 'model_type = "mistral3"'),
        (released("mistral_small_3_2", quantization_config={"bits": 4}), "quantization_config"),
        (released("qwen3_vl_8b", architectures=["Qwen3VLModel"]), "only Qwen3VLForConditionalGeneration is supported"),
        (released("qwen2_5_vl_7b", use_sliding_window=True), "use_sliding_window = true is not supported"),
        (released("qwen2_5_vl_7b", head_dim=64), "head_dim = 64 is not supported"),
        (released("llama_3_1_8b", rope_scaling={"type": "mrope"}), 'rope_type = "mrope" is not supported'),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_refused(content: dict[str, Any], why: str) -> None:
    assert why in refusal(content)


def with_text(content: dict[str, Any], **values: Any) -> dict[str, Any]:
    text = {key: value for key, value in (content["text_config"] | values).items() if value is not ...}
    return content | {"text_config": text}


def test_options_of_the_language_model_are_checked() -> None:
    base = released("mistral_small_3_2")
    for changed in (dict(sliding_window=4096), dict(sliding_window=...)):  # the default of transformers
        assert architecture(with_text(base, **changed), "config.json").model.sliding_window == 4096
    mrope = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    assert "mrope_section = [2, 1, 1] is not supported" in refusal(with_text(base, rope_scaling=mrope))
    qwen = released("qwen3_vl_30b_a3b")
    assert "norm_topk_prob = false is not supported" in refusal(with_text(qwen, norm_topk_prob=False))


@pytest.mark.parametrize("family", vision.VISION)
def test_a_silent_config_means_what_transformers_takes(family: str) -> None:
    import transformers

    text = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=32, vocab_size=100)
    if vision.VISION[family] == "Mistral3":
        text |= dict(model_type={"mistral3": "mistral"}.get(family, family), sliding_window=None)
    text |= dict(hidden_size_per_layer_input=0) if family == "gemma4" else {}
    named = "mistral3" if family == "ministral3" else family
    content = {"model_type": named, "text_config": text, "tie_word_embeddings": False}
    theirs = getattr(transformers, f"{vision.VISION[family]}Config")(text_config=dict(text)).text_config
    model = architecture(content, "config.json").model
    first = theirs.per_layer_config[0] if family.startswith("gemma4") else theirs  # a layer with a window
    assert model.resolved_query_groups == first.num_key_value_heads
    assert model.resolved_head_dim == (getattr(first, "head_dim", None) or 2)
    assert model.norm_epsilon == theirs.rms_norm_eps
    assert model.rope.base == full_attention(theirs)["rope_theta"]
    scalings = {"ministral3": "yarn", "gemma4": "proportional", "gemma4_unified": "proportional"}
    assert model.rope.scaling == scalings.get(family, "none")
    experts = [getattr(theirs, key, None) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")]
    assert [model.moe.num_experts, model.moe.top_k, model.moe.ffn_hidden_size] == experts


def full_attention(theirs: Any) -> Any:
    """rope_parameters of layers with full attention."""
    return theirs.rope_parameters.get("full_attention", theirs.rope_parameters)


def back(content: dict[str, Any], *, length: int | None = None, dtype: str = "bfloat16", **changes: Any) -> Any:
    values = architecture(content, "config.json").values | changes
    now = ModelConfig.model_validate(nested(values))
    return write_back(content, now, "config.json", dtype=dtype, seq_length=length)


@pytest.mark.parametrize("name", RELEASED)
def test_nothing_changes_where_nothing_has_changed(name: str) -> None:
    content = released(name)
    assert back(content) == content


def test_values_go_back_to_their_group() -> None:
    """Sizes and lengths of the language model into text_config; a tied output to the top level."""
    content = released("qwen3_vl_8b", dtype="bfloat16")
    found = back(content, length=300_000, dtype="float32", num_layers=2, tie_embeddings=True, **{"rope.base": 1e7})
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


def stored_as(folder: Path) -> tuple[Family, list[TensorMapping], dict[str, tuple[int, ...]]]:
    """The family in the form of the files, its mappings, and the shapes of all stored tensors."""
    found = architecture(read(folder), "config.json")
    shapes = {name: tuple(one.shape) for name, one in hf.tensors(folder).items()}
    family = found.family.stored_as(shapes, found.model, found.vocab_size)
    return family, list(family.mappings(found.model, found.vocab_size)), shapes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [*vision.VISION, "qwen3_vl_moe as released"])
def test_every_tensor_is_trained_or_passed_through(tmp_path: Path, family: str, tied: bool) -> None:
    """Those of the language model, each number once; and those of the tower and projector."""
    vision.save(tmp_path, family.split()[0], tied=tied)
    if family.endswith("as released"):
        vision.as_released(tmp_path)
    declared, mappings, shapes = stored_as(tmp_path)
    views = views_by_tensor(mappings)
    trained = {tensor.name: tensor.shape for tensor in views}
    passed_through = {name for name in shapes if declared.passes_through(name, 0)}
    assert trained == {name: shape for name, shape in shapes.items() if name not in passed_through}
    of_towers = ("visual.", "vision_", "embed_vision.", "multi_")
    assert passed_through == {name for name in shapes if any(part in name for part in of_towers)}
    assert len(passed_through) >= 10 and (declared.head in trained) is not tied
    for tensor, parts in views.items():
        covered = np.zeros(tensor.shape, dtype=int)
        for mapping, number in parts:
            view = mapping.sources[number]
            matrix = covered[view.index].T if view.transposed else covered[view.index]
            matrix[[view.row(number) for number in range(view.num_rows)]] += 1
        assert (covered == 1).all(), f"{tensor.name}: the views do not contain every number once"


def test_experts_as_released_are_transposed() -> None:
    """Gate and up of an expert are columns of its matrix, in this order; down is transposed, too."""
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
    """Some versions of transformers saved the names that they have in memory."""
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
    assert found.family.stored_as(moved, found.model, found.vocab_size) is found.family  # the check tells what is wrong


@pytest.mark.parametrize("name", RELEASED)
def test_the_config_reads_in_transformers(name: str, tmp_path: Path) -> None:
    """An export with another base, as transformers reads it."""
    import transformers

    (tmp_path / "config.json").write_text(json.dumps(back(released(name), **{"rope.base": 2e7})))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    theirs.standardize_rope_params()
    kind = {"ministral_3_8b": "yarn", "gemma_3_27b": "linear"}.get(name, "default")
    group = full_attention(theirs)
    assert group["rope_theta"] == 2e7 and group["rope_type"] == kind
    if name.startswith("qwen"):
        sections = [16, 24, 24] if name.startswith("qwen2") else [24, 20, 20]
        assert theirs.rope_parameters["mrope_section"] == sections
