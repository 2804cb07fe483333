"""Layers that lack a half, and lists of layers with experts: what is refused, and what the kinds of layers are."""

import pytest

from sft.layers.flops import num_parameters
from sft.layers.kinds import all_layer_groups
from sft.layers.split_sizes import SplitSizes
from tests.builders import RECIPE, layout_config, parsed, refusal_lines
from tests.unit.fixtures.layouts import TINY

MOE = ("model.moe.num_experts=4", "model.moe.top_k=2")


@pytest.mark.parametrize(
    "overrides, key, reason",
    [
        (["model.halves.without_mlp=[2, 1]"], "model.halves.without_mlp", "must be in increasing order"),
        (["model.halves={without_mlp: [1, 2], without_mixer: [2]}"], "without_mlp", "without_mixer names, too: 2"),
        (["model.halves.without_mixer=[99]"], "model.halves.without_mixer", "names layer 99 of"),
        (["model.halves.without_mixer=[1]", "model.norm_placement=both"], "norm_placement", "must be pre"),
        (
            [
                "model.halves.without_mixer=[1]",
                "model.linear_attention={layers: [2], num_key_heads: 2, num_value_heads: 2, norm_placement: post}",
            ],
            "model.linear_attention.norm_placement",
            "must be pre or null with model.halves",
        ),
        (
            ["model.halves.without_mixer=[1]", "model.sliding_window=8", "model.sliding_window_layers=[1, 2]"],
            "model.sliding_window_layers",
            "halves.without_mixer names, too: 1",
        ),
        ([*MOE, "model.moe.layers=[1]", "model.halves.without_mlp=[1]"], "moe.layers", "without_mlp names, too: 1"),
        ([*MOE, "model.moe.layers=[99]"], "model.moe.layers", "names layer 99 of"),
        ([*MOE, "model.moe.layers=[]"], "model.moe.layers", "not empty"),
        ([*MOE, "model.moe.layers=[2]", "model.moe.dense_layers=1"], "dense_layers", "has no effect with layers"),
        (["model.moe.layers=[1]"], "layers", "has no effect without model.moe.num_experts"),
        ([*MOE, "model.moe.latent_size=8", "model.mlp_bias=true"], "moe.latent_size", "not supported with mlp_bias"),
    ],
)
def test_what_is_refused(overrides: list[str], key: str, reason: str) -> None:
    assert any(key in line and reason in line for line in refusal_lines(RECIPE, *overrides))


def test_the_layers_of_a_model_with_halves() -> None:
    """Layers: attention; experts; an MLP; attention and an MLP; and nothing but attention again."""
    sizes = {"num_layers": 5, "halves": {"without_mlp": [1, 5], "without_mixer": [2, 3]}}
    moe = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 3, "layers": [2]}
    model = layout_config(model={**TINY, **sizes, "moe": moe}).model
    assert not model.stacks_layers
    groups = all_layer_groups(model)
    assert [(group.mixer.kind, type(group.mlp).__name__, list(group.numbers)) for group in groups] == [
        ("full attention", "NoMlp", [1, 5]),
        ("no mixer", "Experts", [2]),
        ("no mixer", "DenseMlp", [3]),
        ("full attention", "DenseMlp", [4]),
    ]
    of_attention, of_experts, of_mlp, of_both = (group.parameters.total for group in groups)
    assert of_both == of_attention + of_mlp
    assert of_experts == 4 + 4 * 4 + 4 * 3 * 3 * 4  # norm, router, and three matrices of each expert
    assert num_parameters(model, 10) == 10 * 4 + 4 + 2 * of_attention + of_experts + of_mlp + of_both
    assert SplitSizes.of(model).by_tp.keys() >= {"model.num_attention_heads", "model.ffn_hidden_size"}


def test_the_layers_of_a_model_with_equal_layers_are_of_the_model_itself() -> None:
    model = parsed().config.model
    (group,) = all_layer_groups(model)
    assert group.model is model and list(group.numbers) == [*range(1, model.num_layers + 1)]
