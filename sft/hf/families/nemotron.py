"""Declares Nemotron-H (Nemotron 3 and 3.5), in which each layer is only a mixer, only an MLP, or only experts.

`layers_block_type` names the kind of each layer; older files have the letters of `hybrid_override_pattern` instead.
Attention has no rotary positions.  MLPs and experts have no gate.  The experts of Nemotron 3 Super read a projection of
the token, and their output is projected back.  Tensors of multi-token prediction (`mtp.*`), which transformers ignores,
are passed through.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sft.hf.families.mamba import mamba
from sft.hf.families.routed import layer_rules
from sft.hf.families.rules import attention, correction_bias, experts, mlp, outer, shared_expert
from sft.hf.families.windows import FULL, LINEAR
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_MODEL, _TYPES, _PATTERN = "backbone", "layers_block_type", "hybrid_override_pattern"
_EXPERTS, _MLP = "moe", "mlp"
_LETTERS = {"M": LINEAR, "*": FULL, "E": _EXPERTS, "-": _MLP}
_OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
_NAMES = {  # parts of names in files of most families -> parts of names in files of Nemotron-H
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
    known = [_OLD_NAMES.get(kind, kind) for kind in map(str, kinds)] if isinstance(kinds, list) else []
    if not known or not {*known} <= {*_LETTERS.values()}:
        raise ValueError(f"{_TYPES} is not a list of {', '.join(_LETTERS.values())}, one for each layer")
    return known


def _numbers(*kinds: str) -> Callable[[Mapping[str, Any]], list[int]]:
    """A function that returns, for the content of a config.json, the layers of these kinds, counted from 1."""
    return lambda content: [number for number, kind in enumerate(_types(content), 1) if kind in kinds]


def _if_any(kind: str, value: Any, absent: Any) -> Computed:
    """A computed value: `value` if the model has layers of the kind `kind`, else `absent`."""
    return Computed(_TYPES, lambda content: value if kind in _types(content) else absent)


def _key(kind: str, name: str, default: Any, absent: Any = None, *, alias: str | None = None) -> Computed:
    """A computed value: the key `name` of config.json if the model has layers of the kind `kind`, else `absent`.

    default: the value if the model has such layers, but config.json has no such key; alias: another name of the key
    """
    names = [name] if alias is None else [name, alias]

    def read(content: Mapping[str, Any]) -> Any:
        present = [stored for stored in names if stored in content]
        if kind not in _types(content):
            return absent
        if len({json.dumps(content[stored]) for stored in present}) > 1:
            both = " and ".join(f"{stored} = {json.dumps(content[stored])}" for stored in present)
            raise ValueError(f"{both} are two names of one setting but differ; remove the wrong name")
        return content[present[0]] if present else default

    return Computed(name, read, lambda value, count: {} if value == absent else dict.fromkeys(names, value))


def _rules() -> tuple[Rule, ...]:
    """The rules of all tensors, made from rules of other families by `_renamed`."""
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
        *mamba("mixer", "norm", _MODEL),
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
    """The rule with the names of Nemotron-H (`_NAMES`), and without the gate of an MLP or expert."""
    views = (view for view in rule.views if ".gate_proj." not in view.name)
    return replace(rule, views=tuple(replace(view, name=_stored(view.name)) for view in views))


def _stored(name: str) -> str:
    for ours, stored in _NAMES.items():
        name = name.replace(ours, stored)
    return name


NEMOTRON = (
    Family(
        model_type="nemotron_h",
        class_name="NemotronHForCausalLM",
        rules=_rules(),
        # transformers ties no embeddings of this family, whatever tie_word_embeddings says.
        implied={"qkv_bias": False, "qk_norm": False, "activation": "relu2", "tie_embeddings": False},
        keys={
            "hidden_size": "hidden_size",
            "ffn_hidden_size": "intermediate_size",
            "num_attention_heads": "num_attention_heads",
            "num_query_groups": "num_key_value_heads",
            "head_dim": "head_dim",
            "vocab_size": "vocab_size",
            "norm_epsilon": "layer_norm_epsilon",
        },
        computed={
            "num_layers": Computed(
                _TYPES, lambda content: len(_types(content)), layer_types=(*_LETTERS.values(), *_OLD_NAMES)
            ),
            "halves.without_mixer": Computed(_TYPES, _numbers(_EXPERTS, _MLP)),
            "halves.without_mlp": Computed(_TYPES, _numbers(LINEAR, FULL)),
            "rope.skip_layers": Computed(_TYPES, _numbers(FULL)),
            "moe.layers": Computed(_TYPES, lambda content: _numbers(_EXPERTS)(content) or None),
            "moe.score_function": _if_any(_EXPERTS, "sigmoid", "softmax"),
            "moe.correction_bias": _if_any(_EXPERTS, True, False),
            "moe.num_experts": _key(_EXPERTS, "n_routed_experts", 8, alias="num_local_experts"),
            "moe.top_k": _key(_EXPERTS, "num_experts_per_tok", 2),
            "moe.ffn_hidden_size": _key(_EXPERTS, "moe_intermediate_size", 7688),
            "moe.shared_ffn_hidden_size": _key(_EXPERTS, "moe_shared_expert_intermediate_size", 7688),
            "moe.latent_size": _key(_EXPERTS, "moe_latent_size", None),
            "moe.normalize_top_k": _key(_EXPERTS, "norm_topk_prob", True, True),
            "moe.scaling_factor": _key(_EXPERTS, "routed_scaling_factor", 1.0, 1.0),
            "moe.num_groups": _key(_EXPERTS, "n_group", 1, 1),
            "moe.top_groups": _key(_EXPERTS, "topk_group", 1, 1),
            "mamba.layers": Computed(_TYPES, _numbers(LINEAR)),
            "mamba.num_heads": _key(LINEAR, "mamba_num_heads", 128),
            "mamba.head_dim": _key(LINEAR, "mamba_head_dim", 64, 64),
            "mamba.num_groups": _key(LINEAR, "n_groups", 8, alias="mamba_n_groups"),
            "mamba.state_dim": _key(LINEAR, "ssm_state_size", 128, 128),
            "mamba.conv_kernel": _key(LINEAR, "conv_kernel", 4, 4, alias="mamba_d_conv"),
            "mamba.min_time_step": _key(LINEAR, "time_step_min", 0.001, 0.0, alias="mamba_dt_min"),
        },
        defaults={
            "vocab_size": 131_072,
            "hidden_size": 4096,
            "intermediate_size": 21_504,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_norm_epsilon": 1e-5,
        },
        options={
            "mlp_hidden_act": ("relu2",),
            "attention_dropout": (0.0, None),
            "hidden_dropout": (0.0, None),  # transformers does not read it
            "mlp_bias": (False,),
            "mamba_hidden_act": ("silu", "swish"),
            "use_conv_bias": (True,),
            "mamba_conv_bias": (True,),
            "use_bias": (False,),
        },
        passed_through=("mtp.*",),
    ),
)
