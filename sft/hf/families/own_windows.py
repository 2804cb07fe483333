"""Declares families whose layers with a window differ in heads or positions from the others: Laguna, MiMo-V2-Flash.

    model_type      layers with a window (their base also differs)    all layers
    laguna          other number of query heads; whole heads rotated  a softplus gate for each head; a shared expert
    mimo_v2_flash   twice the key heads; sinks                        values narrower than keys, times a factor

transformers ignores the keys of layers in files of MiMo-V2-Flash that its authors released (`hybrid_layer_pattern`,
`swa_num_key_value_heads`, ...) and computes fixed values, so other values are refused.  The block for multi-token
prediction of these files (`model.mtp.*`) is passed through.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.hf.families.routed import ROUTER_KEYS, SIGMOID, dense_layers, layer_rules
from sft.hf.families.rules import (
    DEFAULTS,
    EXPERT_KEYS,
    KEYS,
    NO_BIAS,
    OPTIONS,
    attention,
    correction_bias,
    experts,
    head_gated_attention,
    mlp,
    outer,
    qk_norm,
    qkv_bias,
    shared_expert,
    sinks,
)
from sft.hf.families.windows import FULL, SLIDING, all_but_every, where_listed
from sft.hf.family import Family
from sft.hf.model_keys import Computed

Sizes = Mapping[str, int | None]  # a size of layers without and with a window, by their names in layer_types


def by_kind(key: str, source: str, windows: dict[str, Computed], sizes: Any) -> dict[str, Computed]:
    """The computed keys `key` and full_attention.`key`, for a size that depends on whether a layer has a window.

    The first key has the size of layers with a window, and the second that of the other layers, or None if it is equal.
    If all layers are of one kind, the first key has their size.
    source: key of config.json for messages
    windows: the family's computed keys sliding_window and sliding_window_layers
    sizes: function of the content of config.json that returns `Sizes`
    """

    def read(content: Mapping[str, Any]) -> int | None:
        size: int | None = sizes(content)[SLIDING if _kinds(content, windows)[1] else FULL]
        return size

    def read_full(content: Mapping[str, Any]) -> int | None:
        own = sizes(content)
        return own[FULL] if all(_kinds(content, windows)) and own[FULL] != own[SLIDING] else None

    return {key: Computed(source, read), f"full_attention.{key}": Computed(source, read_full)}


def _kinds(content: Mapping[str, Any], windows: Mapping[str, Computed]) -> tuple[bool, bool]:
    """Whether the model has layers without a window, and whether it has layers with one."""
    is_used = windows["sliding_window"].read(content) is not None
    return not is_used or windows["sliding_window_layers"].read(content) is not None, is_used


_BY_LAYER, _FACTOR = "num_attention_heads_per_layer", "routed_scaling_factor"
_MIMO_COMPUTED = ("num_query_groups", "moe.scaling_factor", "moe.dense_layers")


def _listed_heads(content: Mapping[str, Any]) -> Sizes:
    """The number of query heads of each kind of layer.

    {"num_attention_heads_per_layer": [48, 64], "layer_types": ["full_attention", "sliding_attention"], ...}
    -> {"full_attention": 48, "sliding_attention": 64}
    """
    count, heads = content.get("num_hidden_layers"), content.get("num_attention_heads", 48)
    by_layer, kinds = content.get(_BY_LAYER), content.get("layer_types")
    if by_layer is None:
        return dict.fromkeys((FULL, SLIDING), heads)
    kinds = [FULL] * len(by_layer) if kinds is None else kinds
    if not isinstance(by_layer, list) or len(by_layer) != count or len(kinds) != count:
        raise ValueError(f"{_BY_LAYER} and layer_types are not lists with one entry for each of {count} layers")
    sizes = {kind: {number for number, own in zip(by_layer, kinds) if own == kind} for kind in (FULL, SLIDING)}
    for kind in (kind for kind, numbers in sizes.items() if len(numbers) > 1):
        numbers = sorted(map(str, sizes[kind]))
        raise ValueError(
            f"{_BY_LAYER} gives layers of type {kind} {' and '.join(numbers)} heads, but only layers of different "
            "types can differ in heads"
        )
    return {kind: next(iter(numbers), None) for kind, numbers in sizes.items()}


_LAGUNA_WINDOWS = where_listed(512)
_SIZE, _SCALE = "sliding_window_size", "attention_value_scale"


def _released_window(computed: Computed) -> Computed:
    """The computed key, which also reads sliding_window_size of released files of MiMo-V2-Flash.

    sliding_window_size does not count the token itself, so it is the size of the window less 1.  Refuses a
    hybrid_layer_pattern that differs from the layers that transformers computes.
    """

    def read(content: Mapping[str, Any]) -> Any:
        size, count, kinds = content.get(_SIZE), content.get("num_hidden_layers"), content.get("hybrid_layer_pattern")
        if size is not None and type(size) is not int:
            raise ValueError(f"{_SIZE} = {size} is no number of tokens")
        own = dict(content) if size is None else {**content, "sliding_window": size + 1}
        value = computed.read(own)
        if kinds is not None and "layer_types" not in content and type(count) is int:
            expected = [int(number > 1 and number % 6 > 0) for number in range(1, count + 1)]
            if not isinstance(kinds, list) or kinds[:count] != expected:
                raise ValueError(f"hybrid_layer_pattern = {kinds}, but transformers computes {expected}")
        return value

    def write(value: Any, count: int) -> dict[str, Any]:
        changed = computed.write(value, count)
        return changed | ({_SIZE: value - 1} if "sliding_window" in changed and value is not None else {})

    return replace(computed, read=read, write=write)


def _doubled_keys(content: Mapping[str, Any]) -> Sizes:
    """The number of key heads of each kind of layer: {"num_key_value_heads": 4} -> 4, and 8 in layers with a window"""
    groups = content.get("num_key_value_heads", 4)
    if type(groups) is not int:
        raise ValueError(f"num_key_value_heads = {groups} is no number of heads")
    if content.get("swa_num_key_value_heads") not in (None, 2 * groups):
        raise ValueError(f"swa_num_key_value_heads is not twice num_key_value_heads = {groups}, as transformers has it")
    return {FULL: groups, SLIDING: 2 * groups}


_MIMO_WINDOWS = {key: _released_window(own) for key, own in all_but_every(6, default=129, starts_full=True).items()}

OWN_WINDOWS = (
    Family(
        model_type="laguna",
        class_name="LagunaForCausalLM",
        rules=(
            *outer(),
            *head_gated_attention(),
            *qk_norm(),
            *layer_rules("dense", *mlp()),
            *layer_rules(
                "experts",
                *experts("mlp", "gate_proj", "up_proj", "down_proj"),
                *correction_bias("mlp.experts"),
                *shared_expert(gate=None),
            ),
        ),
        implied={
            **SIGMOID,
            "qkv_bias": False,
            "qk_norm": True,
            "attention_head_gate": "softplus",
            "moe.normalize_top_k": True,
        },
        keys={
            **{key: name for key, name in {**KEYS, **EXPERT_KEYS}.items() if name != "norm_topk_prob"},
            "moe.shared_ffn_hidden_size": "shared_expert_intermediate_size",
            "moe.scaling_factor": "moe_routed_scaling_factor",
        },
        computed={
            **_LAGUNA_WINDOWS,
            **by_kind("num_attention_heads", _BY_LAYER, _LAGUNA_WINDOWS, _listed_heads),
            "moe.dense_layers": dense_layers(),
        },
        defaults={
            **DEFAULTS,
            "vocab_size": 100_352,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "moe_routed_scaling_factor": 1.0,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        options={
            **{key: values for key, values in {**OPTIONS, **NO_BIAS}.items() if key != "auto_map"},
            "gating": (True, "per-head"),
            "moe_apply_router_weight_on_input": (False,),
            "moe_router_logit_softcapping": (0.0,),
        },
        lacks={"gating": "gates of single numbers of a head"},
        rope_by_layer_type=True,
        rope_fraction=1.0,
    ),
    Family(
        model_type="mimo_v2_flash",
        class_name="MiMoV2FlashForCausalLM",
        rules=(
            *outer(),
            *attention(),
            *qkv_bias(needs="qkv_bias"),
            *sinks("attention_sink_bias", kind="window attention"),
            *layer_rules("dense", *mlp()),
            *layer_rules("experts", *experts("mlp", "gate_proj", "up_proj", "down_proj"), *correction_bias("mlp.gate")),
        ),
        implied={**SIGMOID, "qk_norm": False},
        keys={
            **{key: name for key, name in {**KEYS, **ROUTER_KEYS}.items() if key not in _MIMO_COMPUTED},
            **{"value_head_dim": "v_head_dim", "qkv_bias": "attention_bias"},
        },
        computed={
            **_MIMO_WINDOWS,
            **by_kind("num_query_groups", "num_key_value_heads", _MIMO_WINDOWS, _doubled_keys),
            "attention_sinks": Computed("layer_types", lambda content: _kinds(content, _MIMO_WINDOWS)[1]),
            "full_attention.sinks": Computed("layer_types", lambda content: not all(_kinds(content, _MIMO_WINDOWS))),
            "value_multiplier": Computed(_SCALE, lambda content: content.get(_SCALE, 0.707) or 1.0),
            "moe.scaling_factor": Computed(_FACTOR, lambda content: content.get(_FACTOR) or 1.0),
            "moe.dense_layers": dense_layers(),
        },
        aliases={"n_routed_experts": "num_local_experts"},
        defaults={
            **DEFAULTS,
            "vocab_size": 152_576,
            "rms_norm_eps": 1e-5,
            "head_dim": 192,
            "v_head_dim": 128,
            "attention_bias": False,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 5e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        options={
            **{key: values for key, values in OPTIONS.items() if key != "auto_map"},
            **{"rope_theta": (5e6,), "swa_rope_theta": (1e4,)},  # keys of files without rope_parameters
            **{"add_full_attention_sink_bias": (False,), "add_swa_attention_sink_bias": (True,)},
            **{"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "n_shared_experts": (None, 0)},
        },
        rope_by_layer_type=True,
        rope_fraction=0.334,
        passed_through=("model.mtp.*",),
    ),
)
