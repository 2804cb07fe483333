"""A damaged or hostile config.json of any family: wrong types get a ConfigError, and never another error."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from sft.errors import ConfigError
from sft.hf.architecture import architecture
from sft.hf.families import FAMILIES
from sft.hf.family import Family
from sft.hf.nested_config import text_part
from tests.unit.fixtures.hf import back, model_of, refusal

SIZES = dict(num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(vocab_size=96, hidden_size_per_layer_input=0)  # Gemma 4 alone reads the last one
LARGE = 10**4000  # no float can hold it, and Python prints no product of two
WRONG = [None, "x", -1, 0, [[]], [[]] * 4, [{}], {"a": 1}, {"a": [None]}, 1.5, True, [], {}, float("nan"), LARGE]
_ROPE = dict(factor=4.0, original_max_position_embeddings=64)
GROUPS: dict[str, dict[str, Any]] = {  # groups of values, whose members may be wrong, too
    "rope_parameters": dict(rope_type="yarn", rope_theta=1e4, beta_fast=32.0, attention_factor=1.2) | _ROPE,
    "rope_scaling": dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0) | _ROPE,
    "linear_attn_config": dict(kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=4, head_dim=16)
    | dict(short_conv_kernel_size=4),
    "quantization_config": dict(quant_method="fp8", weight_block_size=[128, 128], fmt="e4m3"),
    "per_layer_config": {"3": dict(head_dim=512)},
}
OF_ROPE = ("mscale", "mscale_all_dim", "partial_rotary_factor", "full_attention", "sliding_attention")
ALWAYS = ("rope_parameters", "rope_scaling", "rope_theta", "quantization_config", "architectures", "torch_dtype")


class Recorder(dict[str, Any]):
    """A config.json that notes which keys are read."""

    seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


def silent(family: Family, **changes: Any) -> dict[str, Any]:
    """A config.json with sizes alone, and these changes."""
    if family.text_config == "none":
        return {"model_type": family.model_type, **SIZES, **changes}
    text = {"model_type": family.text_type} if family.text_type else {}
    return {"model_type": family.model_type, "text_config": {**text, **SIZES, **changes}}


def keys_of(family: Family) -> list[str]:
    """The keys of config.json that the family reads."""
    content = Recorder(text_part(silent(family), family))
    content.seen = set()
    for computed in family.computed.values():
        computed.read(content)
    named = {*family.keys.values(), *family.aliases.values(), *family.options, *family.defaults, *SIZES, *ALWAYS}
    return sorted(named | content.seen)


def damaged(family: Family) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key that the family reads, and a config.json in which it is wrong."""
    for key in keys_of(family):
        for value in WRONG:
            yield key, silent(family, **{key: value})
        for name in (*GROUPS.get(key, ()), *(OF_ROPE if key in ("rope_parameters", "rope_scaling") else ())):
            for value in WRONG:
                yield f"{key}.{name}", silent(family, **{key: GROUPS.get(key, {}) | {name: value}})


def test_a_value_of_a_wrong_type_is_a_config_error() -> None:
    """A tenth of all cases, chosen by a fixed seed."""
    choice = random.Random(0)
    others = []
    for name, family in FAMILIES.items():
        for key, content in damaged(family):
            if choice.random() < 0.1:
                try:
                    architecture(content, "config.json")
                except ConfigError:
                    pass
                except Exception as error:
                    others.append(f"{name}: {key}: {error!r}"[:200])
    assert not others, "\n".join(others)


@pytest.mark.parametrize(
    "model_type,changes,problem",
    [
        ("olmo_hybrid", dict(linear_allow_neg_eigval="false"), 'linear_allow_neg_eigval = "false" is neither true nor'),
        ("olmo_hybrid", dict(linear_key_head_dim={"a": 1}), "linear_key_head_dim = {'a': 1} is not a width"),
        ("olmo_hybrid", dict(rope_parameters=-1), "rope_parameters = -1 is not a group of values"),
        ("afmoe", dict(mup_enabled="false"), 'mup_enabled = "false" is neither true nor false'),
        ("afmoe", dict(num_hidden_layers="x"), "num_hidden_layers = x is not a number of layers"),
        ("qwen3", dict(use_sliding_window="false"), 'use_sliding_window = "false" is neither true nor false'),
        ("qwen3", dict(use_sliding_window=True, max_window_layers="x"), "max_window_layers = x is not a number of"),
        ("qwen3", dict(head_dim=LARGE), "0... (head_dim) is too large"),
        ("gemma4_text", dict(per_layer_config="x"), "per_layer_config is not a group of values for each number"),
        ("gemma4_text", dict(enable_moe_block="false"), 'enable_moe_block = "false" is neither true nor false'),
        ("gemma3_text", dict(rope_parameters={"full_attention": [1]}), "rope_parameters.full_attention or .sliding"),
        ("kimi_linear", dict(linear_attn_config="x"), "linear_attn_config is a str, not a group of values"),
        ("kimi_linear", dict(linear_attn_config=dict(num_heads=[])), "linear_num_heads = [] (linear_attention.num_key"),
        ("kimi_linear", dict(layer_types=["linear_attention", []] * 2), "layer_types is not a list of 4 names"),
        ("nemotron_h", dict(layers_block_type=[[]]), "layers_block_type is not a list of linear_attention"),
        (
            "nemotron_h",
            dict(n_routed_experts=16, num_local_experts=8),
            "n_routed_experts = 16 and num_local_experts = 8",
        ),
        ("granitemoehybrid", dict(mamba_d_head="auto", mamba_n_heads=0), "mamba_n_heads = 0, mamba_expand = 2 and"),
        ("granitemoehybrid", dict(mamba_expand=None), "mamba_expand = None and hidden_size = 64 must be integers"),
        ("granitemoehybrid", dict(hidden_size=None), "hidden_size = None must be integers above 0"),
        ("granitemoehybrid", dict(num_local_experts=[]), "num_local_experts = [] (moe.num_experts)"),
        (
            "granitemoehybrid",
            dict(layers_block_type=["mamba", "foo", "attention", "mamba"]),
            "layer_types is not a list of 4 names full_attention, linear_attention, mamba or attention",
        ),
    ],
)
def test_the_problem_names_the_key(model_type: str, changes: dict[str, Any], problem: str) -> None:
    told = refusal(silent(FAMILIES[model_type], **changes))
    assert problem in told, told


def test_an_error_in_a_rule_names_its_key_and_value() -> None:
    """A rule that divides by an integer which no float can hold."""
    told = refusal(silent(FAMILIES["gemma2"], query_pre_attn_scalar=LARGE))
    assert told.startswith(
        "config.json: query_pre_attn_scalar = 1" + "0" * 76 + "... cannot be read; it, or a key that"
    )
    assert told.endswith(
        "(OverflowError: int too large to convert to float); restore the value that the model came with."
    )


def test_two_names_of_one_key_of_nemotron_may_be_equal() -> None:
    nemotron = FAMILIES["nemotron_h"]
    assert model_of(silent(nemotron, n_routed_experts=16, num_local_experts=16)).moe.num_experts == 16
    assert model_of(silent(nemotron, num_local_experts=16)).moe.num_experts == 16
    assert model_of({**silent(nemotron), "": 3}) == model_of(silent(nemotron))
    changed = back(silent(nemotron, mamba_dt_min=0.01), **{"mamba.min_time_step": 0.02})
    assert (changed["mamba_dt_min"], changed["time_step_min"]) == (0.02, 0.02)
