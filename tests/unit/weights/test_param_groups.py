"""The weights and adapters of optim.groups: names that match nothing, frozen tensors, tensors in two groups."""

import pytest

from sft.checkpoint.train_state import Conditions, changes
from sft.config.keys import values
from sft.errors import ConfigError
from sft.recipe.load import parse_recipe
from sft.weights.trained import trained_weights
from tests.unit.fixtures import hf
from tests.unit.weights.test_trained_weights import RECIPE

EMBEDDING = "optim.groups=[{params: [embed_tokens], lr_ratio: 0.1}]"
TWO = "optim.groups=[{params: [layers.0.*], lr_ratio: 0.1}, {params: [%s], weight_decay: 0.5}]"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recipe with a Llama whose output weight is its embedding."""
    return RECIPE.format(folder=hf.save(tmp_path_factory.mktemp("models") / "llama", "llama", tied=True))


def groups(text: str, *overrides: str) -> dict[tuple[str, tuple[int, ...]], int]:
    return dict(trained_weights(parse_recipe(text, "a.yaml", overrides).config, hf.VOCAB).groups)


def test_weights_of_each_group(text: str) -> None:
    found = groups(
        text,
        "optim.groups=[{params: [layers.0.self_attn.*], lr_ratio: 2}, {params: [down_proj, model.norm], "
        "weight_decay: 0.5}]",
    )
    assert found == {
        ("decoder.layers.self_attention.linear_qkv.weight", (0,)): 0,
        ("decoder.layers.self_attention.linear_proj.weight", (0,)): 0,
        ("decoder.layers.mlp.linear_fc2.weight", (0,)): 1,
        ("decoder.layers.mlp.linear_fc2.weight", (1,)): 1,
        ("decoder.final_layernorm.weight", ()): 1,
    }


def test_adapters_and_weights_beside_them(text: str) -> None:
    two = "optim.groups=[{params: [layers.0.*_proj], lr_ratio: 2.0}, {params: [embed_tokens], weight_decay: 0.0}]"
    assert groups(text, "lora={rank: 2, targets: [q_proj, up_proj], train_embeddings: true}", two) == {
        ("model.layers.0.self_attn.q_proj", ()): 0,
        ("model.layers.0.mlp.up_proj", ()): 0,
        ("embedding.word_embeddings.weight", ()): 1,
    }


@pytest.mark.parametrize(
    "given,overrides,message",
    [
        (
            "lm_head",
            [],
            "names 'lm_head', but the output weight of this model is its embedding (model.tie_embeddings).",
        ),
        ("embed_token", [], "names 'embed_token', which matches no tensor of this model.  Nearest: embed_tokens."),
        (
            "q_proj",
            [],
            "names model.layers.0.self_attn.q_proj.weight, but not model.layers.0.self_attn.k_proj.weight, ",
        ),
        ("layers.0.*", ["train.freeze=[layers.0.*]"], "names 'layers.0.*', but the run does not train model.layers.0."),
        (
            "mlp.*",
            ["lora={rank: 2, targets: [q_proj]}"],
            "names 'mlp.*', but the run does not train model.layers.0.mlp.",
        ),
    ],
)
def test_names_that_mean_nothing(text: str, given: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        groups(text, f'optim.groups=[{{params: ["{given}"], lr_ratio: 0.1}}]', *overrides)
    assert str(error.value).startswith(f"optim.groups[0] {message}")


def test_a_tensor_in_two_groups(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"groups\[1\] names 'o_proj', which matches .*, but optim.groups\[0\] has it"
    ):
        groups(text, TWO % "o_proj")


def test_weight_decay_of_norms(text: str) -> None:
    with pytest.raises(ConfigError, match="has only biases and norms, which have no weight decay"):
        groups(text, TWO % "model.norm")


@pytest.mark.parametrize(
    "group,message",
    [
        ("{params: [norm]}", "has a group that sets nothing; give it lr_ratio or weight_decay."),
        (
            "{lr_ratio: 2.0}",
            "[0].params is missing (command line: optim.groups=[{lr_ratio: 2.0}]); expected a list of na",
        ),
        ("{params: [norm], lr_ratio: 0}", "}]); expected a number above 0.0."),
        ("{params: norm, lr_ratio: 2.0}", "}]); expected a list of names, not empty."),
        ("{params: [norm], lr: 1e-5}", "Did you mean lr_ratio?"),
        ("norm", "expected a list, each a group of the keys params, lr_ratio, weight_decay."),
    ],
)
def test_bad_values(text: str, group: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_recipe(text, "a.yaml", [f"optim.groups=[{group}]"])
    assert message in str(error.value)


def test_a_resumed_run_reports_other_groups(text: str) -> None:
    before, now = (
        Conditions(plan={}, recipe=values(parse_recipe(text, "a.yaml", given).config), layout={}, versions={})
        for given in ([], [EMBEDDING])
    )
    found = changes(vars(before), now, [])
    assert not found.refused and found.reported == [
        "optim.groups was [], is [{'params': ['embed_tokens'], 'lr_ratio': 0.1, 'weight_decay': None}]"
    ]
    assert not changes(vars(now), now, []).reported
