"""Laguna, MiMo-V2-Flash, Step-3.7, ERNIE 4.5 and Hunyuan v1: what the config.json of the released models means.

Numbers of parameters are compared with the published ones.
"""

from operator import attrgetter
from typing import Any

import pytest
from pytest import approx

from sft.config import RopeConfig
from sft.config.full_attention import FullAttentionConfig
from sft.hf.families import FAMILIES
from sft.layers.flops import active_parameters, num_parameters
from sft.layers.kernel_rates import BLACKWELL, FLASH3, FLASH4, HOPPER, fastest_first
from sft.layers.kinds import describe, model_of_kind
from sft.layers.split_sizes import SplitSizes
from tests.unit.fixtures.hf import back, model_of, refusal
from tests.unit.hf.own_windows import ERNIE, HUNYUAN, LAGUNA, MIMO, STEP


def step(**values: Any) -> dict[str, Any]:
    return STEP | {"text_config": STEP["text_config"] | values}


WINDOWS = [number for number in range(1, 46) if number % 4 != 1]
VALUES: list[tuple[dict[str, Any], dict[str, Any], float, float]] = [
    (LAGUNA, {
        **dict(num_attention_heads=64, resolved_query_groups=8, sliding_window=512, attention_head_gate="softplus"),
        "full_attention": FullAttentionConfig(num_attention_heads=48),
        "rope": RopeConfig(
            base=5e5, fraction=0.5, window_base=1e4, window_fraction=1.0, scaling="yarn", factor=32.0,
            original_max_position=4096, beta_fast=64.0,
        ),
        **{"moe.dense_layers": 1, "moe.scaling_factor": 2.5, "sliding_window_layers": WINDOWS[:30]},
    }, 33.4e9, 3.0e9),
    (MIMO, {
        **dict(num_attention_heads=64, num_query_groups=8, head_dim=192, value_head_dim=128, sliding_window=129),
        "full_attention": FullAttentionConfig(num_query_groups=4, sinks=False),
        **dict(attention_sinks=True, value_multiplier=0.707, rotary_dim=64, norm_epsilon=1e-5),
        **{"rope": RopeConfig(base=5e6, fraction=0.334, window_base=1e4), "moe.shared_ffn_hidden_size": None},
        "sliding_window_layers": [n for n in range(2, 49) if n % 6],
    }, 309e9, 15e9),
    (STEP, {
        **dict(num_attention_heads=96, num_query_groups=8, norm_zero_centered=True, attention_head_gate="sigmoid"),
        "full_attention": FullAttentionConfig(num_attention_heads=64),
        "rope": RopeConfig(
            base=5e6, fraction=0.5, window_base=1e4, window_fraction=1.0, scaling="llama3", factor=2.0,
            original_max_position=131072, high_freq_factor=32.0,
        ),
        **{"moe.dense_layers": 3, "moe.num_experts": 288, "moe.top_k": 8, "sliding_window_layers": WINDOWS[:33]},
        **{"swiglu_limits": [0.0] * 44 + [16.0], "moe.swiglu_limits": [0.0] * 43 + [7.0, 7.0]},
    }, 196e9, 11e9),
    (ERNIE, {
        **{"moe.score_function": "softmax", "moe.correction_bias": True, "moe.shared_ffn_hidden_size": 3072},
        **{"moe.dense_layers": 1, "rope": RopeConfig(base=5e5, interleaved=True), "tie_embeddings": True},
    }, 21.8e9, 3.0e9),
    (HUNYUAN, {
        **{"qk_norm_after_rotary": True, "moe.top_k": 8, "moe.shared_ffn_hidden_size": 3072},
        "rope.base": approx(1e4 * 1000 ** (128 / 126)),
    }, 80.4e9, 13e9),
]  # fmt: skip


@pytest.mark.parametrize("content,values,total,active", VALUES, ids=[content["model_type"] for content, *_ in VALUES])
def test_what_a_released_config_means(
    content: dict[str, Any], values: dict[str, Any], total: float, active: float
) -> None:
    model = model_of(content)
    assert {key: attrgetter(key)(model) for key in values} == values
    assert num_parameters(model, model.vocab_size or 0) == approx(total, rel=0.02)
    assert active_parameters(model, model.vocab_size or 0) == approx(active, rel=0.12)
    assert back(content, dtype="float32") == content  # an export changes nothing


def test_step_3_5_is_the_language_model_of_step_3_7() -> None:
    flat = {"model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"], **STEP["text_config"]}
    assert model_of(flat) == model_of(STEP) and back(flat, dtype="float32") == flat
    families = FAMILIES["step3p5"], FAMILIES["step3p7"]
    assert families[0].rules == families[1].rules and families[0].passes_through("model.layers.45.a", 45)


def test_each_kind_of_layer_has_its_heads() -> None:
    model = model_of(LAGUNA)
    own = model_of_kind(model, "full attention"), model_of_kind(model, "window attention")
    sizes = [(kind.num_attention_heads, kind.rotary_dim, kind.rope.base) for kind in own]
    assert sizes == [(48, 64, 5e5), (64, 128, 1e4)]
    assert SplitSizes.of(model).heads["model.full_attention.num_attention_heads"] == 48
    assert "full attention of 48 heads, 8 keys of 128" in str(describe(model))
    window = model_of_kind(model_of(MIMO), "window attention")
    assert (window.attention_sinks, window.resolved_query_groups, window.rotary_dim) == (True, 8, 64)
    assert not model_of_kind(model_of(MIMO), "full attention").attention_sinks


def test_narrow_values_of_groups_have_no_kernel_of_flash_attention_4_on_hopper() -> None:
    """Latent attention has a key head for each query head, and so that kernel."""
    names = {grouped: [name for name, _ in fastest_first(HOPPER, 192, 128, is_grouped=grouped)] for grouped in (0, 1)}
    assert FLASH4 in names[0] and FLASH4 not in names[1] and FLASH3 in names[1]
    assert fastest_first(BLACKWELL, 192, 128, is_grouped=True)[0][0] == FLASH4


@pytest.mark.parametrize(
    "content,why",
    [
        (LAGUNA | {"num_attention_heads_per_layer": [48, 64, 64, 32] * 10}, "sliding_attention 32 and 64 heads"),
        (LAGUNA | {"gating": "per-element"}, "gates of single numbers of a head, is not supported"),
        (LAGUNA | {"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping"),
        (MIMO | {"hybrid_layer_pattern": [0, 1] * 24}, "but transformers computes"),
        (MIMO | {"swa_num_key_value_heads": 16}, "is not twice num_key_value_heads"),
        (MIMO | {"swa_rope_theta": 5e4}, "swa_rope_theta"),
        (MIMO | {"sliding_window_size": "128"}, "sliding_window_size = 128 is no number of tokens"),
        (step(rope_theta=[5e6]), "has lists or groups that do not fit its 45 layers"),
        (step(swiglu_limits=7.0), "is not a list of numbers"),
        (step(attention_other_setting=[96]), "is not a group of values"),
        (step(sparse_attention_config={"sparse_topk_blocks": 16}), "sparse_attention_config"),
        (ERNIE | {"moe_layer_end_index": 20}, "only the first layers can be without experts"),
        (HUNYUAN | {"moe_topk": [8] * 31 + [4]}, "moe_topk differs between layers"),
        (HUNYUAN | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_type = "dynamic" is not supported'),
    ],
)  # fmt: skip
def test_what_no_kind_of_layer_can_be_is_refused(content: dict[str, Any], why: str) -> None:
    assert why in refusal(content)
