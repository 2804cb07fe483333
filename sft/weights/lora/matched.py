"""Finds the adapters of a PEFT folder in a model: the Linear, or the tensor of stacked experts, of each adapter."""

from collections.abc import Sequence
from typing import NamedTuple

from sft.config import Config
from sft.errors import CheckpointError
from sft.hf.family import Family, TensorMapping
from sft.hf.tensor_check import fold_by_layer
from sft.weights.lora.parameters import STACKED, adapter_name, is_target, parameters
from sft.weights.lora.peft import folder
from sft.weights.lora.peft.parameter_names import target_parameters, wrapper_of
from sft.weights.lora.peft.targets import module_of, target_modules
from sft.weights.lora.targets import kinds_of

_SHOWN = 6  # names in an error


class Matched(NamedTuple):
    """The adapters of a folder, by the names that they have here.

    module_of   name of the Linear in files of the base model, or of a tensor of stacked experts with `.*` -> its module
    stacks      name of an adapter of stacked experts -> mapping of the first expert
    targets     the shortest lora.targets that select exactly these Linears
    parameters  the same for lora.target_parameters
    """

    module_of: dict[str, str]
    stacks: dict[str, TensorMapping]
    targets: list[str]
    parameters: list[str]


def match(source: str, adapter: folder.PeftAdapter, family: Family, config: Config) -> Matched:
    """The adapters of the folder.

    In a model with a vision tower, PEFT writes the module names of transformers, which depend on its version and differ
    from the names in the files.
    Raises CheckpointError if a module is not a Linear that can have an adapter.
    """
    kinds, has_vision = kinds_of(family, config.model), family.text_config != "none"
    linears = {name for name, kind in kinds.items() if kind != STACKED}
    linear_of = {module_of(linear, has_vision=has_vision): linear for linear in linears}
    modules, by_name = adapter.contents.modules.keys(), dict[str, str]()
    for module in modules:
        if linear := linear_of.get(module_of(module, has_vision=has_vision)):
            by_name.setdefault(linear, module)
    targets = target_modules(by_name, linears - by_name.keys())
    known = parameters(family.mappings(config.model, 0), has_vision=has_vision)
    asked = adapter.contents.config.target_parameters
    chosen = {name: mapping for name, mapping in known.items() if any(is_target(target, name) for target in asked)}
    if unknown := [target for target in asked if known and not any(is_target(target, name) for name in known)]:
        raise CheckpointError(
            f"{source} has target_parameters = {unknown[0]}, but this trainer adapts no parameter of this name in this "
            "model.  Use an adapter of the model that model.hf names."
        )
    stored = {module_of(module, has_vision=has_vision): module for module in modules}
    wrappers = {adapter_name(mapping): wrapper_of(name, chosen) for name, mapping in chosen.items()}
    if missing := sorted({*wrappers.values()} - stored.keys()):
        raise CheckpointError(f"{source} has no factors of {shown(missing)}, which its target_parameters names.")
    by_name |= {name: stored[wrapper] for name, wrapper in wrappers.items()}
    stacks = {adapter_name(mapping): mapping for mapping in chosen.values() if mapping.expert is not None}
    if asked and not known:
        is_single = "expert" in kinds.values()
        why = (
            "the files of this model hold one tensor for each expert, and here each of them has its own factors, while "
            "target_parameters gives gate and up one factor A.  Use an adapter of single experts"
            if is_single
            else "the files of this model hold no experts as one tensor.  Use an adapter of the model of model.hf"
        )
        raise CheckpointError(f"{source} has adapters of parameters (target_parameters = {asked[0]}), but {why}.")
    if unknown := sorted(modules - {*by_name.values()}):
        raise CheckpointError(
            f"{source} has adapters of {shown(unknown)}, but this trainer adapts no Linears of these names in this "
            "model.  Use an adapter of the model that model.hf names."
        )
    return Matched(by_name, stacks, targets, target_parameters(chosen, known.keys() - chosen.keys()))


def shown(names: Sequence[str]) -> str:
    """The names, folded by layer and expert; at most `_SHOWN` lines."""
    lines = fold_by_layer(names)
    return ", ".join(lines[:_SHOWN]) + (f" and {len(lines) - _SHOWN} others" if len(lines) > _SHOWN else "")
