"""Declares Granite 4 (hybrid), in which most layers have Mamba-2, and the rules of Mamba-2 that families share.

In Granite 4 each layer has a mixer, a shared MLP, and in models with experts also a mixture of experts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.config.halves import MlpKind
from sft.hf.families.granite import GRANITE_EXPERTS, MULTIPLIERS
from sft.hf.families.rules import DEFAULTS, KEYS, NO_BIAS, OPTIONS, attention, outer
from sft.hf.families.windows import FULL, LINEAR
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_CHANNELS = ("x", "B", "C")  # parts of the channels of the convolution


def mamba(block: str, norm: str, model: str = "model") -> tuple[Rule, ...]:
    """The rules of Mamba-2.  Files have one tensor for all input projections, and one for all channels.

    block: name of the mixer in its layer; norm: name of the norm before it
    """
    layer, ours = f"{model}.layers.{LAYER}", "decoder.layers.self_attention"

    def parts(name: str, axes: str, named: tuple[str, ...]) -> tuple[Rule, ...]:
        views = (View(f"{layer}.{block}.{name}", axes, part) for part in range(len(named)))
        return tuple(Rule(f"{ours}.{name}.{part}", (view,)) for part, view in zip(named, views))

    wholes = (("A_log", "H"), ("D", "H"), ("dt_bias", "H"), ("norm.weight", "I"), ("out_proj.weight", "h I"))
    rules = (
        Rule(f"{ours}.in_proj.layer_norm_weight", (View(f"{layer}.{norm}.weight", "h"),)),
        *parts("in_proj.weight", "I+I+S+S+H h", ("z", *_CHANNELS, "dt")),
        *parts("conv1d.weight", "I+S+S 1 w", _CHANNELS),
        *parts("conv1d.bias", "I+S+S", _CHANNELS),
        *(Rule(f"{ours}.{name}", (View(f"{layer}.{block}.{name}", shape),)) for name, shape in wholes),
    )
    return tuple(replace(rule, kind="Mamba-2") for rule in rules)


_TYPES, _EXPERTS = "layer_types", "num_local_experts"
_OLD_NAMES = {"mamba": LINEAR, "attention": FULL}


def _layers(content: Mapping[str, Any], wanted: str) -> list[int]:
    """The layers of the kind `wanted`, counted from 1: {"layer_types": ["mamba", "attention"]}, FULL -> [2]

    layers_block_type is an older name of layer_types.  Without both, all layers have Mamba-2.
    """
    count = content.get("num_hidden_layers")
    kinds = content.get(_TYPES, content.get("layers_block_type", [LINEAR] * count if type(count) is int else None))
    known = (FULL, LINEAR, *_OLD_NAMES)
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in known for kind in kinds):
        raise ValueError(
            f"{_TYPES} is not a list of {count} names {FULL}, {LINEAR}, mamba or attention, one for each layer"
        )
    return [number for number, kind in enumerate(kinds, 1) if _OLD_NAMES.get(kind, kind) == wanted]


def _unrotated(content: Mapping[str, Any]) -> list[int]:
    """The layers without rotary positions: all layers with attention, or [] if position_embedding_type is "rope"."""
    return [] if content.get("position_embedding_type") == "rope" else _layers(content, FULL)


def _head_dim(content: Mapping[str, Any]) -> int:
    width, heads = content.get("mamba_d_head", "auto"), content.get("mamba_n_heads", 128)
    factors = content.get("mamba_expand", 2), content.get("hidden_size")
    if any(type(size) is not int or size < 1 for size in (heads, *factors)):
        shown = f"mamba_expand = {factors[0]} and hidden_size = {factors[1]}"
        raise ValueError(f"mamba_n_heads = {heads}, {shown} must be integers above 0")
    inner = factors[0] * factors[1]
    width = inner // heads if width == "auto" else width
    if type(width) is not int or width * heads != inner:
        raise ValueError(f"mamba_d_head = {width} with mamba_n_heads = {heads} do not give mamba_expand x hidden_size")
    return width


def _time_step(content: Mapping[str, Any], end: int) -> float | None:
    """The smallest time step (end 0) or the largest one (end 1); None: time steps have no upper limit."""
    stated = content.get("time_step_limit") or [0.0, float("inf")]
    limit = stated[end] if isinstance(stated, list) and len(stated) == 2 else None
    limit = limit.get("__float__") if isinstance(limit, dict) else limit  # how transformers writes infinity
    try:
        value = float(limit)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"time_step_limit = {stated} is not a pair of numbers") from None
    return None if value == float("inf") else value


def _num_experts(content: Mapping[str, Any]) -> Any:
    """The number of experts; None if config.json has 0 or null."""
    count = content.get(_EXPERTS, 8)
    return None if count == 0 else count


def _with_experts(name: str, default: Any) -> Computed:
    """A computed value: the key `name` of config.json if the model has experts, else None."""
    return Computed(
        name,
        lambda content: None if _num_experts(content) is None else content.get(name, default),
        lambda value, count: {} if value is None else {name: value},
    )


def _mlp_width(content: Mapping[str, Any]) -> int:
    has_experts = _num_experts(content) is not None
    name, default = ("intermediate_size", 11008) if has_experts else ("shared_intermediate_size", 1024)
    width: int = content.get(name, default)
    return width


def _shared_mlp(ours: str, width: str, mlp: MlpKind) -> tuple[Rule, ...]:
    """The rules of the shared MLP.

    ours: name of the MLP in our layers; width: letter of its width
    mlp: kind of the layers that have it: "experts" if it is beside experts, "dense" if it is the only MLP
    """
    layer = f"model.layers.{LAYER}.shared_mlp"
    gate_up = tuple(View(f"{layer}.input_linear.weight", f"{width}+{width} h", part) for part in range(2))
    rules = (
        Rule(f"decoder.layers.{ours}.linear_fc1.weight", gate_up),
        Rule(f"decoder.layers.{ours}.linear_fc2.weight", (View(f"{layer}.output_linear.weight", f"h {width}"),)),
    )
    return tuple(replace(rule, mlp=mlp) for rule in rules)


def _mlps() -> tuple[Rule, ...]:
    norm = View(f"model.layers.{LAYER}.post_attention_layernorm.weight", "h")
    return (
        *(replace(rule, mlp="experts") for rule in GRANITE_EXPERTS),
        *_shared_mlp("mlp.shared_experts", "s", "experts"),
        Rule("decoder.layers.mlp.linear_fc1.layer_norm_weight", (norm,), mlp="dense"),
        *_shared_mlp("mlp", "f", "dense"),
    )


GRANITE_HYBRID = (
    Family(
        model_type="granitemoehybrid",
        class_name="GraniteMoeHybridForCausalLM",
        rules=(
            *outer(),
            *(replace(rule, kind="full attention") for rule in attention()),
            *mamba("mamba", "input_layernorm"),
            *_mlps(),
        ),
        implied={"qkv_bias": False, "qk_norm": False, "moe.normalize_top_k": True},
        keys={name: key for name, key in KEYS.items() if name not in ("ffn_hidden_size", "head_dim")} | MULTIPLIERS,
        computed={
            "ffn_hidden_size": Computed("intermediate_size", _mlp_width),
            "rope.skip_layers": Computed("position_embedding_type", _unrotated),
            "moe.num_experts": Computed(_EXPERTS, _num_experts),
            "moe.top_k": _with_experts("num_experts_per_tok", 2),
            "moe.ffn_hidden_size": _with_experts("intermediate_size", 11008),
            "moe.shared_ffn_hidden_size": _with_experts("shared_intermediate_size", 1024),
            "mamba.layers": Computed(
                _TYPES, lambda content: _layers(content, LINEAR), layer_types=(LINEAR, FULL, *_OLD_NAMES)
            ),
            "mamba.num_heads": Computed("mamba_n_heads", lambda content: content.get("mamba_n_heads", 128)),
            "mamba.head_dim": Computed("mamba_d_head", _head_dim),
            "mamba.num_groups": Computed("mamba_n_groups", lambda content: content.get("mamba_n_groups", 1)),
            "mamba.state_dim": Computed("mamba_d_state", lambda content: content.get("mamba_d_state", 256)),
            "mamba.conv_kernel": Computed("mamba_d_conv", lambda content: content.get("mamba_d_conv", 4)),
            "mamba.min_time_step": Computed("time_step_limit", lambda content: _time_step(content, 0) or 0.0),
            "mamba.max_time_step": Computed("time_step_limit", lambda content: _time_step(content, 1)),
        },
        defaults={**DEFAULTS, **dict.fromkeys(MULTIPLIERS, 1.0)},
        options={**OPTIONS, **NO_BIAS, "mamba_conv_bias": (True,), "mamba_proj_bias": (False,)},
    ),
)
