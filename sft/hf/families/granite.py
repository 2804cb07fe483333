"""Declares Granite: factors on embedding, residual stream, attention and logits; and Granite Swash, with windows and
sinks.  mamba.py has Granite 4.0 H.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.hf.families.rules import (
    BIAS_KEYS,
    DEFAULTS,
    KEYS,
    LLAMA_DENSE,
    NO_BIAS,
    NO_BIAS_DEFAULTS,
    OPTIONS,
    attention,
    mlp,
    optional_biases,
    outer,
    sinks,
    stacked_experts,
)
from sft.hf.families.windows import BASES, all_but_every, without_base
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed

MULTIPLIERS = {
    name: name for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
}
GRANITE_EXPERTS = stacked_experts(
    block="block_sparse_moe",
    router="router.layer.weight",
    gate_up="input_linear.weight",
    down="output_linear.weight",
)


def _granite_without_positions(content: Mapping[str, Any]) -> list[int]:
    """The layers whose base is 0.  The bases of all others must be the one of rope_parameters."""
    skipped = without_base(content, lambda count: [])
    stated = content.get("rope_parameters") or content
    base = stated.get("rope_theta", 10_000.0) if isinstance(stated, dict) else None
    if any(own not in (0, base) for own in content.get(BASES) or ()):
        raise ValueError(f"{BASES} has other numbers than 0 and rope_theta = {base}")
    return skipped


_PLAIN = (
    Family(
        model_type="granite",
        class_name="GraniteForCausalLM",
        rules=(*outer(), *attention(), *mlp(), *optional_biases()),
        implied=LLAMA_DENSE,
        keys={**KEYS, **MULTIPLIERS, **BIAS_KEYS},
        defaults={**DEFAULTS, **dict.fromkeys(MULTIPLIERS, 1.0), **NO_BIAS_DEFAULTS},
        options=OPTIONS,
    ),
    Family(
        model_type="granitemoe",
        class_name="GraniteMoeForCausalLM",
        rules=(*outer(), *attention(), *GRANITE_EXPERTS),
        implied={"qkv_bias": False, "qk_norm": False, "moe.normalize_top_k": True},
        keys={**KEYS, **MULTIPLIERS, "moe.num_experts": "num_local_experts", "moe.top_k": "num_experts_per_tok"},
        defaults={**DEFAULTS, **dict.fromkeys(MULTIPLIERS, 1.0), "num_local_experts": 8, "num_experts_per_tok": 2},
        options={**OPTIONS, **NO_BIAS},
    ),
)
_BY_TYPE = {family.model_type: family for family in _PLAIN}


def _swa(name: str, *mlps: Rule, **defaults: Any) -> Family:
    """A family of Granite with windows in some layers, and sinks in all.  mlps: rules of its MLPs or experts"""
    family = _BY_TYPE[name]
    return replace(
        family,
        model_type=f"{name}_swa",
        class_name=family.class_name.replace("ForCausalLM", "SWAForCausalLM"),
        rules=(*outer(), *attention(), *sinks(), *mlps),
        implied={**family.implied, "attention_sinks": True},
        computed={
            **all_but_every(4, default=128, first_is_full=True),
            "rope.skip_layers": Computed(BASES, _granite_without_positions),
        },
        defaults={**family.defaults, **defaults},
        options={**family.options, "shared_intermediate_size": (0,)},
    )


GRANITE = (
    *_PLAIN,
    _swa(
        "granite",
        *(*mlp(), *optional_biases()),
        rms_norm_eps=1e-5,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    ),
    # transformers reads these names, and no others.
    _swa("granitemoe", *stacked_experts(block="block_sparse_moe", router="router.weight")),
)
