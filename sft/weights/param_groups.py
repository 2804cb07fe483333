"""Finds the weights and adapters of each group of optim.groups, by the names that train.freeze has.

With LoRA, the name of a Linear means the factors A and B of its adapter, and other names mean the weights that are
trained beside the adapters.  A group holds only what is trained: a pattern may also match frozen tensors, but not only
these.
"""

from collections.abc import Iterable, Sequence

from sft.config import ModelConfig
from sft.config.param_group import ParamGroup
from sft.errors import ConfigError
from sft.hf.family import Family, TensorMapping
from sft.layers.adapters import Trained, names_of
from sft.weights.tensor_names import NamedWeight, check_whole, selected, units


def grouped(
    groups: Sequence[ParamGroup],
    family: Family,
    model: ModelConfig,
    mappings: Iterable[TensorMapping],
    trained: Trained,
) -> dict[tuple[str, tuple[int, ...]], int]:
    """For each weight and adapter in a group, by `Trained.groups`, the number of the group.

    mappings: the family's mappings for this model; trained: what the run trains
    Raises ConfigError if a pattern matches nothing that is trained, if two groups have the same tensor, or if a group
    has only some of the tensors that one of our weights consists of.
    """
    if not groups:
        return {}
    weights = units(mappings)
    members = [unit for unit in weights if trained.has(*unit.keys[0])] + _adapters(trained)
    trainable = dict.fromkeys(name for unit in members for name in unit.names)
    names = list(dict.fromkeys([*(name for unit in weights for name in unit.names), *trainable]))
    numbers: dict[str, int] = {}
    for number, group in enumerate(groups):
        key = f"optim.groups[{number}]"
        for pattern in group.params:
            matches = selected(key, pattern, names, family, model)
            if not trainable.keys() & matches:
                raise ConfigError(
                    f"{key} names {pattern!r}, but the run does not train {matches[0]}.  Name trained tensors, "
                    "or change train.freeze or the keys of lora."
                )
            for name in filter(trainable.__contains__, matches):
                if numbers.setdefault(name, number) != number:
                    raise ConfigError(
                        f"{key} names {pattern!r}, which matches {name}, but optim.groups[{numbers[name]}] has it, "
                        "too.  A tensor may be in one group only: use patterns that exclude each other."
                    )
        own = [name for name, of_name in numbers.items() if of_name == number]
        for unit in members:
            check_whole(key, unit, own, "is updated as a whole")
        if group.weight_decay and all(unit.is_vector for unit in members if unit.names[0] in own):
            raise ConfigError(
                f"{key} sets weight_decay = {group.weight_decay}, but has only biases and norms, which have no weight "
                "decay.  Leave out weight_decay."
            )
    return {key: numbers[unit.names[0]] for unit in members if unit.names[0] in numbers for key in unit.keys}


def _adapters(trained: Trained) -> list[NamedWeight]:
    """The adapters.  The adapters of a layer's experts are one tensor."""
    return [
        NamedWeight(
            parameter=f"the adapters of {adapter.name}",
            names=[adapter.tensor] if adapter.tensor else names_of(adapter.name, range(weight.num_experts)),
            keys=[(adapter.name, ())],
            is_vector=False,
        )
        for weight in trained.adapted
        for adapter in weight.adapters
    ]
