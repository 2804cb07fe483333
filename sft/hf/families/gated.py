"""Declares families that compute the output gate of attention with a separate projection: Muse Glimmer and AFMoE.

Layers of these families have norms before and after attention and MLP.  Layers without a window have no rotary
positions.

    Muse Glimmer   norms of queries, keys and embeddings have no weights; queries times a factor; the norm after the
                   last layer has no offset; norms on outputs have an epsilon of their own; logits times a factor
    AFMoE          (Trinity) routers with sigmoid scores, shared experts and dense first layers
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.hf.families.routed import SIGMOID, layer_rules, shared_width
from sft.hf.families.rules import (
    DEFAULTS,
    KEYS,
    LLAMA_DENSE,
    NO_BIAS,
    OPTIONS,
    attention,
    experts,
    mlp,
    outer,
    output_norms,
    qk_norm,
    shared_expert,
)
from sft.hf.families.windows import BASES, FULL, SLIDING, all_but_every, without_base
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed, is_true
from sft.hf.tensor_view import LAYER, View

_INNER = "model.language_model"
_TYPES, _COUNT = "layer_types", "num_hidden_layers"
_FACTOR, _MULTIPLIER = "qk_scale_factor", "output_multiplier"


def gated_apart(model: str = "model") -> tuple[Rule, ...]:
    """The rules of attention whose output gate is a Linear beside those of queries, keys and values."""
    norm, qkv, output = attention(model)
    query, key, value = qkv.views
    gate = View(f"{model}.layers.{LAYER}.self_attn.gate_proj.weight", "q h")
    return norm, replace(qkv, views=(query, gate, key, value)), output


def _from_last(number: int, count: int) -> bool:
    """Whether layer `number` of `count`, counted from 1, is the last one, or a multiple of four layers before it."""
    return (count - number) % 4 == 0


def _windows() -> dict[str, Computed]:
    """The computed keys sliding_window and sliding_window_layers of Muse Glimmer.

    Without layer_types, all layers have a window except the last one and every fourth layer before it.  Without
    sliding_window, windows have 2048 tokens.
    """
    usual = all_but_every(4, default=2048)

    def filled(content: Mapping[str, Any]) -> dict[str, Any]:
        count = content.get(_COUNT)
        if content.get(_TYPES) is not None or type(count) is not int:
            return dict(content)
        return {**content, _TYPES: [FULL if _from_last(n, count) else SLIDING for n in range(1, count + 1)]}

    def from_filled(computed: Computed) -> Computed:
        return replace(computed, read=lambda content: computed.read(filled(content)))

    return {key: from_filled(computed) for key, computed in usual.items()}


def _skipped_layers(content: Mapping[str, Any]) -> list[int]:
    """The layers without rotary positions, counted from 1.

    They have 0 in layer_rope_theta.  All other layers take their base from rope_parameters, as in transformers, which
    only compares layer_rope_theta with 0.
    """
    return without_base(content, lambda count: [number for number in range(1, count + 1) if _from_last(number, count)])


def _number(content: Mapping[str, Any], key: str, default: float) -> float:
    value = content.get(key, default)
    if not isinstance(value, (int, float)) or value <= 0:
        raise ValueError(f"{key} = {value} is not a number above 0")
    return value


def _attention_multiplier(content: Mapping[str, Any]) -> float:
    """The factor on query-key products: qk_scale_factor / sqrt(head_dim)."""
    return _number(content, _FACTOR, 3.87) * _number(content, "head_dim", 128) ** -0.5


_MUSE_GLIMMER = Family(
    model_type="muse_glimmer",
    class_name="MuseGlimmerForConditionalGeneration",
    rules=(
        *outer(_INNER),
        *gated_apart(_INNER),
        *mlp(_INNER, "pre_feedforward_layernorm"),
        *output_norms(_INNER),
    ),
    implied={
        **LLAMA_DENSE,
        "norm_placement": "both",
        "norm_zero_centered": True,
        "final_norm_zero_centered": False,
        "qk_norm": True,
        "qk_norm_weights": False,
        "embedding_norm": True,
        "attention_output_gate": True,
    },
    keys={**KEYS, "output_norm_epsilon": "post_norm_eps", "logits_softcap": "final_logit_softcapping"},
    computed={
        **_windows(),
        "rope.skip_layers": Computed(BASES, _skipped_layers),
        "attention_multiplier": Computed(_FACTOR, _attention_multiplier),
        "logits_scaling": Computed(
            _MULTIPLIER, lambda content: 1.0 / _number(content, _MULTIPLIER, 0.19611613513818404)
        ),
    },
    defaults={
        "vocab_size": 202_048,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "final_logit_softcapping": 20.0,
        "tie_word_embeddings": False,
    },
    options={
        **NO_BIAS,
        "hidden_activation": ("silu",),
        "attention_dropout": (0.0, None),
        "partial_rotary_factor": (None, 1.0),
        "auto_map": (None,),
    },
    text_config="required",
    passed_through=tuple(f"model.{name}.*" for name in ("vision_tower", "vision_adapter", "vision_projection")),
)

_WIDTH, _SHARED, _INTERVAL = "moe_intermediate_size", "num_shared_experts", "global_attn_every_n_layers"
_AFMOE_WINDOWS = all_but_every(4, _INTERVAL, default=1024)


def _afmoe_rules() -> tuple[Rule, ...]:
    layer, ours = f"model.layers.{LAYER}", "decoder.layers"
    after_attention, _ = output_norms()
    _, _, *matrices = experts("mlp", "gate_proj", "up_proj", "down_proj")
    return (
        *outer(),
        *gated_apart(),
        *qk_norm(),
        after_attention,
        Rule(f"{ours}.post_mlp_layernorm.weight", (View(f"{layer}.post_mlp_layernorm.weight", "h"),)),
        *layer_rules("dense", *mlp(norm="pre_mlp_layernorm")),
        *layer_rules(
            "experts",
            Rule(f"{ours}.pre_mlp_layernorm.weight", (View(f"{layer}.pre_mlp_layernorm.weight", "h"),)),
            Rule(f"{ours}.mlp.router.weight", (View(f"{layer}.mlp.router.gate.weight", "x h"),)),
            Rule(f"{ours}.mlp.router.expert_bias", (View(f"{layer}.mlp.expert_bias", "x"),), is_buffer=True),
            *matrices,
            *shared_expert("shared_experts", None),
        ),
    )


def _afmoe_without_positions(content: Mapping[str, Any]) -> list[int]:
    """The layers without a window, counted from 1.  AFMoE has no rotary positions in them."""
    if content.get("sliding_window", 1024) is None:
        raise ValueError("sliding_window = null is not supported; transformers refuses layers without its size")
    count = content.get(_COUNT)
    if type(count) is not int:
        raise ValueError(f"{_COUNT} = {count} is not a number of layers")
    has_windows = _AFMOE_WINDOWS["sliding_window"].read(content) is not None
    layers = _AFMOE_WINDOWS["sliding_window_layers"].read(content) if has_windows else []
    return [] if layers is None else [number for number in range(1, count + 1) if number not in layers]


def _embedding_multiplier(content: Mapping[str, Any]) -> float:
    return _number(content, "hidden_size", 2048) ** 0.5 if is_true(content, "mup_enabled", False) else 1.0


_AFMOE = Family(
    model_type="afmoe",
    class_name="AfmoeForCausalLM",
    rules=_afmoe_rules(),
    implied={
        **SIGMOID,
        "qkv_bias": False,
        "norm_placement": "both",
        "qk_norm": True,
        "attention_output_gate": True,
        "moe.normalize_top_k": True,
    },
    keys={
        **KEYS,
        "moe.num_experts": "num_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.ffn_hidden_size": _WIDTH,
        "moe.scaling_factor": "route_scale",
        "moe.dense_layers": "num_dense_layers",
    },
    computed={
        **_AFMOE_WINDOWS,
        "rope.skip_layers": Computed(_TYPES, _afmoe_without_positions),
        "moe.shared_ffn_hidden_size": shared_width(1408, _SHARED, 2),
        "embedding_multiplier": Computed("mup_enabled", _embedding_multiplier),
    },
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        _WIDTH: 1408,
        "num_dense_layers": 1,
        "route_scale": 1.0,
    },
    options={
        **{key: allowed for key, allowed in {**OPTIONS, **NO_BIAS}.items() if key != "auto_map"},  # as in transformers
        "score_func": ("sigmoid",),
        "route_norm": (True,),
        **{key: (1, None) for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")},
    },
)

GATED = (_MUSE_GLIMMER, _AFMOE)
