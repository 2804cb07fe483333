"""Defines `Computed`, for model keys that config.json expresses in another way, and the model keys of few families."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sft.config.keys import leaves
from sft.config.model import MIXER_SECTIONS


@dataclass(frozen=True)
class Computed:
    """How to compute the value of one key below `model` from config.json, and the keys of config.json from the value.

    read: content of config.json -> the value.  Raises ValueError that says what is wrong
    write: the value and the number of layers -> the changed keys of config.json; {} if no recipe can change the value
    """

    source: str  # key of config.json, for messages
    read: Callable[[Mapping[str, Any]], Any]
    write: Callable[[Any, int], dict[str, Any]] = lambda value, count: {}
    layer_types: tuple[str, ...] = ()  # names that `read` accepts in layer_types of config.json


def is_true(content: Mapping[str, Any], key: str, default: bool) -> bool:
    """Whether a key of config.json is true.  null counts as false.

    default: the value if config.json has no such key
    Raises ValueError for values other than true, false and null, such as the string "false".
    """
    value = content.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} = {json.dumps(value)} is neither true nor false")
    return bool(value)


# Model keys that few families have -> their defaults.  Models have the default if their family does not name the key.
PLAIN: dict[str, Any] = {
    key: leaves()[f"model.{key}"].default
    for key in (
        *("norm_placement", "norm_zero_centered", "qk_norm_across_heads", "value_norm", "layer_scalar"),
        *("final_norm_zero_centered", "output_norm_epsilon", "qk_norm_weights", "embedding_norm"),
        "qk_norm_after_rotary",
        *(f"full_attention.{name}" for name in ("head_dim", "num_attention_heads", "num_query_groups")),
        *("full_attention.sinks", "full_attention.keys_as_values", "value_head_dim", "value_multiplier"),
        *("sliding_window", "sliding_window_layers", "attention_softcap"),
        *("activation", "activation_limit", "activation_alpha"),
        *("swiglu_limits", "moe.swiglu_limits"),
        *("attention_sinks", "attention_output_bias", "mlp_bias", "moe.router_bias"),
        "round_embedding_multiplier",
        *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
        "logits_softcap",
        *("moe.shared_ffn_hidden_size", "moe.shared_gate", "moe.own_norms", "moe.score_function", "moe.scaling_factor"),
        *(
            "moe.num_groups",
            "moe.top_groups",
            "moe.correction_bias",
            "moe.dense_layers",
            "moe.layers",
            "moe.latent_size",
        ),
        *("halves.without_mixer", "halves.without_mlp"),
        *("rope.fraction", "rope.skip_layers", "rope.query_scale_beta", "attention_output_gate", "rope.window_base"),
        *("attention_head_gate", "rope.window_fraction", "rope.interleaved", "rope.mscale_all_dim"),
        *(f"linear_attention.{name}" for name in ("beta_factor", "norm_epsilon", "norm_placement")),
        *(f"{name}.{section.switch}" for name, section in MIXER_SECTIONS.items()),
    )
}
