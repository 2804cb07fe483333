"""GLM-4.5 and MiniMax-M2: their config.json as released, what passes through, and what no run may freeze or adapt."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sft.config import ModelConfig, MoeConfig
from sft.hf.architecture import architecture, nested, write_back
from sft.hf.model_family import model_family
from sft.hf.source import open_source
from sft.layers.flops import active_parameters, num_parameters
from sft.weights.trained import unfrozen
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import refusal, released

SIGMOID: dict[str, Any] = dict(score_function="sigmoid", correction_bias=True, top_k=8)


def test_glm_4_5_air_as_released() -> None:
    model = architecture(released("glm_4_5_air"), "config.json").model
    assert model.moe == MoeConfig(
        num_experts=128, ffn_hidden_size=1408, shared_ffn_hidden_size=1408, dense_layers=1, **SIGMOID
    )
    assert (model.qkv_bias, model.attention_output_bias, model.qk_norm) == (True, False, False)
    assert (model.rope.base, model.rotary_dim, model.ffn_hidden_size) == (1e6, 64, 10944)
    assert not model.has_experts(1) and model.has_experts(2) and not model.stacks_layers


def test_minimax_m2_as_released() -> None:
    """Half of each head is rotated, which its file says as a number of dimensions."""
    model = architecture(released("minimax_m2"), "config.json").model
    assert model.moe == MoeConfig(num_experts=256, **SIGMOID)
    assert (model.rotary_dim, model.qk_norm_across_heads, model.resolved_expert_ffn) == (64, True, 1536)


def test_glm_4_6_as_released() -> None:
    """GLM-4.5 and 4.7 have the same sizes."""
    model = architecture(released("glm_4_6"), "config.json").model
    more: dict[str, Any] = dict(dense_layers=3, scaling_factor=2.5)
    assert model.moe == MoeConfig(num_experts=160, ffn_hidden_size=1536, shared_ffn_hidden_size=1536, **more, **SIGMOID)
    assert (model.qkv_bias, model.qk_norm, model.rope.base, model.rotary_dim) == (True, True, 1e6, 64)


@pytest.mark.parametrize(
    "name,family,active",
    [("glm_4_5_air", "glm4_moe", 12e9), ("glm_4_6", "glm4_moe", 32e9), ("minimax_m2", "minimax_m2", 10e9)],
)
def test_parameters_are_as_many_as_in_transformers(name: str, family: str, active: float) -> None:
    """And a token meets about as many as the names of the models say: A12B, A32B, A10B."""
    import transformers

    content = released(name, quantization_config=..., auto_map=...)
    found = architecture(content, "config.json")
    with torch.device("meta"):
        theirs = getattr(transformers, f"{hf.FAMILIES[family]}ForCausalLM")(hf.config_class(family)(**content))
    assert num_parameters(found.model, found.vocab_size) == theirs.num_parameters()
    assert active_parameters(found.model, found.vocab_size) == pytest.approx(active, rel=0.12)


@pytest.mark.parametrize("name", ["glm_4_5_air", "glm_4_6", "minimax_m2"])
def test_what_has_not_changed_is_written_as_it_was(name: str) -> None:
    content = released(name, quantization_config=...)

    def back(**changes: Any) -> dict[str, Any]:
        now = ModelConfig.model_validate(nested(architecture(content, "config.json").values | changes))
        return write_back(content, now, "config.json", dtype="bfloat16", seq_length=None)

    assert back().items() >= content.items()
    longer = back(**{"rope.base": 2e7})
    assert longer["rope_theta"] == 2e7 and longer["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    "name,changes,why",
    [
        (
            "glm_4_5_air",
            dict(n_shared_experts=0),
            "n_shared_experts = 0 with moe_intermediate_size = 1408 is no shared",
        ),
        ("glm_4_5_air", dict(n_group=3), "num_groups) does not cut 128 experts into groups of two or more"),
        ("glm_4_5_air", dict(first_k_dense_replace=46), "leaves no layer of 46 for experts"),
        ("minimax_m2", dict(scoring_func="softmax"), 'scoring_func = "softmax" is not supported'),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], why: str) -> None:
    assert why in refusal(released(name, **changes))


def test_layers_after_the_last_one_pass_through(tmp_path: Path) -> None:
    """The layer for multi-token prediction is a layer by its name."""
    source = hf.save(tmp_path / "source", "glm4_moe")  # two layers
    extra = {f"model.layers.2.{name}.weight": torch.randn(3, 4) for name in ("eh_proj", "mlp.gate", "shared_head.norm")}
    hf.rewrite(source, **{name.replace(".", "/"): tensor for name, tensor in extra.items()})
    opened = open_source(source)
    assert set(opened.names("passed through")) == set(extra)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in opened.names("trained")


def test_a_correction_bias_is_no_weight_that_is_frozen_or_trained(tmp_path: Path) -> None:
    source = hf.save(tmp_path / "source", "glm4_moe")
    found = architecture(open_source(source).content, "config.json")
    weights = unfrozen(["embed_tokens"], found.family, found.model, found.vocab_size)
    assert not any("expert_bias" in weight.key for weight in weights)
    assert any("router.weight" in weight.key for weight in weights)


def test_the_family_of_typed_sizes() -> None:
    sizes = dict(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=8)
    moe: dict[str, Any] = dict(num_experts=4, top_k=2, score_function="sigmoid", correction_bias=True)
    norms: dict[str, Any] = dict(qk_norm=True, qk_norm_across_heads=True)
    found = model_family(ModelConfig.model_validate({**sizes, **norms, "moe": moe}))
    assert found is not None and found.model_type == "minimax_m2"
