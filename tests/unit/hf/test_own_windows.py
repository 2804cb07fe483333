"""Laguna, MiMo-V2-Flash, Step-3.7, ERNIE 4.5 and Hunyuan v1: what the config.json of the released models means.

The sizes are those of public descriptions of the models.  Numbers of parameters are compared with the published ones.
"""

from operator import attrgetter
from typing import Any

import pytest
from pytest import approx

from sft.config import RopeConfig
from sft.config.full_attention import FullAttentionConfig
from sft.hf.families import FAMILIES
from sft.layers.flops import active_parameters, num_parameters
from sft.layers.kernel_rates import FLASH3, FLASH4, HOPPER, fastest_first
from sft.layers.kinds import describe, model_of_kind
from sft.layers.split_sizes import SplitSizes
from tests.unit.fixtures.hf import back, model_of, refusal

FULL, WINDOW = "full_attention", "sliding_attention"
EVERY_FOURTH = [FULL, WINDOW, WINDOW, WINDOW]
YARN = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=64.0, beta_slow=1.0)
LAGUNA: dict[str, Any] = {
    **dict(model_type="laguna", num_hidden_layers=40, hidden_size=2048, intermediate_size=8192, vocab_size=100352),
    **dict(num_attention_heads=48, num_key_value_heads=8, head_dim=128, sliding_window=512, gating="per-head"),
    **dict(num_attention_heads_per_layer=[48, 64, 64, 64] * 10, layer_types=EVERY_FOURTH * 10),
    **dict(mlp_layer_types=["dense"] + ["sparse"] * 39, num_experts=256, num_experts_per_tok=8),
    **dict(moe_intermediate_size=512, shared_expert_intermediate_size=512, moe_routed_scaling_factor=2.5),
    "rope_parameters": {
        FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5, **YARN},
        WINDOW: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}
MIMO: dict[str, Any] = {  # with the keys of its authors' own code
    **dict(model_type="mimo_v2_flash", num_hidden_layers=48, hidden_size=4096, intermediate_size=16384),
    **dict(num_attention_heads=64, num_key_value_heads=4, head_dim=192, v_head_dim=128, vocab_size=152576),
    **dict(rope_theta=5000000, swa_rope_theta=10000, partial_rotary_factor=0.334, rope_scaling=None),
    **dict(hybrid_layer_pattern=[int(n > 1 and n % 6 > 0) for n in range(1, 49)], sliding_window_size=128),
    **dict(sliding_window=128, swa_num_key_value_heads=8, attention_value_scale=0.707, attention_bias=False),
    **dict(add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, n_routed_experts=256),
    **dict(moe_intermediate_size=2048, num_experts_per_tok=8, scoring_func="sigmoid", n_shared_experts=None),
    **dict(n_group=1, topk_group=1, topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=None),
}
STEP: dict[str, Any] = {  # lists have 3 entries more, for layers for multi-token prediction
    "model_type": "step3p7",
    "text_config": {
        **dict(num_hidden_layers=45, hidden_size=4096, intermediate_size=11264, vocab_size=128896, head_dim=128),
        **dict(num_attention_heads=64, num_attention_groups=8, sliding_window=512, num_nextn_predict_layers=3),
        **dict(attention_other_setting={"num_attention_heads": 96}, layer_types=EVERY_FOURTH * 12),
        **dict(moe_layers_enum=",".join(map(str, range(3, 45))), moe_num_experts=288, moe_top_k=8),
        **dict(moe_intermediate_size=1280, share_expert_dim=1280, moe_router_scaling_factor=3.0),
        **dict(rope_theta=[5e6, 1e4, 1e4, 1e4] * 12, partial_rotary_factors=[0.5, 1.0, 1.0, 1.0] * 12),
        **dict(swiglu_limits=[0.0] * 43 + [7.0] * 2 + [0.0] * 3, swiglu_limits_shared=[0.0] * 44 + [16.0] + [0.0] * 3),
        "rope_scaling": dict(rope_type="llama3", factor=2.0, original_max_position_embeddings=131072)
        | dict(low_freq_factor=1.0, high_freq_factor=32.0),
    },
}


def step(**values: Any) -> dict[str, Any]:
    return STEP | {"text_config": STEP["text_config"] | values}


ERNIE: dict[str, Any] = {
    **dict(model_type="ernie4_5_moe", num_hidden_layers=28, hidden_size=2560, intermediate_size=12288, moe_k=6),
    **dict(num_attention_heads=20, num_key_value_heads=4, vocab_size=103424, rope_theta=500000, use_bias=False),
    **dict(moe_num_experts=64, moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1),
    **dict(moe_layer_end_index=27, moe_layer_interval=1, tie_word_embeddings=True, rms_norm_eps=1e-5),
}
HUNYUAN: dict[str, Any] = {
    **dict(model_type="hunyuan_v1_moe", num_hidden_layers=32, hidden_size=4096, intermediate_size=3072),
    **dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=128167, num_experts=64, moe_topk=[8] * 32),
    **dict(head_dim=128, rope_theta=10000.0, tie_word_embeddings=True, attention_bias=False),
    "rope_scaling": dict(type="dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0),
}
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


def test_narrow_values_of_groups_have_no_kernel_of_flash_attention_4() -> None:
    """Latent attention has a key head for each query head, and so that kernel."""
    names = {grouped: [name for name, _ in fastest_first(HOPPER, 192, 128, is_grouped=grouped)] for grouped in (0, 1)}
    assert FLASH4 in names[0] and FLASH4 not in names[1] and FLASH3 in names[1]


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
