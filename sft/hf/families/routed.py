"""Declares families whose routers have sigmoid scores and a correction bias.

    model_type   models           shared expert   dense first layers   norms on queries and keys   rotary positions
    glm4_moe     GLM-4.5 to 4.7   yes             yes                  per head, in some models    half of each head
    minimax_m2   MiniMax-M2       no              no                   across heads                half of each head
    solar_open   Solar Open       yes             no                   no                          whole heads
    hy_v3        Hy3              yes             yes                  per head                    whole heads
    exaone_moe   K-EXAONE         yes             yes                  per head                    in windows only
    dots1        dots.llm1        yes             yes                  per head                    whole heads

Files of GLM-4.5 and Hy3 have a layer after the model's last one, for multi-token prediction, and K-EXAONE's have
tensors `mtp.*`.  They are passed through; those of GLM-4.5 may be trained.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from sft.hf.families.rules import (
    DEFAULTS,
    EXPERT_KEYS,
    KEYS,
    NEXT_LAYER,
    NO_BIAS,
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
from sft.hf.families.variants import EXAONE_LAYERS
from sft.hf.families.windows import from_a_layer_on
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import View

_WIDTH, _KINDS = "moe_intermediate_size", "mlp_layer_types"

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
_ROUTER_DEFAULTS = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
SIGMOID = {"moe.score_function": "sigmoid", "moe.correction_bias": True}
_NORMED = {**SIGMOID, "qkv_bias": False, "qk_norm": True}


def layer_rules(mlp: Literal["dense", "experts"], *rules: Rule) -> tuple[Rule, ...]:
    """Limits `rules` to the layers with experts, or to the layers with a dense MLP."""
    return tuple(replace(rule, mlp=mlp) for rule in rules)


def routed(model: str = "model") -> tuple[Rule, ...]:
    """The rules of the dense MLP in the first layers, and of router, experts and shared expert in the other layers."""
    return (*layer_rules("dense", *mlp(model)), *_experts(model))


def _experts(model: str = "model") -> tuple[Rule, ...]:
    return layer_rules(
        "experts",
        *experts("mlp", "gate_proj", "up_proj", "down_proj", model),
        *correction_bias("mlp.gate", model),
        *shared_expert(name="shared_experts", gate=None, model=model),
    )


def _renamed(rules: tuple[Rule, ...], parts: Mapping[str, str]) -> tuple[Rule, ...]:
    """Changes the names of tensors in files.  parts: part of a name in `rules` -> the part that replaces it"""

    def rename(view: View) -> View:
        name = view.name
        for part, own in parts.items():
            name = name.replace(part, own)
        return replace(view, name=name)

    return tuple(replace(rule, views=tuple(map(rename, rule.views))) for rule in rules)


def shared_width(default: int, count: str = "n_shared_experts", default_count: int = 1) -> Computed:
    """A computed value: the width of the MLP that computes all shared experts together.

    {"moe_intermediate_size": 1408, "n_shared_experts": 2} -> 2816
    default: the width of an expert if config.json has no moe_intermediate_size
    count: key of the number of shared experts; default_count: the number if config.json has no such key
    """

    def read(content: Mapping[str, Any]) -> int:
        width, number = content.get(_WIDTH, default), content.get(count, default_count)
        if type(width) is not int or type(number) is not int or number < 1:
            raise ValueError(f"{count} = {number} with {_WIDTH} = {width} is no shared expert")
        return width * number

    return Computed(count, read)


def dense_layers(key: str | None = None, default: int = 1) -> Computed:
    """A computed value: the number of layers without experts, which must be the first layers.

    {"mlp_layer_types": ["dense", "sparse", "sparse"]} -> 1
    key: key of config.json with the number, read if there is no mlp_layer_types; None: there is no such key
    default: the number if config.json has neither key
    """

    def read(content: Mapping[str, Any]) -> int:
        kinds, count = content.get(_KINDS), content.get("num_hidden_layers")
        if kinds is None:
            number = content.get(key, default) if key else default
            if type(number) is not int:
                raise ValueError(f"{key} = {number} is not a number of layers")
            return number
        number = kinds.count("dense") if isinstance(kinds, list) else 0
        if not isinstance(kinds, list) or kinds != ["dense"] * number + ["sparse"] * (len(kinds) - number):
            raise ValueError(f"{_KINDS} is not a list of dense layers and then sparse ones")
        if len(kinds) != count:
            raise ValueError(f"{_KINDS} has {len(kinds)} entries, but num_hidden_layers = {count}")
        return number

    def write(number: int, count: int) -> dict[str, Any]:
        return {_KINDS: ["dense"] * number + ["sparse"] * (count - number)}

    return Computed(_KINDS, read, write)


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
            **{"n_routed_experts": 128, "num_experts_per_tok": 8, _WIDTH: 1408},
            **_ROUTER_DEFAULTS,
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
        implied={**_NORMED, "qk_norm_across_heads": True, "moe.normalize_top_k": True},
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
            # auto_map is accepted: the repositories contain code for the models, but transformers has its own.
            **{key: values for key, values in OPTIONS.items() if key != "auto_map"},
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
    Family(
        model_type="solar_open",
        class_name="SolarOpenForCausalLM",
        rules=(*outer(), *attention(), *qkv_bias(needs="qkv_bias"), *_experts()),
        implied={**SIGMOID, "qk_norm": False},
        keys={
            **{**KEYS, "ffn_hidden_size": _WIDTH},  # there are no dense layers
            **{key: name for key, name in ROUTER_KEYS.items() if key != "moe.dense_layers"},
            "qkv_bias": "attention_bias",
        },
        computed={"moe.shared_ffn_hidden_size": shared_width(1280)},
        aliases={"n_routed_experts": "num_local_experts"},
        defaults={
            **DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1e6,
            "attention_bias": False,
            **{"n_routed_experts": 128, "num_experts_per_tok": 8, _WIDTH: 1280},
            **_ROUTER_DEFAULTS,
        },
        options={**OPTIONS, "use_qk_norm": (False,), "first_k_dense_replace": (0,)},
        rope_fraction=1.0,
    ),
    Family(
        model_type="hy_v3",
        class_name="HYV3ForCausalLM",
        rules=(
            *outer(),
            *attention(),
            *qk_norm(),
            *_renamed(
                routed(),
                {
                    "mlp.gate.weight": "mlp.router.gate.weight",
                    "gate.e_score_correction_bias": "expert_bias",
                    "shared_experts": "shared_mlp",
                },
            ),
        ),
        implied={**_NORMED, "moe.normalize_top_k": True},
        keys={
            **{key: name for key, name in {**KEYS, **EXPERT_KEYS}.items() if key != "moe.normalize_top_k"},
            "moe.scaling_factor": "router_scaling_factor",
        },
        computed={
            "moe.shared_ffn_hidden_size": shared_width(1536, "num_shared_experts"),
            "moe.dense_layers": dense_layers(),
        },
        aliases={"num_experts": "num_local_experts"},
        defaults={
            **DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 11158840.0,
            **{"num_experts": 192, "num_experts_per_tok": 8, _WIDTH: 1536},
            "router_scaling_factor": 2.826,
        },
        options={
            **{**OPTIONS, **NO_BIAS, "mlp_bias": (False,)},
            **dict.fromkeys(("qk_norm", "route_norm", "moe_router_use_sigmoid"), (True,)),
            "moe_router_enable_expert_bias": (True,),
        },
        has_mtp_layers=True,
    ),
    Family(
        model_type="exaone_moe",
        class_name="ExaoneMoeForCausalLM",
        rules=(
            *outer(),
            *attention(),
            *qk_norm(),
            *_renamed(routed(), {"gate.e_score_correction_bias": "e_score_correction_bias"}),
        ),
        implied=_NORMED,
        keys={
            **KEYS,
            **{key: name for key, name in ROUTER_KEYS.items() if key != "moe.dense_layers"},
            "moe.num_experts": "num_experts",
        },
        computed={
            **EXAONE_LAYERS,
            "moe.shared_ffn_hidden_size": shared_width(1024, "num_shared_experts"),
            "moe.dense_layers": dense_layers("first_k_dense_replace"),
        },
        defaults={
            **DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            _WIDTH: 1024,
            **_ROUTER_DEFAULTS,
            "routed_scaling_factor": 2.5,
        },
        options=OPTIONS,
        passed_through=("mtp.*",),
    ),
    Family(
        model_type="dots1",
        class_name="Dots1ForCausalLM",
        rules=(*outer(), *attention(), *qk_norm(), *routed()),
        implied=_NORMED,
        keys={**KEYS, **ROUTER_KEYS},
        computed={"moe.shared_ffn_hidden_size": shared_width(1408), **from_a_layer_on(62, switch=None)},
        aliases={"n_routed_experts": "num_local_experts"},
        defaults={
            **DEFAULTS,
            "num_key_value_heads": 32,
            _WIDTH: 1408,
            **_ROUTER_DEFAULTS,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
        options={**OPTIONS, **NO_BIAS, "scoring_func": ("sigmoid",)},
    ),
)
