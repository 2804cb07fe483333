"""Selects the parameters that LoRA adapts: experts that files hold as one tensor, and the routers of such models.

    lora.target_parameters: [experts.gate_up_proj]

In transformers, such a tensor is a parameter [experts, in, out] or [experts, out, in] of a module, and no Linear.  PEFT
adapts it by `target_parameters`: every expert has its own factors, and gate and up of an expert share one factor A.  A
router's weight [experts, in] has one pair of factors.  As in PEFT, a target is the name of a parameter, or the end of
its name after a dot.
"""

import difflib
from collections.abc import Iterable

from sft.config import ModelConfig
from sft.config.lora import LoraConfig
from sft.errors import ConfigError
from sft.hf.family import TensorMapping
from sft.hf.model_family import model_family
from sft.weights.lora.peft.parameter_names import parameter_of

STACKED = "experts in one tensor"


def kind_of_stack(mapping: TensorMapping) -> str | None:
    """`STACKED` for a weight of experts that files hold as one tensor, a reason if LoRA cannot adapt it, else None.

    mapping: the mapping of a weight of one expert
    """
    if not any(view.index for view in mapping.sources):
        return None
    if len({view.name for view in mapping.sources}) > 1:
        return "the files of this model hold gate and up of all experts in two tensors, and PEFT adapts both as one"
    return STACKED


def parameters(mappings: Iterable[TensorMapping], *, has_vision: bool) -> dict[str, TensorMapping]:
    """The parameters that `lora.target_parameters` can name: name in transformers -> mapping.

    These are stacked experts, whose mapping is that of the first expert, and the routers of models with such experts.
    mappings: those of all tensors of the model; has_vision: whether the model has a vision tower
    """
    mappings = list(mappings)
    if not any(map(_is_stack, mappings)):
        return {}
    return {
        parameter_of(mapping.sources[0].name, has_vision=has_vision): mapping
        for mapping in mappings
        if _is_stack(mapping) or _is_router(mapping)
    }


def _is_stack(mapping: TensorMapping) -> bool:
    """Whether the mapping is that of the first of stacked experts."""
    return mapping.expert == 0 and len(mapping.row_shape) == 1 and kind_of_stack(mapping) == STACKED


def _is_router(mapping: TensorMapping) -> bool:
    """Whether the mapping is that of a router's weight which is a parameter, and no Linear, in transformers."""
    is_router = mapping.layer is not None and mapping.parameter.endswith(".mlp.router.weight")
    return is_router and not mapping.sources[0].name.endswith(".proj.weight")  # Gemma 4 has a Linear


def adapter_name(mapping: TensorMapping) -> str:
    """The name of the adapter (`Adapter.name`) of a parameter.  mapping: as in `parameters`"""
    name = mapping.sources[0].name
    return name.removesuffix(".weight") if mapping.expert is None else f"{name}.*"


def is_target(target: str, parameter: str) -> bool:
    """Whether PEFT selects the parameter by this element of target_parameters."""
    return parameter == target or parameter.endswith(f".{target}")


def selected(lora: LoraConfig, model: ModelConfig, mappings: Iterable[TensorMapping]) -> dict[str, TensorMapping]:
    """The parameters that `lora.target_parameters` selects: name of the adapter -> mapping, as in `parameters`.

    mappings: those of all tensors of the model
    Raises ConfigError if a target matches no parameter.
    """
    if not lora.target_parameters:
        return {}
    mappings, family = list(mappings), model_family(model)
    has_vision = family is not None and family.text_config != "none"
    known = parameters(mappings, has_vision=has_vision)
    chosen = dict[str, TensorMapping]()
    for target in lora.target_parameters:
        matches = [mapping for name, mapping in known.items() if is_target(target, name)]
        if not matches:
            raise ConfigError(_unmatched(target, list(known), mappings))
        chosen |= {adapter_name(mapping): mapping for mapping in matches}
    return chosen


def _unmatched(target: str, known: list[str], mappings: Iterable[TensorMapping]) -> str:
    """Why the target names no parameter that can have an adapter, and what would work.  known: all such parameters"""
    named = f"lora.target_parameters names {target!r}, but"
    routers = {mapping.sources[0].name for mapping in mappings if mapping.parameter.endswith(".mlp.router.weight")}
    if any(is_target(target, name) for name in routers):
        return (
            f"{named} the routers of this model have no adapters here: only models whose files hold all experts of a "
            "layer as one tensor have them, if the router is no Linear.  Remove this name."
        )
    matrices = [mapping for mapping in mappings if mapping.expert is None and len(mapping.row_shape) == 1]
    linears = {view.name for mapping in matrices if mapping.layer is not None for view in mapping.sources} - routers
    if any(is_target(target, name) or is_target(f"{target}.weight", name) for name in linears):
        return f"{named} this is a Linear.  Name it in lora.targets: {target.removesuffix('.weight')}."
    if not known:
        if any(mapping.expert is not None and kind_of_stack(mapping) is None for mapping in mappings):
            return (
                f"{named} the files of this model hold one tensor for each expert, so each expert has its own "
                'adapters.  Name them in lora.targets: "experts.*".'
            )
        return f"{named} this model has no experts that its files hold as one tensor.  Use lora.targets."
    ends = sorted({".".join(name.split(".")[-2:]) for name in known})
    near = difflib.get_close_matches(target, ends, n=1)
    nearest = f"  Nearest: {near[0]}." if near else ""
    return f"{named} this model has no such parameter.{nearest}  It has {', '.join(ends)}, for example {known[0]}."
