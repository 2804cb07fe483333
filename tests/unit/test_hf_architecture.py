"""config.json <-> `model.*`, with configs as transformers writes them and as it reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sft.config import ModelConfig, RopeConfig
from sft.errors import ConfigError
from sft.hf.architecture import architecture, nested
from sft.hf.write_back import write_back
from tests.unit.fixtures import hf

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def saved(folder: Path, family: str, **fields: Any) -> dict[str, Any]:
    """What transformers writes for that family."""
    getattr(transformers, f"{hf.FAMILIES[family]}Config")(**fields).save_pretrained(folder)
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def llama(**changes: Any) -> dict[str, Any]:
    """config.json of Llama 3.1 8B, as it was released; ... removes a key."""
    content = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    return {key: value for key, value in (content | changes).items() if value is not ...}


def refusal(content: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        architecture(content, "config.json")
    return str(error.value)


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
        "rope.base": 500000.0,
        "rope.scaling": "llama3",
        "rope.factor": 8.0,
        "rope.low_freq_factor": 1.0,
        "rope.high_freq_factor": 4.0,
        "rope.original_max_position": 8192,
    }
    assert found.sources["ffn_hidden_size"] == "intermediate_size"
    assert found.sources["rope.base"] == "rope_theta" and found.sources["rope.factor"] == "rope_scaling"


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_what_a_silent_config_means_is_what_transformers_takes(tmp_path: Path, family: str) -> None:
    """A file that says the sizes and nothing else: the rest is by the family, as its class in transformers has it."""
    silent = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=32, vocab_size=100)
    silent |= dict(sliding_window=None) if family == "mistral" else {}
    theirs = getattr(transformers, f"{hf.FAMILIES[family]}Config")(**silent)
    model = architecture({**silent, "model_type": family}, "config.json").model
    assert model.resolved_query_groups == theirs.num_key_value_heads
    assert model.resolved_head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    assert model.norm_epsilon == theirs.rms_norm_eps
    assert model.tie_embeddings is theirs.tie_word_embeddings
    assert model.rope == RopeConfig(base=theirs.rope_parameters["rope_theta"])


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_what_transformers_writes_is_read(tmp_path: Path, family: str) -> None:
    content = saved(
        tmp_path,
        family,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=301,
        rms_norm_eps=2e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 3e5, "factor": 2.0},
        **({"sliding_window": None} if family == "mistral" else {}),
    )
    model = architecture(content, "config.json").model
    assert model == ModelConfig(
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        num_query_groups=2,
        head_dim=16,
        vocab_size=301,
        norm_epsilon=2e-6,
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
        tie_embeddings=True,
        rope=RopeConfig(base=3e5, scaling="linear", factor=2.0),
    )


# --- rotary positions --------------------------------------------------------------------------------------


PLAIN: dict[str, Any] = dict(rope_scaling=..., rope_theta=...)


def rope(**changes: Any) -> RopeConfig:
    return architecture(llama(**{**PLAIN, **changes}), "config.json").model.rope


def yarn(**fields: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, **fields}


YARN = RopeConfig(scaling="yarn", factor=4.0, original_max_position=4096)


@pytest.mark.parametrize(
    "fields,expected",
    [
        ({}, RopeConfig(base=10000.0)),
        ({"rope_scaling": None}, RopeConfig(base=10000.0)),
        ({"rope_theta": 1000000}, RopeConfig(base=1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(base=1e6)),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 2e6}, RopeConfig(base=2e6)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(scaling="linear", factor=2.0)),
        ({"rope_scaling": {"type": "linear", "factor": 1.0}}, RopeConfig()),
        ({"rope_scaling": yarn()}, YARN),
        ({"rope_scaling": yarn(attention_factor=None, truncate=True, mscale=None)}, YARN),
        ({"rope_scaling": yarn(attention_factor=1.3)}, YARN.model_copy(update={"attention_factor": 1.3})),
        ({"rope_scaling": yarn(beta_fast=8, beta_slow=0.5)}, YARN.model_copy(update=dict(beta_fast=8, beta_slow=0.5))),
        # No original length: one outside of the group, or the longest one.
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 4096},
            YARN,
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 4096},
            YARN,
        ),
        ({"rope_scaling": yarn(factor=None), "max_position_embeddings": 16384}, YARN),
        # Both forms in one file: the old one counts.
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
    theirs.standardize_rope_params()  # as every model does before it computes
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
        ({"rope_scaling": {"rope_type": "longrope"}}, 'rope_type = "longrope" is not supported'),
        ({"rope_scaling": {"rope_type": "yarn", **yarn(mscale=1.0)}}, "mscale = 1.0 is not supported"),
        ({"rope_scaling": yarn(truncate=False)}, "truncate = false is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention = "),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": "linear"}, "is not a group"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, 'rope_type = ["yarn"] is not supported'),
        ({"rope_scaling": yarn(factor=0.5)}, "rope_scaling = 0.5 (rope.factor)"),
        (
            {"rope_scaling": yarn(), "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 4096 for positions, and 1 outside of them",
        ),
    ],
    ids=str,
)
def test_positions_that_are_refused(fields: dict[str, Any], why: str) -> None:
    assert why in refusal(llama(**{**PLAIN, **fields}))


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes,why",
    [
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported, only "silu" or "swish"'),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
        ({"attention_bias": True}, "attention_bias = true is not supported, only false"),
        ({"mlp_bias": True}, "mlp_bias = true is not supported"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config = {"bits": 4} is not supported'),
        ({"auto_map": {"AutoModel": "own.Code"}}, "auto_map"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM is supported"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5 (num_layers)"),
        ({"num_hidden_layers": "32"}, 'num_hidden_layers = "32" (num_layers)'),
        ({"num_key_value_heads": 5}, "num_key_value_heads = 5 (num_query_groups) does not divide 32 heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
    ids=str,
)
def test_what_our_model_cannot_be(changes: dict[str, Any], why: str) -> None:
    assert why in refusal(llama(**changes))


def test_everything_wrong_is_told_at_once() -> None:
    told = refusal(llama(hidden_act="gelu", attention_bias=True, vocab_size=..., rope_scaling={"type": "dynamic"}))
    assert told.startswith("1 of 4: config.json: hidden_act")
    for name in ("attention_bias = true", "vocab_size is missing", 'rope_type = "dynamic"'):
        assert name in told


def test_an_unknown_model_type_is_told_with_the_known_ones() -> None:
    assert refusal(llama(model_type="gpt_neox")) == (
        'config.json: model_type = "gpt_neox" is not known here.  Known: llama, mistral, qwen2, qwen3.  docs/models.md '
        "tells how to add one."
    )
    assert "model_type = null" in refusal({})
    assert "model_type = [1]" in refusal({"model_type": [1]})


def test_sliding_windows_are_refused_where_transformers_would_slide(tmp_path: Path) -> None:
    base = llama(rope_scaling=..., model_type="mistral", architectures=["MistralForCausalLM"])
    assert "sliding_window = 4096 (not given, and so the default of transformers)" in refusal(base)
    assert "sliding_window = 1024 is not supported" in refusal(base | {"sliding_window": 1024})
    architecture(base | {"sliding_window": None}, "config.json")
    qwen = base | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
    architecture(qwen, "config.json")  # Qwen has a switch of its own, which is off
    assert "use_sliding_window = true" in refusal(qwen | {"use_sliding_window": True})
    assert "layer_types has sliding_attention" in refusal(qwen | {"layer_types": ["sliding_attention"]})


def test_options_that_the_family_does_not_read_do_not_matter() -> None:
    """Qwen2's projections have a bias and its output has none, whatever attention_bias says."""
    content = llama(model_type="qwen2", architectures=["Qwen2ForCausalLM"], attention_bias=True, use_cache=False)
    assert architecture(content, "config.json").model.qkv_bias


# --- the way back ------------------------------------------------------------------------------------------


def back(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    values = architecture(content, "config.json").values | changes
    now = ModelConfig.model_validate(nested(values))
    return write_back(content, now, "config.json", dtype="bfloat16", seq_length=None)


def test_nothing_changes_where_nothing_has_changed() -> None:
    assert back(llama()) == llama()


def test_a_changed_base_is_written_in_the_form_of_the_file(tmp_path: Path) -> None:
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
    """It would win over the one that is written."""
    content = llama(original_max_position_embeddings=8192)
    scaling = {"rope.scaling": "yarn", "rope.factor": 4.0, "rope.original_max_position": 32768}
    assert "original_max_position_embeddings" not in back(content, **scaling)


def test_sizes_type_and_length_are_written() -> None:
    content = llama(num_hidden_layers=4)
    now = architecture(llama(num_hidden_layers=2, tie_word_embeddings=True), "config.json").model
    found = write_back(content, now, "config.json", dtype="float32", seq_length=262144)
    assert found == llama(
        num_hidden_layers=2, tie_word_embeddings=True, torch_dtype="float32", max_position_embeddings=262144
    )
    assert write_back(content, now, "config.json", dtype="float32", seq_length=10)["max_position_embeddings"] == 131072


def test_keys_without_effect_are_not_written() -> None:
    """model.rope.original_max_position says nothing without a scaling that heeds it."""
    assert back(llama(rope_scaling=None), **{"rope.original_max_position": 4096}) == llama(rope_scaling=None)


def test_another_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="model.qk_norm = true, and llama has none"):
        back(llama(), qk_norm=True)
