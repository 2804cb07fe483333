"""Declares families whose output gate of attention has a projection of its own: Muse Glimmer.

Layers of these families have norms before and after attention and MLP.  Layers without a window have no rotary
positions.

    Muse Glimmer   norms of queries, keys and embeddings have no weights; queries times a factor; the norm after the
                   last layer has no offset; norms on outputs have an epsilon of their own; logits times a factor
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.hf.families.rules import KEYS, LLAMA_DENSE, NO_BIAS, attention, mlp, outer, output_norms
from sft.hf.families.windows import FULL, SLIDING, all_but_every
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_INNER = "model.language_model"
_TYPES, _COUNT, _BASES = "layer_types", "num_hidden_layers", "layer_rope_theta"
_FACTOR, _MULTIPLIER = "qk_scale_factor", "output_multiplier"


def gated_apart(model: str = "model") -> tuple[Rule, ...]:
    """The rules of attention whose output gate is a Linear beside those of queries, keys and values."""
    norm, qkv, output = attention(model)
    query, key, value = qkv.views
    gate = View(f"{model}.layers.{LAYER}.self_attn.gate_proj.weight", "q h")
    return norm, replace(qkv, views=(query, gate, key, value)), output


def _from_last(number: int, count: int) -> bool:
    """Whether this layer, from 1, is the last one, or a multiple of four layers before it."""
    return (count - number) % 4 == 0


def _windows() -> dict[str, Computed]:
    """Windows of 2048 tokens in all layers but the last one and every fourth before it, unless layer_types says."""
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
    """The layers without rotary positions, from 1, whose base is 0: "layer_rope_theta": [1e4, 0, 1e4] -> [2]

    Layers with positions have the base of rope_parameters: transformers reads here only whether a number is 0.
    """
    count, bases = content.get(_COUNT), content.get(_BASES)
    if type(count) is not int or count < 1:
        raise ValueError(f"{_COUNT} = {count} says nothing about the layers")
    if bases is None:
        return [number for number in range(1, count + 1) if _from_last(number, count)]
    if not isinstance(bases, list) or len(bases) != count or len({base for base in bases if base}) > 1:
        raise ValueError(f"{_BASES} is not a list of {count} numbers, one for each layer, of which all but 0 are equal")
    return [number for number, base in enumerate(bases, 1) if not base]


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
        "rope.skip_layers": Computed(_BASES, _skipped_layers),
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

GATED = (_MUSE_GLIMMER,)
