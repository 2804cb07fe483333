"""Declares families whose layers with a window have other heads or positions than the others: Laguna, MiMo-V2-Flash.

    model_type      layers with a window, beside their base     all layers
    laguna          other query heads; whole heads rotated      a softplus gate for each head; a shared expert
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.hf.families.routed import DENSE_FIRST, ROUTER_KEYS, SIGMOID, layer_rules
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
    """The computed keys for a size of layers with a window, and for the size of the other layers.

    key: key below `model`, and below model.full_attention; source: key of config.json for messages
    windows: the computed keys of windows; sizes: content of config.json -> `Sizes`
    If all layers are of one kind, the first size is that of this kind.
    """

    def read(content: Mapping[str, Any]) -> int | None:
        size: int | None = sizes(content)[SLIDING if _kinds(content, windows)[1] else FULL]
        return size

    def read_full(content: Mapping[str, Any]) -> int | None:
        own = sizes(content)
        return own[FULL] if all(_kinds(content, windows)) and own[FULL] != own[SLIDING] else None

    return {key: Computed(source, read), f"full_attention.{key}": Computed(source, read_full)}


def _kinds(content: Mapping[str, Any], windows: Mapping[str, Computed]) -> tuple[bool, bool]:
    """Whether there are layers without a window, and layers with one."""
    is_used = windows["sliding_window"].read(content) is not None
    return not is_used or windows["sliding_window_layers"].read(content) is not None, is_used


_BY_LAYER, _FACTOR = "num_attention_heads_per_layer", "routed_scaling_factor"


def _listed_heads(content: Mapping[str, Any]) -> Sizes:
    """The query heads of each kind of layer: 4 layers, the first without a window, [48, 64, 64, 64] -> 48 and 64"""
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
            "moe.dense_layers": DENSE_FIRST,
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
)
