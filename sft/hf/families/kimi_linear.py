"""Declares families in which most layers have Kimi Delta Attention (arXiv:2510.26692): Kimi-Linear and Ling 3.0.

The other layers have latent attention: without rotary positions in Kimi-Linear, with a gate for each head in Ling.
Decay and gate of a linear layer are matrices in Ling.  In Kimi-Linear they are products of two matrices, f_b_proj
f_a_proj and g_b_proj g_a_proj.

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
from sft.hf.families.latent import LATENT_GROUPS, LATENT_IMPLIED, LATENT_KEYS, latent_attention
from sft.hf.families.routed import dense_layers, layer_rules, routed, shared_width
from sft.hf.families.rules import DEFAULTS, NO_BIAS, OPTIONS, correction_bias, experts, mlp, outer, shared_expert
from sft.hf.families.windows import FULL, LINEAR, LINEAR_KINDS, linear_layer_types
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_KIND: LayerKind = "linear attention"
_TYPES, _GROUP, _DENSE = "layer_types", "linear_attn_config", "first_k_dense_replace"
_FIXED = ("rope.interleaved", "tie_embeddings")
_BLOCK = "block_sparse_moe"


def _group(content: Mapping[str, Any]) -> dict[str, Any]:
    """The group of linear attention; {} if it is absent or null."""
    group = content.get(_GROUP)
    if group is not None and not isinstance(group, dict):
        raise ValueError(f"{_GROUP} is a {type(group).__name__}, not a group of values")
    return group or {}


def _layers(content: Mapping[str, Any]) -> list[int]:
    """The layers with linear attention, counted from 1.

    {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}, "num_hidden_layers": 4} -> [1, 2, 3]
    Without lists, layers 5, 9, 13, ... have full attention.
    """
    count, kinds, group = content.get("num_hidden_layers"), content.get(_TYPES), _group(content)
    if type(count) is not int:
        raise ValueError(f"num_hidden_layers = {count} is not a number of layers")
    if kinds is None and "kda_layers" in group:
        linear, full = group["kda_layers"], group.get("full_attn_layers")
        numbers = [*linear, *full] if isinstance(linear, list) and isinstance(full, list) else []
        if not all(type(number) is int for number in numbers) or sorted(numbers) != [*range(1, count + 1)]:
            raise ValueError(
                f"{_GROUP} does not name each of the {count} layers once in kda_layers and full_attn_layers"
            )
        kinds = [LINEAR if number in linear else FULL for number in range(1, count + 1)]
    if kinds is None:
        kinds = [FULL if number % 4 == 1 and number > 1 else LINEAR for number in range(1, count + 1)]
    known = isinstance(kinds, list) and LINEAR in kinds and all(kind in LINEAR_KINDS for kind in kinds)
    if not known or len(kinds) != count:
        raise ValueError(f"{_TYPES} is not a list of {count} names, one for each layer, with {LINEAR} among them")
    return [number for number, kind in enumerate(kinds, 1) if kind == LINEAR]


def _full_layers(content: Mapping[str, Any]) -> list[int]:
    """The layers with latent attention, counted from 1.  They have no rotary positions."""
    linear = _layers(content)
    return [number for number in range(1, content["num_hidden_layers"] + 1) if number not in linear]


def _size(name: str, in_group: str, default: int) -> Computed:
    """A computed size of linear attention.

    in_group: key in the group linear_attn_config of released files; name: key of config.json that transformers writes
    """

    def read(content: Mapping[str, Any]) -> Any:
        return _group(content).get(in_group, content.get(name, default))

    return Computed(name, read)


def _delta_attention(block: str, output: str, *own: tuple[str, str, str]) -> tuple[Rule, ...]:
    """The rules of Kimi Delta Attention.

    block: name of the attention module in its layer; output: name of the output projection in it
    own: the tensors that depend on the family: our name, the name in files, and the shape
        Parts of in_proj are in the order of its rows, on which LoRA relies.
    """
    parts = [("query", "q", "K"), ("key", "k", "K"), ("value", "v", "V")]
    tensors = [
        *((f"in_proj.weight.{part}", f"{name}_proj.weight", f"{size} h") for part, name, size in parts),
        *own,
        *((f"conv1d.weight.{part}", f"{name}_conv1d.weight", f"{size} 1 c") for part, name, size in parts),
        ("dt_bias", "dt_bias", "D"),
        ("out_norm.weight", "o_norm.weight", "u"),
        ("out_proj.weight", f"{output}.weight", "h V"),
    ]
    ours, layer = "decoder.layers.self_attention", f"model.layers.{LAYER}"
    return (
        Rule(f"{ours}.in_proj.layer_norm_weight", (View(f"{layer}.input_layernorm.weight", "h"),), kind=_KIND),
        *(Rule(f"{ours}.{key}", (View(f"{layer}.{block}.{name}", shape),), kind=_KIND) for key, name, shape in tensors),
    )


_BETA = ("in_proj.weight.beta", "b_proj.weight", "m h")
_LOW_RANK = (
    _BETA,
    ("decay_down.weight", "f_a_proj.weight", "r h"),
    ("decay_up.weight", "f_b_proj.weight", "D r"),
    ("A_log", "A_log", "0 0 m 0"),
    ("gate_down.weight", "g_a_proj.weight", "r h"),
    ("gate_up.weight", "g_b_proj.weight", "V r"),
)
_FULL_RANK = (
    ("in_proj.weight.z", "g_proj.weight", "V h"),
    _BETA,
    ("in_proj.weight.alpha", "f_proj.weight", "D h"),
    ("A_log", "A_log", "m"),
)


def _of_latent_layers(*names: str) -> tuple[Rule, ...]:
    return tuple(replace(rule, kind="latent attention") for rule in latent_attention("model", *names))


def _kimi(dense: str) -> tuple[Rule, ...]:
    """The rules of Kimi-Linear.  dense: name of the module of the dense MLP in the first layers"""

    def moved(rule: Rule, block: str) -> Rule:
        return replace(rule, views=tuple(replace(v, name=v.name.replace(".mlp.", f".{block}.")) for v in rule.views))

    shared = shared_expert(name="shared_experts", gate=None)
    return (
        *outer(),
        *_delta_attention("self_attn", "o_proj", *_LOW_RANK),
        *_of_latent_layers(),
        *(moved(rule, dense) for rule in layer_rules("dense", *mlp())),
        *layer_rules("experts", *experts(_BLOCK, "w1", "w3", "w2"), *correction_bias(f"{_BLOCK}.gate")),
        *(moved(rule, _BLOCK) for rule in layer_rules("experts", *shared)),
    )


def _ling() -> tuple[Rule, ...]:
    embedding, *rest = outer()
    bias = View(f"model.layers.{LAYER}.mlp.gate.expert_bias", "x")
    routers = [rule if not rule.is_buffer else replace(rule, views=(bias,)) for rule in routed()]
    return (
        replace(embedding, views=(View("model.word_embeddings.weight", "v h"),)),
        *rest,
        *_delta_attention("attention", "dense", *_FULL_RANK),
        *_of_latent_layers("attention", "dense"),
        *routers,
    )


def _ling_layers(content: Mapping[str, Any]) -> list[int]:
    """The layers of Ling with linear attention, counted from 1.

    Without layer_types, layers n, 2 n, ... have full attention, where n is layer_group_size.
    """
    count, size = content.get("num_hidden_layers"), content.get("layer_group_size", 6)
    if content.get(_TYPES) is None and type(count) is int:
        if type(size) is not int or size < 1:
            raise ValueError(f"layer_group_size = {size} is not a number of layers")
        content = {**content, _TYPES: [LINEAR if number % size else FULL for number in range(1, count + 1)]}
    return _layers(content)


def _head_width(content: Mapping[str, Any]) -> Any:
    return content.get("linear_head_dim", content.get("head_dim", 128))


def _ling_size(name: str, other: str, default: int) -> Computed:
    """A computed size of linear attention.  name: its key in files of transformers; other: its key in released files"""
    return Computed(other, lambda content: content.get(name, content.get(other, default)))


_ROUTER: dict[str, str] = {
    "moe.num_experts": "num_experts",
    "moe.top_k": "num_experts_per_token",
    "moe.ffn_hidden_size": "moe_intermediate_size",
    "moe.normalize_top_k": "moe_renormalize",
    "moe.num_groups": "num_expert_group",
    "moe.top_groups": "topk_group",
    "moe.scaling_factor": "routed_scaling_factor",
}
_ALIASES = {
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
}
_OF_CHANNELS = {"tie_embeddings": False, "linear_attention.decay": "channel", "linear_attention.gate": "sigmoid"}
_WIDTHS = {"qk_rope_head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
_OPTIONS: dict[str, tuple[Any, ...]] = {
    # auto_map is accepted: the repositories contain code for the models, but transformers has its own.
    **{key: allowed for key, allowed in {**OPTIONS, **NO_BIAS}.items() if key != "auto_map"},
    "tie_word_embeddings": (False,),
    "moe_layer_freq": (1,),
}

KIMI_LINEAR = (
    Family(
        model_type="kimi_linear",
        class_name="KimiLinearForCausalLM",
        rules=_kimi(_BLOCK),
        other_rules=(_kimi("mlp"),),
        implied={**LATENT_IMPLIED, **_OF_CHANNELS, "linear_attention.decay_floor": None},
        keys={**{key: name for key, name in LATENT_KEYS.items() if key not in _FIXED}, **_ROUTER},
        computed={
            "num_query_groups": LATENT_GROUPS,
            "moe.shared_ffn_hidden_size": shared_width(1024, "num_shared_experts"),
            "moe.dense_layers": dense_layers(_DENSE),
            "linear_attention.layers": Computed(_TYPES, _layers, linear_layer_types, LINEAR_KINDS),
            "linear_attention.num_key_heads": _size("linear_num_heads", "num_heads", 32),
            "linear_attention.num_value_heads": _size("linear_num_heads", "num_heads", 32),
            "linear_attention.key_head_dim": _size("linear_head_dim", "head_dim", 128),
            "linear_attention.value_head_dim": _size("linear_head_dim", "head_dim", 128),
            "linear_attention.low_rank": _size("linear_head_dim", "head_dim", 128),
            "linear_attention.conv_kernel": _size("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
            "rope.skip_layers": Computed(_TYPES, _full_layers),
        },
        aliases=_ALIASES,
        defaults={
            **DEFAULTS,
            "rms_norm_eps": 1e-5,
            **_WIDTHS,
            "moe_intermediate_size": 1024,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "moe_renormalize": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
        },
        options={
            **_OPTIONS,
            "moe_router_activation_func": ("sigmoid",),
            "mla_use_nope": (True,),
            "num_nextn_predict_layers": (0,),
        },
        longest="model_max_length",
    ),
    Family(
        model_type="bailing_hybrid",
        class_name="BailingHybridForCausalLM",
        rules=_ling(),
        implied={
            **LATENT_IMPLIED,
            **_OF_CHANNELS,
            "linear_attention.low_rank": None,
            "latent_attention.q_lora_rank": None,
            "latent_attention.head_gate": True,
            "rope.interleaved": True,
        },
        keys={
            **{key: name for key, name in LATENT_KEYS.items() if key not in (*_FIXED, "latent_attention.q_lora_rank")},
            **_ROUTER,
            "linear_attention.decay_floor": "kda_lower_bound",
        },
        computed={
            "num_query_groups": LATENT_GROUPS,
            "moe.shared_ffn_hidden_size": shared_width(768, "num_shared_experts"),
            "moe.dense_layers": dense_layers(_DENSE, 2),
            "linear_attention.layers": Computed(_TYPES, _ling_layers, linear_layer_types, LINEAR_KINDS),
            "linear_attention.num_key_heads": _ling_size("linear_num_heads", "num_attention_heads", 32),
            "linear_attention.num_value_heads": _ling_size("linear_num_heads", "num_attention_heads", 32),
            "linear_attention.key_head_dim": Computed("head_dim", _head_width),
            "linear_attention.value_head_dim": Computed("head_dim", _head_width),
            "linear_attention.conv_kernel": _ling_size("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
        },
        aliases=_ALIASES,
        defaults={
            **DEFAULTS,
            **_WIDTHS,
            "rope_theta": 6e6,
            "moe_intermediate_size": 768,
            "num_experts": 512,
            "num_experts_per_token": 8,
            "moe_renormalize": True,
            "num_expert_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "kda_lower_bound": -5.0,
        },
        options={**_OPTIONS, "kda_safe_gate": (True,)},
        has_mtp_layers=True,
        longest="model_max_length",
    ),
)
