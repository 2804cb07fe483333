"""Declares ERNIE 4.5 and Hunyuan v1, whose rotary positions differ from those of Llama.  Both have an MLP or experts.

ERNIE 4.5    elements 0 and 1 of a head are rotated as a pair, then 2 and 3; routers: softmax scores, a correction bias
Hunyuan v1   queries and keys are normalised after the rotation; `alpha` of rope_scaling changes the rotary base
"""

from collections.abc import Mapping
from typing import Any

from sft.hf.families.routed import layer_rules
from sft.hf.families.rules import (
    DEFAULTS,
    KEYS,
    OPTIONS,
    attention,
    attention_output_bias,
    experts,
    mlp,
    optional_biases,
    outer,
    qk_norm,
    qkv_bias,
    shared_expert,
)
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_BIASES = ("qkv_bias", "attention_output_bias")
_ERNIE: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
    "use_bias": False,
}
_START, _END, _SHARED = "moe_layer_start_index", "moe_layer_end_index", "moe_num_shared_experts"


def _ernie_dense(content: Mapping[str, Any]) -> int:
    """The number of layers without experts, which must be the first layers: {"moe_layer_start_index": 1} -> 1"""
    start, end, count = content.get(_START, 1), content.get(_END, -1), content.get("num_hidden_layers")
    if type(start) is not int or end not in (-1, None) and type(count) is int and end < count - 1:
        raise ValueError(f"{_START} = {start} and {_END} = {end}: only the first layers can be without experts")
    return start


def _ernie_shared(content: Mapping[str, Any]) -> int | None:
    """The width of the MLP that computes all shared experts together; None if there are no shared experts."""
    width, number = content.get("moe_intermediate_size", 1536), content.get(_SHARED, 2)
    return width * number or None if type(width) is int and type(number) is int else None


def _ernie_bias() -> Rule:
    view = View(f"model.layers.{LAYER}.mlp.moe_statics.e_score_correction_bias", "0 x")
    return Rule("decoder.layers.mlp.router.expert_bias", (view,), is_buffer=True)


def _with_base(content: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the dynamic positions of Hunyuan by default positions with the base that `alpha` gives.

    base = rope_theta * alpha ^ (head_dim / (head_dim - 2))
    head_dim 128, {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 1000.0}} -> base 1.12e7
    Returns other positions unchanged.
    """
    group = content.get("rope_scaling") or content.get("rope_parameters")
    if not isinstance(group, dict) or group.get("rope_type", group.get("type")) != "dynamic":
        return dict(content)
    hidden, heads = content.get("hidden_size"), content.get("num_attention_heads")
    alpha: Any = group.get("alpha")
    width = content.get("head_dim") or (type(hidden) is int and type(heads) is int and hidden // max(heads, 1))
    plain = group.get("rope_theta", content.get("rope_theta", 1e4))
    if not all(isinstance(x, (int, float)) and x > 0 for x in (alpha, plain)) or type(width) is not int or width <= 2:
        return dict(content)  # not the positions of Hunyuan; the caller refuses type dynamic
    base = plain * alpha ** (width / (width - 2))
    new = {**content, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    return new | dict.fromkeys({"rope_theta", "rope_scaling"} & new.keys())


def _one_for_all(name: str, default: int) -> Computed:
    """A computed value: the key `name`, a number or a list of equal numbers, one for each layer: [8, 8, 8] -> 8"""

    def read(content: Mapping[str, Any]) -> int:
        value = content.get(name, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise ValueError(f"{name} differs between layers: {value}")
        number: int = values.pop()
        return number

    return Computed(name, read)


_HUNYUAN: dict[str, Any] = {
    "implied": {"qk_norm": True, "qk_norm_after_rotary": True},
    "renewed": _with_base,
}
_HUNYUAN_ATTENTION = (
    *attention(),
    *qkv_bias(needs="qkv_bias"),
    *attention_output_bias(needs="attention_output_bias"),
    *qk_norm(names=("query_layernorm", "key_layernorm")),
)
_HUNYUAN_KEYS = {**KEYS, **dict.fromkeys(_BIASES, "attention_bias")}
_HUNYUAN_OPTIONS = {**{key: values for key, values in OPTIONS.items() if key != "auto_map"}, "use_cla": (False,)}
_HUNYUAN_DEFAULTS = {**DEFAULTS, "vocab_size": 290_943, "rms_norm_eps": 1e-5, "attention_bias": False}

ROTATED = (
    Family(
        model_type="ernie4_5",
        class_name="Ernie4_5ForCausalLM",
        rules=(*outer(), *attention(), *mlp(), *optional_biases()),
        implied={"qk_norm": False, "moe.num_experts": None, "rope.interleaved": True},
        keys={**KEYS, **dict.fromkeys((*_BIASES, "mlp_bias"), "use_bias")},
        defaults={**DEFAULTS, **_ERNIE, "vocab_size": 103_424, "num_key_value_heads": 2, "head_dim": 128},
        options={key: values for key, values in OPTIONS.items() if key != "auto_map"},
    ),
    Family(
        model_type="ernie4_5_moe",
        class_name="Ernie4_5_MoeForCausalLM",
        rules=(
            *outer(),
            *attention(),
            *layer_rules("dense", *mlp()),
            *layer_rules("experts", *experts("mlp", "gate_proj", "up_proj", "down_proj"), _ernie_bias()),
            *layer_rules("experts", *shared_expert("shared_experts", None, needs="moe.shared_ffn_hidden_size")),
        ),
        implied={
            **{"qkv_bias": False, "qk_norm": False, "rope.interleaved": True},
            **{"moe.correction_bias": True, "moe.normalize_top_k": True},
        },
        keys={
            **KEYS,
            **{"moe.num_experts": "moe_num_experts", "moe.top_k": "moe_k"},
            "moe.ffn_hidden_size": "moe_intermediate_size",
        },
        computed={
            "moe.dense_layers": Computed(_START, _ernie_dense),
            "moe.shared_ffn_hidden_size": Computed(_SHARED, _ernie_shared),
        },
        aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
        defaults={
            **{**DEFAULTS, **_ERNIE, "vocab_size": 103_424, "num_key_value_heads": 4},
            **{"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536},
        },
        options={
            **{key: values for key, values in OPTIONS.items() if key != "auto_map"},
            **{"use_bias": (False,), "moe_layer_interval": (1,)},
        },
        passed_through=("*mtp*",),
    ),
    Family(
        model_type="hunyuan_v1_dense",
        class_name="HunYuanDenseV1ForCausalLM",
        rules=(*outer(), *_HUNYUAN_ATTENTION, *mlp()),
        keys=_HUNYUAN_KEYS,
        defaults=_HUNYUAN_DEFAULTS,
        options=_HUNYUAN_OPTIONS,
        **{**_HUNYUAN, "implied": {**_HUNYUAN["implied"], "moe.num_experts": None}},
    ),
    Family(
        model_type="hunyuan_v1_moe",
        class_name="HunYuanMoEV1ForCausalLM",
        rules=(
            *outer(),
            *_HUNYUAN_ATTENTION,
            *experts("mlp", "gate_proj", "up_proj", "down_proj", router="gate.wg"),
            *shared_expert("shared_mlp", None),
        ),
        keys={
            **_HUNYUAN_KEYS,
            **{"moe.num_experts": "num_experts", "moe.shared_ffn_hidden_size": "intermediate_size"},
        },
        computed={"moe.top_k": _one_for_all("moe_topk", 1)},
        aliases={"num_experts": "num_local_experts"},
        defaults={**_HUNYUAN_DEFAULTS, "num_experts": 1},
        options=_HUNYUAN_OPTIONS,
        **{**_HUNYUAN, "implied": {**_HUNYUAN["implied"], "moe.normalize_top_k": True}},
    ),
)
