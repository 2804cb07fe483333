"""Selects the experts that LoRA adapts in models whose files hold all experts of a layer as one tensor.

    lora.target_parameters: [experts.gate_up_proj]

In transformers, such a tensor is a parameter [experts, in, out] or [experts, out, in] of a module, and no Linear.  PEFT
adapts it by `target_parameters`: every expert has its own factors, and gate and up of an expert share one factor A.  As
in PEFT, a target is the name of a parameter, or the end of its name after a dot.
"""

import difflib
from collections.abc import Iterable

from sft.config import ModelConfig
from sft.config.lora import LoraConfig
from sft.errors import ConfigError
from sft.hf.family import TensorMapping
from sft.hf.model_family import model_family
from sft.weights.lora.peft.stacked import parameter_of

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


def stacked_parameters(mappings: Iterable[TensorMapping], *, has_vision: bool) -> dict[str, TensorMapping]:
    """The parameters that `lora.target_parameters` can name: name in transformers -> mapping of the first expert.

    mappings: those of all tensors of the model; has_vision: whether the model has a vision tower
    """
    return {
        parameter_of(mapping.sources[0].name, has_vision=has_vision): mapping
        for mapping in mappings
        if mapping.expert == 0 and len(mapping.row_shape) == 1 and kind_of_stack(mapping) == STACKED
    }


def is_target(target: str, parameter: str) -> bool:
    """Whether PEFT selects the parameter by this element of target_parameters."""
    return parameter == target or parameter.endswith(f".{target}")


def selected_tensors(lora: LoraConfig, model: ModelConfig, mappings: Iterable[TensorMapping]) -> list[str]:
    """The names in files of the tensors that `lora.target_parameters` selects.

    mappings: those of the model's linear layers
    Raises ConfigError if a target matches no parameter.
    """
    if not lora.target_parameters:
        return []
    mappings, family = list(mappings), model_family(model)
    has_vision = family is not None and family.text_config != "none"
    known = stacked_parameters(mappings, has_vision=has_vision)
    chosen = dict[str, None]()
    for target in lora.target_parameters:
        matches = [mapping for name, mapping in known.items() if is_target(target, name)]
        if not matches:
            raise ConfigError(_unmatched(target, list(known), mappings))
        chosen |= dict.fromkeys(mapping.sources[0].name for mapping in matches)
    return list(chosen)


def _unmatched(target: str, known: list[str], mappings: Iterable[TensorMapping]) -> str:
    """Why the target names no parameter that can have an adapter, and what would work.  known: all such parameters"""
    named = f"lora.target_parameters names {target!r}, but"
    linears = [mapping.sources[0].name for mapping in mappings if mapping.expert is None]
    if any(is_target(target, name) or is_target(f"{target}.weight", name) for name in linears):
        return f"{named} this is a Linear.  Name it in lora.targets: {target.removesuffix('.weight')}."
    if "router" in target or target.endswith("gate.weight"):
        return (
            f"{named} routers have no adapters here: a router multiplies in fp32, outside of a linear layer.  Remove "
            "this name."
        )
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
