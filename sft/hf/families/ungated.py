"""Declares Arcee, whose MLPs have a squared ReLU and no gate."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sft.hf.families.rules import (
    BIAS_KEYS,
    DEFAULTS,
    KEYS,
    LLAMA_DENSE,
    NO_BIAS_DEFAULTS,
    OPTIONS,
    attention,
    mlp,
    optional_biases,
    outer,
)
from sft.hf.family import Family, Rule

_RELU2: dict[str, tuple[Any, ...]] = {**OPTIONS, "hidden_act": ("relu2",)}


def _without_gate(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Removes the first part of linear_fc1, which is the gate, from `rules`."""
    return tuple(
        replace(rule, views=rule.views[1:]) if len(rule.views) > 1 and ".linear_fc1." in rule.ours else rule
        for rule in rules
    )


UNGATED = (
    Family(
        model_type="arcee",
        class_name="ArceeForCausalLM",
        rules=(*outer(), *attention(), *_without_gate((*mlp(), *optional_biases()))),
        implied={**LLAMA_DENSE, "activation": "relu2"},
        keys={**KEYS, **BIAS_KEYS},
        defaults={**DEFAULTS, "rms_norm_eps": 1e-5, **NO_BIAS_DEFAULTS},
        options=_RELU2,
    ),
)
