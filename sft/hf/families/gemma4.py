"""Declares Gemma 4, whose layers without a window have heads of another size.

    layers with a window      values: v_proj, and a norm without weights
                              rotary positions on whole heads, base 1e4
    layers without a window   values: k_proj if attention_k_eq_v is true, else v_proj; then a norm without weights
                              rotary positions with a quarter of the frequencies, base 1e6

The keys head_dim and num_key_value_heads describe layers with a window.  For the others, files that transformers wrote
have `per_layer_config`, and other files have global_head_dim and num_global_key_value_heads.  The output of each layer
is multiplied by a stored scalar.  The weights of norms are factors, not offsets from 1.  With enable_moe_block
(26B-A4B), the outputs of experts and MLP are added.  Models with an embedding for each layer (E2B, E4B) are not
supported.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.hf.families.gemma import root
from sft.hf.families.routed import layer_rules
from sft.hf.families.rules import (
    KEYS,
    NO_BIAS,
    attention,
    layer_scalar,
    mlp,
    outer,
    output_norms,
    qk_norm,
    shared_projection,
    stacked_experts,
)
from sft.hf.families.windows import FULL, SLIDING, all_but_every
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed, is_true
from sft.hf.tensor_view import LAYER, View

_INNER = "model.language_model"  # in files with towers
_NORM, _MIXTURE = "pre_feedforward_layernorm", "enable_moe_block"
_BY_LAYER, _SHARED, _EMBEDDED = "per_layer_config", "attention_k_eq_v", "hidden_size_per_layer_input"
_WIDTH, _GROUPS = ("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")


def _full_layers(content: Mapping[str, Any]) -> list[int]:
    """The layers without a window, counted from 0."""
    count = content.get("num_hidden_layers")
    kinds = content.get("layer_types")
    if kinds is None and type(count) is int:
        kinds = [SLIDING if (number + 1) % 6 and number + 1 < count else FULL for number in range(count)]
    if not isinstance(kinds, list) or not kinds:
        raise ValueError(f"layer_types = {kinds} does not name the layers of type {FULL}")
    if kinds[-1] != FULL:
        raise ValueError(f"layer_types ends with {kinds[-1]}, which transformers changes to {FULL}; write {FULL}")
    return [number for number, kind in enumerate(kinds) if kind == FULL]


def _own_size(content: Mapping[str, Any], name: str) -> int | None:
    """The value of `name` in per_layer_config, which must be equal in all layers without a window; None if absent.

    Example: layer 3, counted from 0, is the only layer without a window, and name is "head_dim":
    {"per_layer_config": {"3": {"head_dim": 512}}, ...} -> 512
    """
    by_layer = content[_BY_LAYER] or {}
    is_group = isinstance(by_layer, dict) and all(number.isdecimal() for number in by_layer)
    if not is_group or not all(isinstance(values, dict | None) for values in by_layer.values()):
        raise ValueError(f"{_BY_LAYER} is not a group of values for each number of a layer")
    own = {int(number): values for number, values in by_layer.items() if values}
    known = {_WIDTH[0], _GROUPS[0]}
    other = sorted({key for values in own.values() for key in values} - known)
    if other:
        raise ValueError(f"{_BY_LAYER} has {other[0]}; only {' and '.join(sorted(known))} are supported")
    if own and sorted(own) != _full_layers(content):
        raise ValueError(f"{_BY_LAYER} has layers {sorted(own)}, which are not those of type {FULL}")
    sizes = {values.get(name) for values in own.values()}
    if len(sizes) > 1:
        raise ValueError(f"{_BY_LAYER} has layers with different {name}")
    return next(iter(sizes), None)


def _size_of_full_layers(names: tuple[str, str], default: int | None) -> Computed:
    """A computed value: a size of the heads of layers without a window.

    names: key in per_layer_config; key of config.json if there is no per_layer_config
    default: the value if the second key is absent
    """

    def read(content: Mapping[str, Any]) -> int | None:
        _full_layers(content)
        if _BY_LAYER in content:
            return _own_size(content, names[0])
        if names == _GROUPS and not is_true(content, _SHARED, False):
            return None  # transformers reads the key only if keys are values
        return content.get(names[1], default)

    return Computed(names[1], read)


def _rules(model: str = "model") -> tuple[Rule, ...]:
    norm, qkv, output = attention(model)
    return (
        *outer(model),
        norm,
        replace(qkv, kind="window attention"),
        replace(qkv, kind="full attention", needs="full_attention.projects_values"),
        replace(shared_projection(model), kind="full attention", needs="full_attention.keys_as_values"),
        output,
        *qk_norm(model),
        *layer_rules("dense", *mlp(model, _NORM)),
        *layer_rules("experts", *_mixture(model)),
        *output_norms(model),
        *layer_scalar(model),
    )


def _mixture(model: str) -> tuple[Rule, ...]:
    """The rules of MLP, router, experts and their norms, in models with enable_moe_block."""
    layer, ours = f"{model}.layers.{LAYER}", "decoder.layers.mlp"

    def rule(name: str, stored: str, shape: str) -> Rule:
        return Rule(f"{ours}.{name}", (View(f"{layer}.{stored}", shape),))

    _, gate_up, down = mlp(model, _NORM)
    _, _, *experts = stacked_experts(model, "experts", gate_up="gate_up_proj", down="down_proj")
    return (
        rule("shared_norm.weight", f"{_NORM}.weight", "h"),
        *(replace(r, ours=r.ours.replace(".mlp.", ".mlp.shared_experts.", 1)) for r in (gate_up, down)),
        rule("shared_output_norm.weight", "post_feedforward_layernorm_1.weight", "h"),
        rule("router.weight", "router.proj.weight", "x h"),
        rule("router.input_scale", "router.scale", "h"),
        rule("router.expert_scale", "router.per_expert_scale", "x"),
        rule("expert_norm.weight", f"{_NORM}_2.weight", "h"),
        *experts,
        rule("expert_output_norm.weight", "post_feedforward_layernorm_2.weight", "h"),
    )


def _of_mixture(name: str) -> Computed:
    """A computed value: the key `name`, which must exist if enable_moe_block is true; None if it is false."""

    def read(content: Mapping[str, Any]) -> int | None:
        if not is_true(content, _MIXTURE, False):
            return None
        if content.get(name) is None:
            raise ValueError(f"{name} is missing, but {_MIXTURE} = true")
        value: int = content[name]
        return value

    return Computed(name, read)


_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_TEXT = Family(
    model_type="gemma4_text",
    class_name="Gemma4ForCausalLM",
    rules=_rules(),
    implied={
        "qkv_bias": False,
        "qk_norm": True,
        "value_norm": True,
        "layer_scalar": True,
        "norm_placement": "both",
        "activation": "geglu",
        "round_embedding_multiplier": True,
        "attention_multiplier": 1.0,
    },
    keys={**KEYS, "logits_softcap": "final_logit_softcapping", "full_attention.keys_as_values": _SHARED},
    computed={
        **all_but_every(6, default=512, last_is_full=True),
        "full_attention.head_dim": _size_of_full_layers(_WIDTH, 512),
        "full_attention.num_query_groups": _size_of_full_layers(_GROUPS, None),
        "embedding_multiplier": root("hidden_size", None, 0.5),
        "moe.num_experts": _of_mixture("num_experts"),
        "moe.top_k": _of_mixture("top_k_experts"),
        "moe.ffn_hidden_size": _of_mixture("moe_intermediate_size"),
        "moe.shared_ffn_hidden_size": _of_mixture("intermediate_size"),
        "moe.own_norms": Computed(_MIXTURE, lambda content: is_true(content, _MIXTURE, False)),
    },
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": _ROPE,
        _SHARED: False,
        _EMBEDDED: 256,
    },
    options={
        **NO_BIAS,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_dropout": (0.0, None),
        # "vision" means bidirectional attention among the tokens of one image; text without images is causal.
        "use_bidirectional_attention": (None, "vision"),
        _EMBEDDED: (0, None),
        "num_kv_shared_layers": (0,),
        "use_double_wide_mlp": (False,),
        "auto_map": (None,),
    },
    lacks={
        _EMBEDDED: "an embedding for each layer (E2B, E4B)",
        "num_kv_shared_layers": "layers with the keys of other layers (E2B, E4B)",
    },
    scalings=("proportional",),
    rope_by_layer_type=True,
    rope_fraction=1.0,
)
_TOWERS: dict[str, Any] = {
    "rules": _rules(_INNER),
    "text_config": "required",
    "passed_through": tuple(
        f"model.{name}.*" for name in ("vision_tower", "embed_vision", "audio_tower", "embed_audio", "vision_embedder")
    ),
}
# The 12B model: the same language model, but with projections of images and sound instead of towers.
_UNIFIED = replace(
    _TEXT,
    model_type="gemma4_unified_text",
    class_name="Gemma4UnifiedForCausalLM",
    computed={**_TEXT.computed, **all_but_every(6, default=1024, last_is_full=True)},
    defaults={key: value for key, value in _TEXT.defaults.items() if key != _EMBEDDED},
)

GEMMA4 = (
    _TEXT,
    replace(_TEXT, model_type="gemma4", class_name="Gemma4ForConditionalGeneration", **_TOWERS),
    _UNIFIED,
    replace(_UNIFIED, model_type="gemma4_unified", class_name="Gemma4UnifiedForConditionalGeneration", **_TOWERS),
)
