"""Declares families whose routers have sigmoid scores and a correction bias: GLM-4.5 to 4.7, and MiniMax-M2.

    model_type   shared expert   dense first layers   norms on queries and keys
    glm4_moe     yes             yes                  per head, in some models
    minimax_m2   no              no                   across heads

Half of each head has rotary positions.  Files of GLM-4.5 have a layer after the model's last one, for multi-token
prediction.  It is passed through, or trained.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from sft.hf.families.rules import (
    DEFAULTS,
    KEYS,
    NEXT_LAYER,
    OPTIONS,
    attention,
    correction_bias,
    experts,
    mlp,
    outer,
    qk_norm,
    qkv_bias,
    shared_expert,
)
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed

_WIDTH, _COUNT, _KINDS = "moe_intermediate_size", "n_shared_experts", "mlp_layer_types"

# Keys of `model` -> keys of config.json, for routers like the one of DeepSeek-V3.
ROUTER_KEYS = {
    "moe.num_experts": "n_routed_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.ffn_hidden_size": _WIDTH,
    "moe.normalize_top_k": "norm_topk_prob",
    "moe.num_groups": "n_group",
    "moe.top_groups": "topk_group",
    "moe.scaling_factor": "routed_scaling_factor",
    "moe.dense_layers": "first_k_dense_replace",
}
SIGMOID = {"moe.score_function": "sigmoid", "moe.correction_bias": True}


def _num_dense(content: Mapping[str, Any]) -> int:
    """The number of layers without experts, which must come first: ["dense", "sparse", "sparse"] -> 1"""
    kinds, count = content.get(_KINDS), content.get("num_hidden_layers")
    if kinds is None:
        return 1
    number = kinds.count("dense") if isinstance(kinds, list) else 0
    if not isinstance(kinds, list) or kinds != ["dense"] * number + ["sparse"] * (len(kinds) - number):
        raise ValueError(f"{_KINDS} is not a list of dense layers and then sparse ones")
    if len(kinds) != count:
        raise ValueError(f"{_KINDS} has {len(kinds)} entries, but num_hidden_layers = {count}")
    return number


def _dense_and_sparse(number: int, count: int) -> dict[str, Any]:
    return {_KINDS: ["dense"] * number + ["sparse"] * (count - number)}


DENSE_FIRST = Computed(_KINDS, _num_dense, _dense_and_sparse)  # moe.dense_layers; without mlp_layer_types one


def layer_rules(mlp: Literal["dense", "experts"], *rules: Rule) -> tuple[Rule, ...]:
    """`rules`, limited to the layers with experts or to the layers with a dense MLP."""
    return tuple(replace(rule, mlp=mlp) for rule in rules)


def routed(model: str = "model") -> tuple[Rule, ...]:
    """The rules of a dense MLP in the first layers, and of router, experts and shared expert in the others."""
    return (
        *layer_rules("dense", *mlp(model)),
        *layer_rules(
            "experts",
            *experts("mlp", "gate_proj", "up_proj", "down_proj", model),
            *correction_bias("mlp.gate", model),
            *shared_expert(name="shared_experts", gate=None, model=model),
        ),
    )


def shared_width(default: int) -> Computed:
    """A computed value: the width of the shared experts, which are one MLP in our model.

    {"moe_intermediate_size": 1408, "n_shared_experts": 2} -> 2816
    default: the width of an expert if config.json has no moe_intermediate_size
    """

    def read(content: Mapping[str, Any]) -> int:
        width, count = content.get(_WIDTH, default), content.get(_COUNT, 1)
        if type(width) is not int or type(count) is not int or count < 1:
            raise ValueError(f"{_COUNT} = {count} with {_WIDTH} = {width} is no shared expert")
        return width * count

    return Computed(_COUNT, read)


ROUTED = (
    Family(
        model_type="glm4_moe",
        class_name="Glm4MoeForCausalLM",
        rules=(
            *outer(),
            *attention(),
            *qkv_bias(needs="qkv_bias"),
            *(replace(rule, needs="qk_norm") for rule in qk_norm()),
            *routed(),
        ),
        implied=SIGMOID,
        keys={**KEYS, **ROUTER_KEYS, "qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        computed={"moe.shared_ffn_hidden_size": shared_width(1408)},
        aliases={"n_routed_experts": "num_local_experts"},
        defaults={
            **DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "attention_bias": False,
            "use_qk_norm": False,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            _WIDTH: 1408,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
        },
        options=OPTIONS,
        rope_fraction=0.5,
        has_mtp_layers=True,
        mtp=NEXT_LAYER,
    ),
    Family(
        model_type="minimax_m2",
        class_name="MiniMaxM2ForCausalLM",
        rules=(
            *outer(),
            *attention(),
            *qk_norm(across_heads=True),
            *experts("block_sparse_moe", "w1", "w3", "w2"),
            *correction_bias("block_sparse_moe"),
        ),
        implied={
            **SIGMOID,
            "qkv_bias": False,
            "qk_norm": True,
            "qk_norm_across_heads": True,
            "moe.normalize_top_k": True,
        },
        keys={**KEYS, "moe.num_experts": "num_local_experts", "moe.top_k": "num_experts_per_tok"},
        aliases={"num_local_experts": "num_experts"},
        defaults={
            **DEFAULTS,
            "rope_theta": 5e6,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        options={
            **{key: values for key, values in OPTIONS.items() if key != "auto_map"},  # transformers has its own code
            "router_jitter_noise": (0.0,),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "shared_intermediate_size": (0, None),
            "sliding_window": (None,),
        },
        rope_fraction=1.0,
        rope_width="rotary_dim",
        has_mtp_layers=True,
    ),
)
