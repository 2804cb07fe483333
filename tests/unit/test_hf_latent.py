"""DeepSeek-V3, Kimi-K2, Moonlight and GLM-4.7-Flash: what their config.json means, and what passes through."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sft.config import ModelConfig, MoeConfig, RopeConfig
from sft.config.latent_attention import LatentAttentionConfig
from sft.flops import active_parameters, num_parameters
from sft.hf.architecture import architecture, nested, write_back
from sft.hf.source import open_source
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import refusal, released

# What these models change of DeepSeek-V3, by their reports.
MOONLIGHT: dict[str, Any] = dict(num_hidden_layers=27, hidden_size=2048, intermediate_size=11264) | dict(
    moe_intermediate_size=1408, num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, n_shared_experts=2
)
MOONLIGHT |= dict(num_experts_per_tok=6, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=None) | dict(
    routed_scaling_factor=2.446, rope_theta=50000.0, rope_scaling=None, rms_norm_eps=1e-5, vocab_size=163840
)
KIMI_K2: dict[str, Any] = dict(num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384, n_group=1) | dict(
    topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.827, vocab_size=163840, model_type="kimi_k2"
)


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


@pytest.mark.parametrize(
    "changes,total,active", [({}, 671.0e9, 37.6e9), (KIMI_K2, 1.026e12, 32.9e9), (MOONLIGHT, 15.96e9, 2.9e9)]
)
def test_parameters_are_as_many_as_in_transformers(changes: dict[str, Any], total: float, active: float) -> None:
    """And as many as the names of the models say: 671B-A37B, 1T-A32B, 16B-A3B."""
    import transformers

    content = released("deepseek_v3", quantization_config=..., auto_map=...) | changes
    found = architecture(content, "config.json")
    with torch.device("meta"):
        config = transformers.DeepseekV3Config(**{**content, "model_type": "deepseek_v3"})
        theirs = transformers.DeepseekV3ForCausalLM(config)
    assert num_parameters(found.model, found.vocab_size) == theirs.num_parameters()
    assert num_parameters(found.model, found.vocab_size) == pytest.approx(total, rel=0.01)
    assert active_parameters(found.model, found.vocab_size) == pytest.approx(active, rel=0.03)


def test_what_has_not_changed_is_written_as_it_was() -> None:
    content = released("deepseek_v3", quantization_config=...)

    def back(**changes: Any) -> dict[str, Any]:
        now = ModelConfig.model_validate(nested(architecture(content, "config.json").values | changes))
        return write_back(content, now, "config.json", dtype="bfloat16", seq_length=None)

    assert back() == content
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
