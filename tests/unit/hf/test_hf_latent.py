"""DeepSeek-V3, Kimi-K2, Moonlight and GLM-4.7-Flash: what their config.json means, and what passes through."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sft.config import ModelConfig, MoeConfig, RopeConfig
from sft.config.latent_attention import LatentAttentionConfig
from sft.hf.architecture import architecture, nested, write_back
from sft.hf.source import open_source
from sft.layers.flops import active_parameters, num_parameters
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import refusal, released


def test_deepseek_v3_as_released() -> None:
    model = architecture(released("deepseek_v3"), "config.json").model
    assert model.latent_attention == LatentAttentionConfig(kv_lora_rank=512, q_lora_rank=1536)
    assert (model.resolved_head_dim, model.value_head_dim, model.rotary_dim, model.num_query_groups) == (
        192,
        128,
        64,
        128,
    )
    yarn: dict[str, Any] = dict(scaling="yarn", factor=40, original_max_position=4096, mscale_all_dim=1.0)
    assert model.rope == RopeConfig(base=1e4, interleaved=True, attention_factor=1.0, **yarn)
    router: dict[str, Any] = dict(score_function="sigmoid", correction_bias=True, scaling_factor=2.5, top_k=8)
    assert model.moe == MoeConfig(
        num_experts=256,
        num_groups=8,
        top_groups=4,
        ffn_hidden_size=2048,
        shared_ffn_hidden_size=2048,
        dense_layers=3,
        **router,
    )


def test_kimi_k2_as_released() -> None:
    """Its YaRN has no ramp: beta_fast equals beta_slow."""
    model = architecture(released("kimi_k2"), "config.json").model
    yarn: dict[str, Any] = dict(scaling="yarn", factor=64, original_max_position=4096, beta_fast=1.0, beta_slow=1.0)
    assert model.rope == RopeConfig(base=5e4, interleaved=True, attention_factor=1.0, mscale_all_dim=1.0, **yarn)
    assert (model.moe.num_experts, model.moe.num_groups, model.moe.scaling_factor) == (384, 1, 2.827)


def test_moonlight_as_released() -> None:
    """Without a latent of queries; two shared experts are one of twice the width."""
    model = architecture(released("moonlight_16b_a3b"), "config.json").model
    assert model.latent_attention == LatentAttentionConfig(kv_lora_rank=512)
    assert model.rope == RopeConfig(base=5e4, interleaved=True)
    assert (model.moe.shared_ffn_hidden_size, model.moe.dense_layers, model.moe.top_k) == (2816, 1, 6)


def test_glm_4_7_flash_as_released() -> None:
    model = architecture(released("glm_4_7_flash"), "config.json").model
    sizes: dict[str, Any] = dict(qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
    assert model.latent_attention == LatentAttentionConfig(kv_lora_rank=512, q_lora_rank=768, **sizes)
    assert (model.moe.dense_layers, model.moe.num_experts, model.moe.scaling_factor) == (1, 64, 1.8)


@pytest.mark.parametrize(
    "name,class_name,total,active",
    [
        ("deepseek_v3", "DeepseekV3", 671.0e9, 37.6e9),
        ("kimi_k2", "DeepseekV3", 1.026e12, 32.9e9),
        ("moonlight_16b_a3b", "DeepseekV3", 15.96e9, 2.9e9),
        ("glm_4_7_flash", "Glm4MoeLite", 29.9e9, 3.9e9),
    ],
)
def test_parameters_are_as_many_as_in_transformers(name: str, class_name: str, total: float, active: float) -> None:
    """And about as many as the names of the models say: 671B-A37B, 1T-A32B, 16B-A3B, 30B-A3B."""
    import transformers

    content = released(name, quantization_config=..., auto_map=..., model_type=...)
    found = architecture(released(name), "config.json")
    with torch.device("meta"):
        config = getattr(transformers, f"{class_name}Config")(**content)
        theirs = getattr(transformers, f"{class_name}ForCausalLM")(config)
    assert num_parameters(found.model, found.vocab_size) == theirs.num_parameters()
    assert num_parameters(found.model, found.vocab_size) == pytest.approx(total, rel=0.01)
    assert active_parameters(found.model, found.vocab_size) == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2", "moonlight_16b_a3b", "glm_4_7_flash"])
def test_what_has_not_changed_is_written_as_it_was(name: str) -> None:
    content = released(name, quantization_config=...)
    now = ModelConfig.model_validate(nested(architecture(content, "config.json").values))
    assert write_back(content, now, "config.json", dtype="bfloat16", seq_length=None) == content


def test_a_longer_yarn_is_written() -> None:
    content = released("deepseek_v3", quantization_config=...)

    def back(**changes: Any) -> dict[str, Any]:
        now = ModelConfig.model_validate(nested(architecture(content, "config.json").values | changes))
        return write_back(content, now, "config.json", dtype="bfloat16", seq_length=None)

    longer = back(**{"rope.factor": 80.0})["rope_scaling"]
    assert (longer["factor"], longer["attention_factor"], longer["mscale_all_dim"]) == (80.0, 1.0, 1.0)
    assert longer["mscale"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "changes,why",
    [
        (dict(scoring_func="softmax"), 'scoring_func = "softmax" is not supported'),
        (dict(topk_method="greedy"), 'topk_method = "greedy" is not supported'),
        (dict(attention_bias=True), "attention_bias = true is not supported"),
        (dict(qk_rope_head_dim=63), "qk_rope_head_dim"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], why: str) -> None:
    assert why in refusal(released("deepseek_v3", **changes))


def test_the_layers_of_glm_4_7_flash(tmp_path: Path) -> None:
    source = hf.save(
        tmp_path / "source", "glm4_moe_lite", num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "sparse"]
    )
    model = architecture(open_source(source).content, "config.json").model
    assert model.moe.dense_layers == 1
    content = open_source(source).content | {"mlp_layer_types": ["sparse", "dense", "sparse"]}
    assert "is not a list of dense layers and then sparse ones" in refusal(content)
