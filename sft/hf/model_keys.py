"""Keys below `model` that config.json expresses in another way, and those that most families do not have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Computed:
    """A key below `model` that config.json expresses in another way.

    read: content of config.json -> the value.  Raises ValueError that says what is wrong
    write: the value and the number of layers -> the changed keys of config.json
    """

    source: str  # key of config.json, for messages
    read: Callable[[Mapping[str, Any]], Any]
    write: Callable[[Any, int], dict[str, Any]]


# What a family has only if its table names the key.
PLAIN: dict[str, Any] = {
    "norm_placement": "pre",
    "qk_norm_across_heads": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "moe.shared_ffn_hidden_size": None,
    "moe.shared_gate": False,
    "rope.skip_layers": [],
    "rope.query_scale_beta": None,
}
