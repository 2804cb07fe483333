"""Declares Gemma 1 to 3: GeGLU and a scaled embedding; from Gemma 2 on also norms after attention and MLP, and windows.

Gemma 2 has soft caps, and Gemma 3 has norms on queries and keys.  transformers computes the factor of the embedding
from hidden_size, and rounds it to the precision of the weights.  From Gemma 2 on, it computes the factor of query-key
products from query_pre_attn_scalar.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.hf.families.rules import KEYS, LLAMA_DENSE, NO_BIAS, attention, mlp, outer, output_norms, qk_norm
from sft.hf.families.windows import all_but_every
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed

_INNER, _OUTER = "model.language_model", "language_model.model"  # names in files of Gemma 3 with a vision tower
_SCALAR, _HIDDEN = "query_pre_attn_scalar", "hidden_size"
_NORM = "pre_feedforward_layernorm"


def root(key: str, default: float | None, power: float) -> Computed:
    """A computed value: the number `key` of config.json, raised to `power`.  An export does not write the key.

    default: the number if config.json has no `key`; None: config.json must have it
    """

    def read(content: Mapping[str, Any]) -> float:
        value = content.get(key, default)
        if not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{key} = {value} is not a number above 0")
        return math.pow(value, power)

    return Computed(key, read)


def _rules(model: str = "model", head: str = "lm_head.weight") -> tuple[Rule, ...]:
    return (*outer(model, head), *attention(model), *mlp(model, _NORM), *output_norms(model))


_OPTIONS: dict[str, tuple[Any, ...]] = {
    **NO_BIAS,
    "attention_dropout": (0.0, None),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "auto_map": (None,),
}
_GEMMA1 = Family(
    model_type="gemma",
    class_name="GemmaForCausalLM",
    rules=(*outer(), *attention(), *mlp()),
    implied={
        **LLAMA_DENSE,
        "norm_zero_centered": True,
        "activation": "geglu",
        "round_embedding_multiplier": True,
    },
    keys=KEYS,
    computed={"embedding_multiplier": root(_HIDDEN, None, 0.5)},
    defaults={
        "vocab_size": 256_000,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    options={
        **_OPTIONS,
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # transformers reads both as the tanh form
        "hidden_activation": (None, "gelu_pytorch_tanh"),
    },
)
_GEMMA2 = Family(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    rules=_rules(),
    implied={
        **LLAMA_DENSE,
        "norm_placement": "both",
        "norm_zero_centered": True,
        "activation": "geglu",
        "round_embedding_multiplier": True,
    },
    keys={**KEYS, "logits_softcap": "final_logit_softcapping", "attention_softcap": "attn_logit_softcapping"},
    computed={
        **all_but_every(2),
        "embedding_multiplier": root(_HIDDEN, None, 0.5),
        "attention_multiplier": root(_SCALAR, 256, -0.5),
    },
    defaults={
        "vocab_size": 256_000,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    options={**_OPTIONS, "hidden_activation": ("gelu_pytorch_tanh",)},
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    rules=(*_rules(), *qk_norm()),
    implied={**_GEMMA2.implied, "qk_norm": True},
    keys={**KEYS, "logits_softcap": "final_logit_softcapping"},
    computed={**_GEMMA2.computed, **all_but_every(6, "sliding_window_pattern")},
    defaults={**_GEMMA2.defaults, "vocab_size": 262_208, "final_logit_softcapping": None, "rope_theta": 1e6}
    | {"attn_logit_softcapping": None},
    options={**_GEMMA2.options, "attn_logit_softcapping": (None,)},  # transformers computes Gemma 3 without it
    rope_by_layer_type=True,
    window_theta=("rope_local_base_freq", 1e4),
)
# Attention is bidirectional among the tokens of one image, but causal in text without images.
_GEMMA3_VISION = replace(
    _GEMMA3,
    model_type="gemma3",
    class_name="Gemma3ForConditionalGeneration",
    rules=(*_rules(_OUTER, "language_model.lm_head.weight"), *qk_norm(_OUTER)),
    other_rules=((*_rules(_INNER), *qk_norm(_INNER)),),
    text_config="required",
    passed_through=(
        "vision_tower.*",
        "multi_modal_projector.*",
        "model.vision_tower.*",
        "model.multi_modal_projector.*",
    ),
)

GEMMA = (_GEMMA1, _GEMMA2, _GEMMA3, _GEMMA3_VISION)
