"""The table of a layer's weights agrees with the Hugging Face rules, and with counts by hand."""

import json
from math import prod
from pathlib import Path

import pytest

from sft.config import ModelConfig
from sft.config.linear_attention import LinearAttentionConfig
from sft.config.moe import MoeConfig
from sft.hf.architecture import architecture
from sft.hf.families import FAMILIES
from sft.layers import weights
from sft.layers.kinds import layer_groups
from sft.layers.mixers import MIXERS
from sft.layers.weights import sizes_of, weight_of
from tests.unit.fixtures import hf

RELEASED = sorted((Path(hf.__file__).parent / "released").glob("*.json"))
TINY = ModelConfig(num_layers=1, hidden_size=4, ffn_hidden_size=8, num_attention_heads=2)


def in_table(model: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """The shapes that the table gives for the weights of a layer, counted from 1."""
    group = next(group for group in layer_groups(model) if layer in group.numbers)
    sizes = sizes_of(group.model)
    return {weight.key: weight.sizes(sizes) for weight in group.weights}


@pytest.mark.parametrize("file", RELEASED, ids=[file.stem for file in RELEASED])
def test_the_rules_of_a_family_fill_the_table(file: Path) -> None:
    """In each kind of layer, the tensors of the Hugging Face rules are the weights of the table: names and shapes
    agree."""
    config = json.loads(file.read_text())
    opened = architecture(config, file.name)
    model, rows = opened.model, {}
    for mapping in opened.family.mappings(model, 1000):
        if mapping.layer is not None and not mapping.expert:
            key, of_layer_ = weight_of(mapping.parameter).key, rows.setdefault(mapping.layer + 1, {})
            before = of_layer_.get(key, (0,))
            of_layer_[key] = (before[0] + mapping.num_rows, *mapping.row_shape)
    kinds = {(model.kind_of(layer), model.has_experts(layer)): layer for layer in rows}
    assert sorted(rows) == list(range(1, model.num_layers + 1))
    for layer in kinds.values():
        assert rows[layer] == in_table(model, layer)


def test_every_rule_means_a_weight_of_the_table() -> None:
    """Also the rules of families without a released model in this test."""
    for family in FAMILIES.values():
        for rule in family.rules:
            if rule.in_layers:
                weight = weight_of(rule.ours)
                assert weight.is_of_expert is rule.in_experts and weight.is_buffer is rule.is_buffer, rule.ours


def test_softmax_attention_by_hand() -> None:
    """Two heads of width 2, MLP of width 8."""
    assert in_table(TINY, 1) == {
        "self_attention.linear_qkv.layer_norm_weight": (4,),
        "self_attention.linear_qkv.weight": (12, 4),
        "self_attention.linear_proj.weight": (4, 4),
        "mlp.linear_fc1.layer_norm_weight": (4,),
        "mlp.linear_fc1.weight": (16, 4),
        "mlp.linear_fc2.weight": (4, 8),
    }


def test_experts_and_linear_attention_by_hand() -> None:
    """2 key heads of width 3, 4 value heads of width 5, a convolution over 6 tokens; 7 experts of width 9, and a shared
    expert of width 10 with a gate."""
    linear = LinearAttentionConfig(
        layers=[1], num_key_heads=2, key_head_dim=3, num_value_heads=4, value_head_dim=5, conv_kernel=6
    )
    moe = MoeConfig(num_experts=7, top_k=2, ffn_hidden_size=9, shared_ffn_hidden_size=10, shared_gate=True)
    assert in_table(TINY.model_copy(update={"linear_attention": linear, "moe": moe}), 1) == {
        "self_attention.in_proj.layer_norm_weight": (4,),
        "self_attention.in_proj.weight": (6 + 6 + 20 + 20 + 4 + 4, 4),
        "self_attention.conv1d.weight": (6 + 6 + 20, 1, 6),
        "self_attention.A_log": (4,),
        "self_attention.dt_bias": (4,),
        "self_attention.out_norm.weight": (5,),
        "self_attention.out_proj.weight": (4, 20),
        "pre_mlp_layernorm.weight": (4,),
        "mlp.router.weight": (7, 4),
        "mlp.experts.experts.linear_fc1.weight": (18, 4),
        "mlp.experts.experts.linear_fc2.weight": (4, 9),
        "mlp.shared_experts.linear_fc1.weight": (20, 4),
        "mlp.shared_experts.linear_fc2.weight": (4, 10),
        "mlp.shared_experts.gate_weight": (1, 4),
    }


@pytest.mark.parametrize(
    "key, name, split, step",
    [
        ("decoder.layers.mlp.linear_fc1.bias", "mlp.linear_fc1.bias", "rows", 5),
        ("decoder.layers.3.self_attention.in_proj.weight.query", "self_attention.in_proj.weight", "rows", 1),
        ("mtp.layers.0.transformer_layer.mlp.router.weight", "mlp.router.weight", "", 5),
        ("self_attention.linear_kv_down_proj.weight", "self_attention.linear_kv_down_proj.weight", "", 1),
        ("decoder.layers.self_attention.linear_proj.weight", "self_attention.linear_proj.weight", "columns", 3),
    ],
)
def test_keys_of_checkpoints(key: str, name: str, split: str, step: int) -> None:
    weight = weight_of(key)
    assert (weight.key, weight.split, weight.step) == (name, split, step)


@pytest.mark.parametrize(
    "key", ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "mtp.layers.0.enorm.weight"]
)
def test_other_keys_mean_no_weight_of_a_layer(key: str) -> None:
    assert not weights.is_of_layer(key)
    with pytest.raises(AssertionError, match=key):
        weight_of(key)


def test_only_matrices_are_products() -> None:
    for weight in weights.TABLE:
        assert bool(weight.part) is (weight.role == "matrix")
        assert weight.role != "matrix" or len(weight.shape.split()) == 2
        assert weight.writes_residual is (
            weight.module.endswith(("linear_proj", "linear_fc2", "out_proj")) and bool(weight.part)
        )
    assert prod(weight_of("mlp.linear_fc2.weight").sizes(sizes_of(TINY))) == 32


def test_no_two_kinds_of_layers_use_a_letter_for_two_sizes() -> None:
    letters = [letter for mixer in MIXERS.values() for letter in mixer.sizes(TINY)]
    assert len(letters) == len(set(letters))
