"""Declares Nemotron-H (Nemotron 3 and 3.5), whose layers are each only a mixer, an MLP, or experts.

`layers_block_type` names the kind of each layer; older files have the letters of `hybrid_override_pattern` instead.
Attention has no rotary positions.  MLPs and experts have no gate.  The experts of Nemotron 3 Super read a projection of
the token, and their output is projected back.  Tensors of multi-token prediction (`mtp.*`), which transformers ignores,
are passed through.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sft.hf.families.routed import SIGMOID, layer_rules
from sft.hf.families.rules import attention, correction_bias, experts, mlp, outer, shared_expert
from sft.hf.families.windows import FULL, LINEAR
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_MODEL, _TYPES, _PATTERN = "backbone", "layers_block_type", "hybrid_override_pattern"
_EXPERTS, _MLP = "moe", "mlp"
_LETTERS = {"M": LINEAR, "*": FULL, "E": _EXPERTS, "-": _MLP}
_OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
_NAMES = {  # our parts of names -> parts of names in the files
    "self_attn.": "mixer.",
    ".mlp.": ".mixer.",
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    "embed_tokens": "embeddings",
    f"{_MODEL}.norm.": f"{_MODEL}.norm_f.",
}


def _types(content: Mapping[str, Any]) -> list[str]:
    """The kind of each layer: {"hybrid_override_pattern": "M*"} -> ["linear_attention", "full_attention"]"""
    kinds = content.get(_TYPES, content.get("layer_types"))
    if kinds is None:
        pattern = content.get(_PATTERN, "ME*-")
        kinds = [_LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
    known = [_OLD_NAMES.get(kind, kind) for kind in kinds] if isinstance(kinds, list) else []
    if not known or not {*known} <= {*_LETTERS.values()}:
        raise ValueError(f"{_TYPES} is not a list of {', '.join(_LETTERS.values())}, one for each layer")
    return known


def _numbers(*kinds: str) -> Callable[[Mapping[str, Any]], list[int]]:
    """A function of config.json: the layers of these kinds, counted from 1."""
    return lambda content: [number for number, kind in enumerate(_types(content), 1) if kind in kinds]


def _if_experts(value: Any, absent: Any) -> Callable[[Mapping[str, Any]], Any]:
    """A function of config.json: `value` if the model has experts, else `absent`."""
    return lambda content: value if _EXPERTS in _types(content) else absent


def _of_experts(name: str, default: Any, absent: Any) -> Computed:
    """A computed value: the key `name` of config.json if the model has experts, else `absent`."""
    return Computed(
        name,
        lambda content: _if_experts(content.get(name, default), absent)(content),
        lambda value, count: {} if value == absent else {name: value},
    )


def _rules() -> tuple[Rule, ...]:
    """The rules of all tensors.  `_NAMES` changes the names that other families have."""
    projections = [("fc1", "W h"), ("fc2", "h W")]
    latents = (
        Rule(
            f"decoder.layers.mlp.{name}_latent_proj.weight",
            (View(f"{_MODEL}.layers.{LAYER}.mixer.{name}_latent_proj.weight", shape),),
            needs="moe.latent_size",
        )
        for name, shape in projections
    )
    rules = (
        *outer(_MODEL),
        *(replace(rule, kind="full attention") for rule in attention(_MODEL)),
        *layer_rules("dense", *mlp(_MODEL)),
        *layer_rules(
            "experts",
            *experts("mlp", "gate_proj", "up_proj", "down_proj", _MODEL),
            *correction_bias("mlp.gate", _MODEL),
            *shared_expert("shared_experts", None, _MODEL),
            *latents,
        ),
    )
    return tuple(map(_renamed, rules))


def _renamed(rule: Rule) -> Rule:
    """A rule whose names in the files are those of Nemotron-H, without the gate of an MLP."""
    views = (view for view in rule.views if ".gate_proj." not in view.name)
    return replace(rule, views=tuple(replace(view, name=_stored(view.name)) for view in views))


def _stored(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


NEMOTRON = (
    Family(
        model_type="nemotron_h",
        class_name="NemotronHForCausalLM",
        rules=_rules(),
        implied={"qkv_bias": False, "qk_norm": False, "activation": "relu2"},
        keys={
            "hidden_size": "hidden_size",
            "ffn_hidden_size": "intermediate_size",
            "num_attention_heads": "num_attention_heads",
            "num_query_groups": "num_key_value_heads",
            "head_dim": "head_dim",
            "vocab_size": "vocab_size",
            "norm_epsilon": "layer_norm_epsilon",
            "tie_embeddings": "tie_word_embeddings",
        },
        computed={
            "num_layers": Computed(_TYPES, lambda content: len(_types(content)), layer_types=(*_LETTERS.values(),)),
            "halves.without_mixer": Computed(_TYPES, _numbers(_EXPERTS, _MLP)),
            "halves.without_mlp": Computed(_TYPES, _numbers(LINEAR, FULL)),
            "rope.skip_layers": Computed(_TYPES, _numbers(FULL)),
            "moe.layers": Computed(_TYPES, lambda content: _numbers(_EXPERTS)(content) or None),
            "moe.score_function": Computed(_TYPES, _if_experts("sigmoid", "softmax")),
            "moe.correction_bias": Computed(_TYPES, _if_experts(True, False)),
            **{
                f"moe.{ours}": _of_experts(name, default, absent)
                for ours, name, default, absent in (
                    ("num_experts", "n_routed_experts", 8, None),
                    ("top_k", "num_experts_per_tok", 2, None),
                    ("ffn_hidden_size", "moe_intermediate_size", 7688, None),
                    ("shared_ffn_hidden_size", "moe_shared_expert_intermediate_size", 7688, None),
                    ("latent_size", "moe_latent_size", None, None),
                    ("normalize_top_k", "norm_topk_prob", True, True),
                    ("scaling_factor", "routed_scaling_factor", 1.0, 1.0),
                    ("num_groups", "n_group", 1, 1),
                    ("top_groups", "topk_group", 1, 1),
                )
            },
        },
        defaults={
            "vocab_size": 131_072,
            "hidden_size": 4096,
            "intermediate_size": 21_504,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
        },
        options={
            "mlp_hidden_act": ("relu2",),
            "tie_word_embeddings": (False,),  # transformers does not tie them
            "attention_dropout": (0.0, None),
            "hidden_dropout": (0.0, None),  # transformers does not read it
            "mlp_bias": (False,),
        },
        passed_through=("mtp.*",),
    ),
)
