"""Declares families in which most layers have linear attention (Gated DeltaNet): Qwen3-Next, Qwen3.5 and successors.

    weights                        Qwen3-Next                       Qwen3.5
    projections of linear layers   in_proj_qkvz and in_proj_ba,     in_proj_qkv, in_proj_z, in_proj_b and in_proj_a
                                   stored key head by key head
    q_proj of attention            query and gate, head by head     query and gate, head by head

The weights of all norms are offsets from 1, except those of the gated norm of linear layers.  A vision tower is passed
through.  The block for multi-token prediction (`mtp.*`) is passed through unless the run trains it.  Qwen3.6 and 3.8
have the model_type of Qwen3.5.
"""

from collections.abc import Mapping
from typing import Any

from sft.config.mixer_section import LayerKind
from sft.hf.families.rules import (
    APART,
    DEFAULTS,
    EXPERT_KEYS,
    KEYS,
    NO_BIAS,
    OPTIONS,
    experts,
    gated_attention,
    mlp,
    outer,
    qk_norm,
    shared_expert,
    stacked_experts,
)
from sft.hf.families.windows import FULL, LINEAR, LINEAR_KINDS, linear_layer_types
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_KIND: LayerKind = "linear attention"
_OURS = "decoder.layers.self_attention"
_TYPES, _INTERVAL = "layer_types", "full_attention_interval"
_KEYS = {
    **KEYS,
    "linear_attention.num_key_heads": "linear_num_key_heads",
    "linear_attention.num_value_heads": "linear_num_value_heads",
    "linear_attention.key_head_dim": "linear_key_head_dim",
    "linear_attention.value_head_dim": "linear_value_head_dim",
    "linear_attention.conv_kernel": "linear_conv_kernel_dim",
}


def _linear_layers(content: Mapping[str, Any]) -> list[int]:
    """The layers with linear attention, counted from 1: {"num_hidden_layers": 8} -> [1, 2, 3, 5, 6, 7]

    Without layer_types, the layers n, 2 n, ... have full attention.  n is full_attention_interval, or 4 if absent.
    """
    count, interval, kinds = content.get("num_hidden_layers"), content.get(_INTERVAL, 4), content.get(_TYPES)
    if type(count) is not int or type(interval) is not int or interval < 1:
        raise ValueError(f"{_INTERVAL} = {interval} and num_hidden_layers = {count} are not both positive integers")
    if kinds is None:
        kinds = [FULL if number % interval == 0 else LINEAR for number in range(1, count + 1)]
    if not isinstance(kinds, list) or len(kinds) != count or LINEAR not in kinds:
        raise ValueError(f"{_TYPES} is not a list of {count} names, one for each layer, with {LINEAR} among them")
    return [number for number, kind in enumerate(kinds, 1) if kind == LINEAR]


_LAYERS = Computed(_TYPES, _linear_layers, linear_layer_types, LINEAR_KINDS)


def _rule(ours: str, *views: View) -> Rule:
    return Rule(f"{_OURS}.{ours}", views, kind=_KIND)


def _linear_attention(model: str, *projections: Rule) -> tuple[Rule, ...]:
    """The rules of linear attention.  projections: the rules of the input projections, which depend on the family"""
    layer = f"{model}.layers.{LAYER}"
    block = f"{layer}.linear_attn"
    channels = [View(f"{block}.conv1d.weight", "K+K+V 1 c", part) for part in range(3)]
    return (
        _rule("in_proj.layer_norm_weight", View(f"{layer}.input_layernorm.weight", "h")),
        *projections,
        *(_rule(f"conv1d.weight.{name}", view) for name, view in zip(("query", "key", "value"), channels)),
        _rule("A_log", View(f"{block}.A_log", "m")),
        _rule("dt_bias", View(f"{block}.dt_bias", "m")),
        _rule("out_norm.weight", View(f"{block}.norm.weight", "u")),
        _rule("out_proj.weight", View(f"{block}.out_proj.weight", "h V")),
    )


def _apart(model: str = "model") -> tuple[Rule, ...]:
    """The rules of linear attention in Qwen3.5, whose projections are separate tensors."""
    block = f"{model}.layers.{LAYER}.linear_attn"
    qkv = [View(f"{block}.in_proj_qkv.weight", "K+K+V h", part) for part in range(3)]
    return _linear_attention(
        model,
        *(_rule(f"in_proj.weight.{name}", view) for name, view in zip(("query", "key", "value"), qkv)),
        _rule("in_proj.weight.z", View(f"{block}.in_proj_z.weight", "V h")),
        _rule("in_proj.weight.beta", View(f"{block}.in_proj_b.weight", "m h")),
        _rule("in_proj.weight.alpha", View(f"{block}.in_proj_a.weight", "m h")),
    )


def _by_key_head(model: str = "model") -> tuple[Rule, ...]:
    """The rules of linear attention in Qwen3-Next, whose joint projections are stored key head by key head."""
    block = f"{model}.layers.{LAYER}.linear_attn"
    qkvz = [View(f"{block}.in_proj_qkvz.weight", "K+K+V+V h", part, blocks="n") for part in range(4)]
    ba = [View(f"{block}.in_proj_ba.weight", "m+m h", part, blocks="n") for part in range(2)]
    names = ("query", "key", "value", "z", "beta", "alpha")
    projections = [_rule(f"in_proj.weight.{name}", view) for name, view in zip(names, [*qkvz, *ba])]
    return _linear_attention(model, *projections)


def _qwen3_5(model: str, mlp_rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return (*outer(model), *gated_attention(model), *qk_norm(model, kind="full attention"), *_apart(model), *mlp_rules)


def _mixture(model: str, *, stacked: bool = False) -> tuple[Rule, ...]:
    """The rules of experts and shared expert.  stacked: whether files store a layer's experts as two tensors"""
    own = stacked_experts(model) if stacked else experts("mlp", "gate_proj", "up_proj", "down_proj", model)
    return (*own, *shared_expert(model=model))


_IMPLIED = {"qkv_bias": False, "qk_norm": True, "attention_output_gate": True, "norm_zero_centered": True}
_SIZES = {
    **DEFAULTS,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_MIXTURE_SIZES = {
    **_SIZES,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_MIXTURE_KEYS = {**_KEYS, **EXPERT_KEYS, "moe.shared_ffn_hidden_size": "shared_expert_intermediate_size"}
_COMMON: dict[str, Any] = {
    "computed": {"linear_attention.layers": _LAYERS},
    "options": {
        **OPTIONS,
        **NO_BIAS,
        "attn_output_gate": (True,),
        "output_gate_type": ("swish", "silu"),
        "mlp_only_layers": ([], None),
    },
    "rope_fraction": 0.25,
    "passed_through": ("mtp.*",),
    "mtp": APART,
}
_DENSE: dict[str, Any] = {
    **_COMMON,
    "implied": {**_IMPLIED, "moe.num_experts": None},
    "keys": _KEYS,
    "defaults": {**_SIZES, "num_key_value_heads": 4},
}
# This config.json has neither the width of a dense MLP nor norm_topk_prob.
_QWEN3_5_MOE: dict[str, Any] = {
    **_COMMON,
    "implied": {**_IMPLIED, "moe.shared_gate": True, "moe.normalize_top_k": True},
    "keys": {
        **{key: name for key, name in _MIXTURE_KEYS.items() if key != "moe.normalize_top_k"},
        "ffn_hidden_size": "moe_intermediate_size",
    },
    "defaults": {**_MIXTURE_SIZES, "num_experts": 256, "num_experts_per_tok": 8},
    "aliases": {"num_experts": "num_local_experts"},
}
_INNER = "model.language_model"
_WITH_TOWER: dict[str, Any] = {
    "text_config": "required",
    "has_mrope": True,
    "passed_through": ("mtp.*", "model.visual.*"),
}

LINEAR_FAMILIES = (
    Family(
        model_type="qwen3_next",
        class_name="Qwen3NextForCausalLM",
        rules=(
            *outer(),
            *gated_attention(),
            *qk_norm(kind="full attention"),
            *_by_key_head(),
            *_mixture("model"),
        ),
        **{
            **_COMMON,
            "implied": {**_IMPLIED, "moe.shared_gate": True},
            "keys": _MIXTURE_KEYS,
            "defaults": {
                **_MIXTURE_SIZES,
                "intermediate_size": 5632,
                "num_experts": 512,
                "num_experts_per_tok": 10,
                "norm_topk_prob": True,
            },
            "options": {**_COMMON["options"], "decoder_sparse_step": (1,)},
            "aliases": {"num_experts": "num_local_experts"},
        },
    ),
    Family(model_type="qwen3_5_text", class_name="Qwen3_5ForCausalLM", rules=_qwen3_5("model", mlp()), **_DENSE),
    Family(
        model_type="qwen3_5_moe_text",
        class_name="Qwen3_5MoeForCausalLM",
        rules=_qwen3_5("model", _mixture("model")),
        other_rules=(_qwen3_5("model", _mixture("model", stacked=True)),),
        **_QWEN3_5_MOE,
    ),
    Family(
        model_type="qwen3_5",
        class_name="Qwen3_5ForConditionalGeneration",
        rules=_qwen3_5(_INNER, mlp(_INNER)),
        **{**_DENSE, **_WITH_TOWER},
    ),
    Family(
        model_type="qwen3_5_moe",
        class_name="Qwen3_5MoeForConditionalGeneration",
        rules=_qwen3_5(_INNER, _mixture(_INNER)),
        other_rules=(_qwen3_5(_INNER, _mixture(_INNER, stacked=True)),),
        **{**_QWEN3_5_MOE, **_WITH_TOWER},
    ),
)
