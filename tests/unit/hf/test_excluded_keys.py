"""Recipe keys that exclude each other, and layers that Transformer Engine lacks."""

import pytest

from sft.errors import ConfigError
from tests.builders import RECIPE, parsed, refusal_lines

WINDOW = "model.sliding_window=8"
WINDOWS = ["model.sliding_window=16", "model.sliding_window_layers=[1]", "model.value_norm=true"]
LINEAR = ["model.linear_attention={layers: [1], num_key_heads: 2, num_value_heads: 2, norm_placement: pre}"]


@pytest.mark.parametrize(
    "overrides,why",
    [
        (["model.rope.skip_layers=[2, 1]"], "model.rope.skip_layers"),
        (["model.rope.skip_layers=[99]"], "names layer 99 of"),
        (["model.rope.query_scale_beta=0.1"], "is required with query_scale_beta"),
        (["model.rope.truncate=false"], "model.rope.truncate.*has no effect without scaling = yarn"),
        (["model.rope.window_base=1e4"], "model.rope.window_base.*has no effect without sliding_window"),
        (["model.rope.scaling=proportional", "model.rope.interleaved=true"], "scaling = proportional"),
        (["model.rope.scaling=proportional", "model.rope.factor=2"], "has no effect with scaling = proportional"),
        (["model.qk_norm=false", "model.qk_norm_across_heads=true"], "has no effect without qk_norm"),
        (["model.qk_norm=false", "model.qk_norm_weights=false"], "qk_norm_weights.*needs qk_norm = true"),
        (["model.final_norm_zero_centered=false"], "final_norm_zero_centered.*needs norm_placement = both"),
        (["model.output_norm_epsilon=1e-8"], "output_norm_epsilon.*has no effect with norm_placement = pre"),
        (["model.embedding_norm=true", "model.embedding_multiplier=2"], "embedding_norm.*embedding_multiplier"),
        ([*LINEAR, "model.norm_placement=both"], "linear_attention.norm_placement.*norm_placement = both"),
        (["model.linear_attention.beta_factor=3"], "beta_factor.*of at most 2.0"),
        (["model.moe.shared_ffn_hidden_size=8"], "has no effect without model.moe.num_experts"),
        (["model.moe.router_bias=true"], "router_bias.*has no effect without model.moe.num_experts"),
        (["model.sliding_window_layers=[1]"], "model.sliding_window_layers.*has no effect without sliding_window"),
        ([WINDOW, "model.sliding_window_layers=[2, 1]"], "must be in increasing order"),
        ([WINDOW, "model.sliding_window_layers=[99]"], "names layer 99 of"),
        ([WINDOW, "model.sliding_window_layers=[]"], "is empty; use sliding_window = null"),
        (["model.full_attention.head_dim=16"], "needs layers of both kinds"),
        ([*WINDOWS, "model.full_attention.num_query_groups=3"], "does not divide"),
        ([*WINDOWS, "model.full_attention.num_attention_heads=7"], "must be a multiple of"),
        ([*WINDOWS, "model.full_attention.sinks=false"], "no effect without attention_sinks"),
        (["model.value_head_dim=4096"], "more than the width of a key"),
        (["model.value_multiplier=2", "model.attention_output_gate=true"], "not supported with attention_output_gate"),
        (["model.rope.window_fraction=0.5"], "no effect without window_base"),
        (["model.swiglu_limits=[1.0]"], "has 1 entries, but num_layers is"),
        (["model.swiglu_limits=[1.0]", "model.activation=geglu"], "no effect with activation = geglu"),
        (["model.qk_norm_after_rotary=true", "model.qk_norm=false"], "needs qk_norm = true"),
        ([*WINDOWS, "model.full_attention.head_dim=7"], "odd"),
        ([*WINDOWS, "model.full_attention.head_dim=16"], "needs rope.window_base"),
        ([*WINDOWS, "model.value_norm=false", "model.full_attention.keys_as_values=true"], "needs value_norm = true"),
        (["model.attention_sinks=true", "attention.backend=te"], "attention.backend.*use portable or auto"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_values_that_exclude_each_other(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parsed(*overrides)


@pytest.mark.parametrize(
    "key,named",
    [
        ("model.value_norm=true", "model.value_norm"),
        ("model.rope.scaling=proportional", "model.rope.scaling = proportional"),
        ("model.attention_sinks=true", "model.attention_sinks"),
        (WINDOW, "model.sliding_window"),
    ],
)
def test_attention_of_transformer_engine_lacks_it(key: str, named: str) -> None:
    """With auto, attention is portable; FP8 is for the modules, which Transformer Engine has for these models, too."""
    lines = refusal_lines(RECIPE, key, "attention.backend=te")
    assert any(f"does not have {named}; use portable" in line for line in lines)
    assert parsed(key, "run.fp8=delayed", "run.precision=bf16", "run.device=auto").config.attention.backend == "auto"


@pytest.mark.parametrize(
    "key",
    ["model.norm_placement=post", "model.activation=geglu", "model.attention_output_bias=true", "model.mlp_bias=true"],
)
def test_attention_of_transformer_engine_beside_other_modules(key: str) -> None:
    assert (
        parsed(key, "attention.backend=te", "run.precision=bf16", "run.device=auto").config.model.portable_only is None
    )
