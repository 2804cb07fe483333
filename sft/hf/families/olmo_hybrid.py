"""Declares Olmo Hybrid: linear attention whose beta reaches 2 in three of four layers; the others are as in Olmo 2.

    layers             norms                          projections
    linear attention   before mixer and MLP           q, k, v, g, b and a; a convolution each for q, k and v
    full attention     after attention and MLP        q, k and v; norms of queries and keys across heads

transformers 5.23 saves other rows under the names of the three convolutions, unless keys and values are equally wide.
Such files are refused; released files and exports open in transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sft.hf.families.rules import (
    DEFAULTS,
    KEYS,
    LLAMA_DENSE,
    NO_BIAS,
    OPTIONS,
    attention,
    mlp,
    outer,
    output_norms,
    qk_norm,
)
from sft.hf.families.windows import FULL, LINEAR, LINEAR_KINDS
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed, is_true
from sft.hf.tensor_view import LAYER, View

_TYPES, _COUNT, _HEADS, _ROPE = "layer_types", "num_hidden_layers", "num_attention_heads", "rope_parameters"
_ALLOWS_NEGATIVE = "linear_allow_neg_eigval"  # eigenvalues of the state's transitions are 1 - beta
_CONVOLVED = {"query": ("q", "K"), "key": ("k", "K"), "value": ("v", "V")}
_PROJECTED = {**_CONVOLVED, "z": ("g", "V"), "beta": ("b", "m"), "alpha": ("a", "m")}


def _rules() -> tuple[Rule, ...]:
    layer, ours = f"model.layers.{LAYER}", "decoder.layers"
    block, mixer = f"{layer}.linear_attn", f"{ours}.self_attention"

    def linear(name: str, stored: str, shape: str) -> Rule:
        return Rule(name, (View(stored, shape),), kind="linear attention")

    full = (*attention(norm=None), *output_norms(), *qk_norm(across_heads=True))
    return (
        *outer(),
        *(replace(rule, kind="full attention") for rule in full),
        linear(f"{mixer}.in_proj.layer_norm_weight", f"{layer}.attention_layer_norm.weight", "h"),
        *(
            linear(f"{mixer}.in_proj.weight.{part}", f"{block}.{name}_proj.weight", f"{rows} h")
            for part, (name, rows) in _PROJECTED.items()
        ),
        *(
            linear(f"{mixer}.conv1d.weight.{part}", f"{block}.{name}_conv1d.weight", f"{rows} 1 c")
            for part, (name, rows) in _CONVOLVED.items()
        ),
        linear(f"{mixer}.A_log", f"{block}.A_log", "m"),
        linear(f"{mixer}.dt_bias", f"{block}.dt_bias", "m"),
        linear(f"{mixer}.out_norm.weight", f"{block}.o_norm.weight", "u"),
        linear(f"{mixer}.out_proj.weight", f"{block}.o_proj.weight", "h V"),
        linear(f"{ours}.mlp.linear_fc1.layer_norm_weight", f"{layer}.feedforward_layer_norm.weight", "h"),
        *mlp(norm=None),
    )


def _linear_layers(content: Mapping[str, Any]) -> list[int]:
    """The layers with linear attention, counted from 1: {"num_hidden_layers": 8} -> [1, 2, 3, 5, 6, 7]

    Without layer_types, every fourth layer has full attention; in a model of less than four layers, the last layer has.
    """
    count, kinds = content.get(_COUNT), content.get(_TYPES)
    if kinds is None and type(count) is int:
        kinds = [FULL if number % 4 == 0 or number == count < 4 else LINEAR for number in range(1, count + 1)]
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in kinds for kind in LINEAR_KINDS):
        raise ValueError(f"{_TYPES} is not a list of {count} names, one for each layer, with {FULL} and {LINEAR}")
    return [number for number, kind in enumerate(kinds, 1) if kind == LINEAR]


def _without_positions(content: Mapping[str, Any]) -> list[int]:
    """The layers without rotary positions, counted from 1: those with full attention if the rotary base is null.

    Released files have null.  If config.json does not have the key, transformers takes 10,000, and the result is [].
    """
    group = content.get(_ROPE)
    named = [keys["rope_theta"] for keys in (group if isinstance(group, dict) else {}, content) if "rope_theta" in keys]
    if not named or any(base is not None for base in named):
        return []
    linear = _linear_layers(content)
    return [number for number in range(1, content[_COUNT] + 1) if number not in linear]


def _size(name: str, default: Callable[[Mapping[str, Any]], Any]) -> Computed:
    """A computed size: the key `name`, or the result of `default` for config.json if the key is absent or null."""

    def read(content: Mapping[str, Any]) -> Any:
        value = content.get(name)
        return default(content) if value is None else value

    return Computed(name, read)


def _usual_key_width(content: Mapping[str, Any]) -> int | None:
    """The default of linear_key_head_dim: 0.75 * hidden_size / key heads; None if a size is missing."""
    hidden, heads = content.get("hidden_size"), _KEY_HEADS.read(content)
    return int(0.75 * hidden / heads) if type(hidden) is int and type(heads) is int and heads > 0 else None


_KEY_HEADS, _VALUE_HEADS = (
    _size(f"linear_num_{name}_heads", lambda content: content.get(_HEADS)) for name in ("key", "value")
)
_KEY_WIDTH = _size("linear_key_head_dim", _usual_key_width)


def _usual_value_width(content: Mapping[str, Any]) -> int:
    width = _KEY_WIDTH.read(content)
    if type(width) is not int:
        raise ValueError(f"linear_key_head_dim = {width} is not a width")
    return 2 * width


_VALUE_WIDTH = _size("linear_value_head_dim", _usual_value_width)

OLMO_HYBRID = (
    Family(
        model_type="olmo_hybrid",
        class_name="OlmoHybridForCausalLM",
        rules=_rules(),
        implied={
            **LLAMA_DENSE,
            "norm_placement": "post",
            "qk_norm": True,
            "qk_norm_across_heads": True,
            "linear_attention.norm_placement": "pre",
            "linear_attention.norm_epsilon": 1e-5,
        },
        keys={**KEYS, "linear_attention.conv_kernel": "linear_conv_kernel_dim"},
        computed={
            "linear_attention.layers": Computed(_TYPES, _linear_layers, layer_types=LINEAR_KINDS),
            "linear_attention.num_key_heads": _KEY_HEADS,
            "linear_attention.num_value_heads": _VALUE_HEADS,
            "linear_attention.key_head_dim": _KEY_WIDTH,
            "linear_attention.value_head_dim": _VALUE_WIDTH,
            "linear_attention.beta_factor": Computed(
                _ALLOWS_NEGATIVE, lambda content: 2.0 if is_true(content, _ALLOWS_NEGATIVE, True) else 1.0
            ),
            "rope.skip_layers": Computed(_ROPE, _without_positions),
        },
        defaults={**DEFAULTS, "linear_conv_kernel_dim": 4},
        options={**OPTIONS, **NO_BIAS},
    ),
)
