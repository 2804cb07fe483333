"""Nemotron-H: the kinds of its layers in config.json, the defaults of absent keys, and sizes of released models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import NemotronHConfig

from sft.config.mamba import MambaConfig
from sft.config.moe import MoeConfig
from sft.hf.families import FAMILIES
from sft.layers.flops import active_parameters, num_parameters
from sft.layers.kinds import describe, layer_groups
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import Make, model_of, refusal, released, tensors

NANO = "nemotron_3_nano_30b_a3b"
SMALL = dict(model_type="nemotron_h", hidden_size=64, vocab_size=100)


def halves(**content: Any) -> tuple[list[int], list[int], list[int], list[int] | None, list[int]]:
    """The layers without a mixer, without an MLP, with Mamba-2, with experts, and without positions."""
    model = model_of(SMALL | content)
    without = model.halves
    return without.without_mixer, without.without_mlp, model.mamba.layers, model.moe.layers, model.rope.skip_layers


@pytest.mark.parametrize(
    "content",
    [
        {"hybrid_override_pattern": "M*E-M"},
        {"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp", "linear_attention"]},
        {"layer_types": ["mamba", "attention", "moe", "mlp", "mamba"], "hybrid_override_pattern": "M"},
    ],
)
def test_the_kinds_of_layers(content: dict[str, Any]) -> None:
    assert halves(**content) == ([3, 4], [1, 2, 5], [1, 5], [3], [2])
    theirs = NemotronHConfig(**{key: value for key, value in content.items()})
    assert theirs.hybrid_override_pattern == "M*E-M"


def test_a_model_without_experts_or_mamba_has_no_keys_of_them() -> None:
    model = model_of(SMALL | {"hybrid_override_pattern": "*-*-", "num_experts_per_tok": 7, "n_groups": 3})
    assert (model.moe, model.mamba) == (MoeConfig(), MambaConfig())
    assert [(group.mixer.kind, list(group.numbers)) for group in layer_groups(model)] == [
        ("full attention", [1, 3]),
        ("no mixer", [2, 4]),
    ]


@pytest.mark.parametrize("kinds", [[], ["linear_attention", "sliding_attention"], 3, "M*"])
def test_other_kinds_are_refused(kinds: Any) -> None:
    wanted = "layers_block_type is not a list of linear_attention, full_attention, moe, mlp, one for each layer"
    assert wanted in refusal(SMALL | {"layers_block_type": kinds})


def test_what_a_silent_config_means_is_what_transformers_takes() -> None:
    model, theirs = model_of(SMALL), NemotronHConfig(hidden_size=64, vocab_size=100)
    assert theirs.hybrid_override_pattern == "ME*-" and model.num_layers == 4
    assert halves() == ([2, 4], [1, 3], [1], [2], [3])
    assert model.norm_epsilon == theirs.layer_norm_epsilon
    assert (model.num_attention_heads, model.resolved_query_groups) == (32, theirs.num_key_value_heads)
    assert (model.resolved_head_dim, model.ffn_hidden_size) == (theirs.head_dim, theirs.intermediate_size)
    moe, mamba = model.moe, model.mamba
    assert (moe.num_experts, moe.top_k) == (theirs.n_routed_experts, theirs.num_experts_per_tok)
    assert (moe.ffn_hidden_size, moe.latent_size) == (theirs.moe_intermediate_size, theirs.moe_latent_size)
    assert moe.shared_ffn_hidden_size == theirs.moe_shared_expert_intermediate_size
    assert (moe.num_groups, moe.top_groups, moe.scaling_factor) == (1, 1, theirs.routed_scaling_factor)
    assert (mamba.num_heads, mamba.head_dim) == (theirs.mamba_num_heads, theirs.mamba_head_dim)
    assert (mamba.num_groups, mamba.state_dim) == (theirs.n_groups, theirs.ssm_state_size)
    assert (mamba.conv_kernel, mamba.min_time_step) == (theirs.conv_kernel, theirs.time_step_min)


def test_the_sizes_of_released_models() -> None:
    """31.6B parameters, 3.6B for a token with the embedding; Super 120.7B and 12.8B (arXiv:2512.20848)."""
    nano = model_of(released(NANO))
    assert (num_parameters(nano, 131_072), active_parameters(nano, 131_072)) == (31_577_937_344, 3_580_073_408)
    assert describe(nano) == (
        "layers 23 with Mamba-2 and no MLP, 23 with an MLP only, "
        "6 with full attention without rotary positions and no MLP"
    )
    sizes = dict(hidden_size=4096, n_routed_experts=512, num_experts_per_tok=22, mamba_num_heads=128)
    sizes |= dict(moe_intermediate_size=2688, moe_latent_size=1024, moe_shared_expert_intermediate_size=5376)
    large = model_of(released(NANO, **sizes, hybrid_override_pattern="ME" * 40 + "*" * 8))
    assert (num_parameters(large, 131_072), active_parameters(large, 131_072)) == (120_668_687_360, 12_770_216_960)


def test_tensors_of_multi_token_prediction_are_passed_through(made: Make) -> None:
    folder = made("nemotron_h")
    names = {"mtp.layers.0.eh_proj.weight", "mtp.layers.0.mixer.q_proj.weight"}
    hf.rewrite(folder, **{name.replace(".", "/"): torch.ones(2, 3) for name in names})
    family = FAMILIES["nemotron_h"]
    passed = {name for name in tensors(folder) if family.passes_through(name, 8)}
    assert passed == names
    assert json.loads(Path(folder / "config.json").read_text())["tie_word_embeddings"] is False
