"""Declares families in which most layers have Kimi Delta Attention (arXiv:2510.26692): Kimi-Linear.

The other layers have latent attention without rotary positions.  Decay and gate of a linear layer are products of two
matrices, f_b_proj f_a_proj and g_b_proj g_a_proj.

    key of our model                 released config.json               config.json of transformers
    linear_attention.layers          linear_attn_config.kda_layers      layer_types
    linear_attention.num_key_heads   linear_attn_config.num_heads       linear_num_heads
    moe.dense_layers                 first_k_dense_replace              mlp_layer_types

Released files store the dense MLP of the first layers as `mlp`, transformers stores it as `block_sparse_moe`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.config.mixer_section import LayerKind
from sft.hf.families.latent import DENSE_FIRST, LATENT_GROUPS, LATENT_IMPLIED, LATENT_KEYS, latent_attention
from sft.hf.families.routed import layer_rules, shared_width
from sft.hf.families.rules import DEFAULTS, NO_BIAS, OPTIONS, correction_bias, experts, mlp, outer, shared_expert
from sft.hf.families.windows import FULL, LINEAR, LINEAR_KINDS
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_KIND: LayerKind = "linear attention"
_TYPES, _GROUP, _DENSE = "layer_types", "linear_attn_config", "first_k_dense_replace"
_FIXED = ("rope.interleaved", "tie_embeddings")
_BLOCK, _ATTENTION = "block_sparse_moe", f"model.layers.{LAYER}.self_attn"


def _layers(content: Mapping[str, Any]) -> list[int]:
    """The layers with linear attention, counted from 1.

    {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}, "num_hidden_layers": 4} -> [1, 2, 3]
    Without lists, layers 5, 9, 13, ... have full attention.
    """
    count, kinds, group = content.get("num_hidden_layers"), content.get(_TYPES), content.get(_GROUP) or {}
    if type(count) is not int:
        raise ValueError(f"num_hidden_layers = {count} is not a number of layers")
    if kinds is None and isinstance(group, dict) and "kda_layers" in group:
        linear, full = group["kda_layers"], group.get("full_attn_layers")
        numbers = [*linear, *full] if isinstance(linear, list) and isinstance(full, list) else []
        if not all(type(number) is int for number in numbers) or sorted(numbers) != [*range(1, count + 1)]:
            raise ValueError(
                f"{_GROUP} does not name each of the {count} layers once in kda_layers and full_attn_layers"
            )
        kinds = [LINEAR if number in linear else FULL for number in range(1, count + 1)]
    if kinds is None:
        kinds = [FULL if number % 4 == 1 and number > 1 else LINEAR for number in range(1, count + 1)]
    if not isinstance(kinds, list) or len(kinds) != count or LINEAR not in kinds or not {*kinds} <= {*LINEAR_KINDS}:
        raise ValueError(f"{_TYPES} is not a list of {count} names, one for each layer, with {LINEAR} among them")
    return [number for number, kind in enumerate(kinds, 1) if kind == LINEAR]


def _full_layers(content: Mapping[str, Any]) -> list[int]:
    """The layers with latent attention, counted from 1.  They have no rotary positions."""
    linear = _layers(content)
    return [number for number in range(1, content["num_hidden_layers"] + 1) if number not in linear]


def _layer_types(layers: list[int], count: int) -> dict[str, Any]:
    return {_TYPES: [LINEAR if number in layers else FULL for number in range(1, count + 1)]}


def _size(name: str, in_group: str, default: int) -> Computed:
    """A size of linear attention, which a released config.json has in a group.  name: its key elsewhere"""

    def read(content: Mapping[str, Any]) -> Any:
        group = content.get(_GROUP)
        return (group if isinstance(group, dict) else {}).get(in_group, content.get(name, default))

    return Computed(name, read)


def _num_dense(content: Mapping[str, Any]) -> int:
    if content.get("mlp_layer_types") is not None or _DENSE not in content:
        return int(DENSE_FIRST.read(content))
    if type(number := content[_DENSE]) is not int:
        raise ValueError(f"{_DENSE} = {number} is not a number of layers")
    return number


def _rule(ours: str, name: str, shape: str) -> Rule:
    return Rule(f"decoder.layers.self_attention.{ours}", (View(f"{_ATTENTION}.{name}", shape),), kind=_KIND)


def _delta_attention() -> tuple[Rule, ...]:
    parts = [("query", "q", "K"), ("key", "k", "K"), ("value", "v", "V")]
    norm = View(f"model.layers.{LAYER}.input_layernorm.weight", "h")
    return (
        Rule("decoder.layers.self_attention.in_proj.layer_norm_weight", (norm,), kind=_KIND),
        *(_rule(f"in_proj.weight.{part}", f"{name}_proj.weight", f"{size} h") for part, name, size in parts),
        _rule("in_proj.weight.beta", "b_proj.weight", "m h"),
        *(_rule(f"conv1d.weight.{part}", f"{name}_conv1d.weight", f"{size} 1 c") for part, name, size in parts),
        _rule("decay_down.weight", "f_a_proj.weight", "R h"),
        _rule("decay_up.weight", "f_b_proj.weight", "D R"),
        _rule("A_log", "A_log", "1 1 m 1"),
        _rule("dt_bias", "dt_bias", "D"),
        _rule("gate_down.weight", "g_a_proj.weight", "R h"),
        _rule("gate_up.weight", "g_b_proj.weight", "V R"),
        _rule("out_norm.weight", "o_norm.weight", "u"),
        _rule("out_proj.weight", "o_proj.weight", "h V"),
    )


def _rules(dense: str) -> tuple[Rule, ...]:
    """dense: name of the module of a dense MLP"""

    def moved(rule: Rule, block: str) -> Rule:
        return replace(rule, views=tuple(replace(v, name=v.name.replace(".mlp.", f".{block}.")) for v in rule.views))

    shared = shared_expert(name="shared_experts", gate=None)
    return (
        *outer(),
        *_delta_attention(),
        *(replace(rule, kind="latent attention") for rule in latent_attention()),
        *(moved(rule, dense) for rule in layer_rules("dense", *mlp())),
        *layer_rules("experts", *experts(_BLOCK, "w1", "w3", "w2"), *correction_bias(f"{_BLOCK}.gate")),
        *(moved(rule, _BLOCK) for rule in layer_rules("experts", *shared)),
    )


KIMI_LINEAR = (
    Family(
        model_type="kimi_linear",
        class_name="KimiLinearForCausalLM",
        rules=_rules(_BLOCK),
        other_rules=(_rules("mlp"),),
        implied={
            **LATENT_IMPLIED,
            "tie_embeddings": False,
            "linear_attention.decay": "channel",
            "linear_attention.decay_floor": None,
            "linear_attention.gate": "sigmoid",
        },
        keys={
            **{key: name for key, name in LATENT_KEYS.items() if key not in _FIXED},
            "moe.num_experts": "num_experts",
            "moe.top_k": "num_experts_per_token",
            "moe.ffn_hidden_size": "moe_intermediate_size",
            "moe.normalize_top_k": "moe_renormalize",
            "moe.num_groups": "num_expert_group",
            "moe.top_groups": "topk_group",
            "moe.scaling_factor": "routed_scaling_factor",
        },
        computed={
            "num_query_groups": LATENT_GROUPS,
            "moe.shared_ffn_hidden_size": shared_width(1024, "num_shared_experts"),
            "moe.dense_layers": Computed(_DENSE, _num_dense, DENSE_FIRST.write),
            "linear_attention.layers": Computed(_TYPES, _layers, _layer_types, LINEAR_KINDS),
            "linear_attention.num_key_heads": _size("linear_num_heads", "num_heads", 32),
            "linear_attention.num_value_heads": _size("linear_num_heads", "num_heads", 32),
            "linear_attention.key_head_dim": _size("linear_head_dim", "head_dim", 128),
            "linear_attention.value_head_dim": _size("linear_head_dim", "head_dim", 128),
            "linear_attention.low_rank": _size("linear_head_dim", "head_dim", 128),
            "linear_attention.conv_kernel": _size("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
            "rope.skip_layers": Computed(_TYPES, _full_layers),
        },
        aliases={"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"}
        | {"moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group"},
        defaults={
            **DEFAULTS,
            "rms_norm_eps": 1e-5,
            "qk_rope_head_dim": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "moe_intermediate_size": 1024,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "moe_renormalize": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
        },
        options={
            # The repository contains code of the model, which transformers has too.
            **{key: allowed for key, allowed in {**OPTIONS, **NO_BIAS}.items() if key != "auto_map"},
            "tie_word_embeddings": (False,),
            "moe_router_activation_func": ("sigmoid",),
            "moe_layer_freq": (1,),
            "mla_use_nope": (True,),
            "num_nextn_predict_layers": (0,),
        },
        longest="model_max_length",
    ),
)
