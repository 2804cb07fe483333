"""Declares Step-3.5 and 3.7: layers with a window have more query heads, and in the last layers SwiGLU has limits.

    attention      a sigmoid gate for each head; norms on queries and keys; weights of all norms are offsets from 1
    positions      half of a head is rotated, but whole heads in layers with a window
    experts        stacked, with separate tensors for gate and up; sigmoid scores; a shared expert

transformers has the multimodal class of 3.7 only; Step-3.5 is its language model.  The vision tower and the layers
after the model's last one, for multi-token prediction, are passed through.  Released files have older keys
(`moe_layers_enum`, lists with a base for each layer), which `_renewed` translates as transformers does.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.config.model import MOST_LAYERS
from sft.errors import ConfigError
from sft.hf.families.own_windows import by_kind
from sft.hf.families.routed import SIGMOID, dense_layers, layer_rules
from sft.hf.families.rules import (
    DEFAULTS,
    EXPERT_KEYS,
    KEYS,
    NO_BIAS,
    OPTIONS,
    head_gated_attention,
    mlp,
    outer,
    qk_norm,
    shared_expert,
)
from sft.hf.families.windows import FULL, SLIDING, where_listed
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_HEADS, _BY_LAYER, _OTHER = "num_sliding_attention_heads", "per_layer_config", "attention_other_setting"
_TYPE, _SCALAR = "step3p7", "query_pre_attn_scalar"
_LAYER, _OURS = f"model.layers.{LAYER}", "decoder.layers.mlp"
_LIMITS = {"moe.swiglu_limits": "swiglu_limits", "swiglu_limits": "swiglu_limits_shared"}
_OLD_NAMES = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
}


def _renewed(text: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the language model with the names and forms of transformers 5.  text: keys as in the file

    Raises ConfigError for lists or groups that do not fit the number of layers.
    """
    count = text.get("num_hidden_layers", 45)
    if type(count) is not int or count > MOST_LAYERS:
        return dict(text)  # `architecture` refuses this number of layers
    try:
        return _translated(text)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"a config.json of {_TYPE} has lists or groups that do not fit its {count} layers ({error}).  The keys of "
            "transformers 5 (layer_types, mlp_layer_types, rope_parameters by type of layer) need no translation."
        ) from None


def _translated(text: Mapping[str, Any]) -> dict[str, Any]:
    count, more = text.get("num_hidden_layers", 45), text.get("num_nextn_predict_layers") or 0
    new = {name: text[old] for name, old in _OLD_NAMES.items() if old in text} | dict(text)
    for name in ("layer_types", "mlp_layer_types", *_LIMITS.values(), "rope_theta", "partial_rotary_factors"):
        if isinstance(values := new.get(name), list) and len(values) == count + more:
            new[name] = values[:count]  # the others belong to layers for multi-token prediction
    kinds = new.setdefault("layer_types", None) or [FULL] * count
    if new.get("mlp_layer_types") is None:
        listed = new.get("moe_layers_enum")
        with_experts = range(3, count) if listed is None else listed.split(",") if isinstance(listed, str) else listed
        numbers = {int(number) for number in with_experts if str(number).strip()}
        new["mlp_layer_types"] = ["sparse" if number in numbers else "dense" for number in range(count)]
    groups = new.get("rope_parameters") or {}
    if not all(isinstance(groups.get(kind), dict) for kind in kinds):
        positions = {kind: _positions(new, kinds.index(kind)) for kind in dict.fromkeys(kinds)}
        positions.get(FULL, {}).update(new.get("rope_scaling") or {})
        new["rope_parameters"] = positions
    return new | dict.fromkeys({"rope_theta", "rope_scaling"} & new.keys())


def _positions(text: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """The rotary positions of a layer, counted from 0."""
    base, parts = text.get("rope_theta", 1e4), text.get("partial_rotary_factors")
    group = {"rope_type": "default", "rope_theta": base[layer] if isinstance(base, list) else base}
    return group | ({"partial_rotary_factor": parts[layer]} if parts else {})


def _heads(content: Mapping[str, Any]) -> dict[str, int | None]:
    """The number of query heads of layers without a window (FULL) and with one (SLIDING)."""
    heads, own = content.get("num_attention_heads"), content.get(_HEADS)
    other, by_layer = content.get(_OTHER) or {}, content.get(_BY_LAYER) or {}
    layers: Any = by_layer.values() if isinstance(by_layer, dict) else [None]
    if not isinstance(other, dict) or not all(isinstance(values, dict) for values in layers):
        raise ValueError(f"{_OTHER} or {_BY_LAYER} is not a group of values")
    windows = other.get("num_attention_heads", heads) if own is None else own
    if not {values.get("num_attention_heads", heads) for values in layers} <= {windows}:
        raise ValueError(f"{_BY_LAYER} has layers with other heads than {_HEADS} = {windows}")
    return {FULL: heads, SLIDING: windows}


def _limits(name: str) -> Computed:
    """A computed value: the limit of SwiGLU in each layer, or [] if no layer has one.

    0 means no limit.  config.json may have null for 0 or for the whole list.  name: key of config.json
    """

    def read(content: Mapping[str, Any]) -> list[float]:
        limits = content.get(name) or []
        if not isinstance(limits, list) or any(not isinstance(limit or 0, (int, float)) for limit in limits):
            raise ValueError(f"{name} is not a list of numbers, one for each layer")
        return [float(limit or 0.0) for limit in limits] if any(limits) else []

    return Computed(name, read)


def _multiplier(content: Mapping[str, Any]) -> float | None:
    """The factor of query-key products, 1 / sqrt(query_pre_attn_scalar); None if it is the usual 1 / sqrt(head_dim)."""
    scalar, width = content.get(_SCALAR), content.get("head_dim", 128)
    if scalar is not None and (not isinstance(scalar, (int, float)) or scalar <= 0):
        raise ValueError(f"{_SCALAR} = {scalar} is not a number above 0")
    return None if scalar is None or scalar == width else float(scalar) ** -0.5


def _experts() -> tuple[Rule, ...]:
    def rule(ours: str, *views: tuple[str, str], is_buffer: bool = False) -> Rule:
        own = tuple(View(f"{_LAYER}.{name}", shape) for name, shape in views)
        return Rule(f"{_OURS}.{ours}", own, is_buffer=is_buffer)

    shared = shared_expert("share_expert", gate=None)
    norm = View(f"{_LAYER}.post_attention_layernorm.weight", "h")
    gate, up = (("moe.gate_proj.weight", "X e h"), ("moe.up_proj.weight", "X e h"))
    return (
        Rule("decoder.layers.pre_mlp_layernorm.weight", (norm,)),
        rule("router.weight", ("moe.gate.weight", "x h")),
        rule("router.expert_bias", ("moe.router_bias", "x"), is_buffer=True),
        rule("experts.experts.linear_fc1.weight", gate, up),
        rule("experts.experts.linear_fc2.weight", ("moe.down_proj.weight", "X h e")),
        *(replace(r, views=tuple(replace(v, name=v.name.replace(".mlp.", ".")) for v in r.views)) for r in shared),
    )


_WINDOWS = where_listed(None)
_STEP = Family(
    model_type=_TYPE,
    class_name="Step3p7ForConditionalGeneration",
    rules=(
        *outer(),
        *head_gated_attention(),
        *qk_norm(),
        *layer_rules("dense", *mlp()),
        *layer_rules("experts", *_experts()),
    ),
    implied={
        **SIGMOID,
        "qkv_bias": False,
        "qk_norm": True,
        "norm_zero_centered": True,
        "attention_head_gate": "sigmoid",
        "moe.normalize_top_k": True,
    },
    keys={
        **{key: name for key, name in {**KEYS, **EXPERT_KEYS}.items() if name != "norm_topk_prob"},
        "moe.num_experts": "n_routed_experts",
        "moe.shared_ffn_hidden_size": "share_expert_dim",
        "moe.scaling_factor": "moe_router_scaling_factor",
    },
    computed={
        **_WINDOWS,
        **by_kind("num_attention_heads", _HEADS, _WINDOWS, _heads),
        **{key: _limits(name) for key, name in _LIMITS.items()},
        "attention_multiplier": Computed(_SCALAR, _multiplier),
        "moe.dense_layers": dense_layers(),
    },
    defaults={
        **DEFAULTS,
        "vocab_size": 128_815,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_router_scaling_factor": 1.0,
    },
    options={
        **{key: values for key, values in {**OPTIONS, **NO_BIAS}.items() if key not in ("auto_map", "hidden_act")},
        "mlp_bias": (False,),
        "use_head_wise_attn_gate": (True,),
        "use_bidirectional_attention": (False,),
        "sparse_attention_config": (None, {}),
    },
    rope_by_layer_type=True,
    rope_fraction=1.0,
    text_config="required",
    renewed=_renewed,
    passed_through=("vision_model.*", "vit_large_projector.*"),
    has_mtp_layers=True,
)

STEP = (
    _STEP,
    # transformers has no class of this name; files of Step-3.5-Flash come with their own code.
    replace(_STEP, model_type="step3p5", class_name="Step3p5ForCausalLM", text_config="none", passed_through=()),
)
