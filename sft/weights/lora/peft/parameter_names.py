"""Names that PEFT gives a parameter with the matrices of all experts of a layer, and the module with its factors.

PEFT wraps the parameters of a module one around the other, in the order in which the module registers them:
gate_up_proj first, then down_proj.  So the name of the wrapper of gate_up_proj ends with `base_layer` if both have
adapters.
"""

import re
from collections.abc import Collection, Iterable

from sft.weights.lora.peft.targets import endings, module_of

_INNER, _OUTER = "gate_up_proj", "down_proj"
# Files of Granite have other names than transformers.
_GRANITE = {"input_linear.weight": f"experts.{_INNER}", "output_linear.weight": f"experts.{_OUTER}"}
_GRANITE |= {"router.layer.weight": "router.weight"}
_RENAMED = re.compile("|".join(f"{re.escape(name)}$" for name in _GRANITE))


def parameter_of(tensor: str, *, has_vision: bool = False) -> str:
    """The name that transformers 5 gives a parameter with the matrices of all experts, or the weight of a router.

    tensor: its name in files; has_vision: whether the model has a vision tower
    model.layers.0.mlp.experts.gate_up_proj -> itself
    model.layers.0.block_sparse_moe.input_linear.weight -> model.layers.0.block_sparse_moe.experts.gate_up_proj
    """
    renamed = _RENAMED.sub(lambda match: _GRANITE[match[0]], tensor)
    ending = ".weight" if renamed.endswith(".weight") else ""
    return module_of(renamed, has_vision=has_vision) + ending


def wrapper_of(parameter: str, adapted: Collection[str]) -> str:
    """The name of the module with the factors of a parameter.  adapted: all parameters with adapters

    model.layers.0.mlp.experts.gate_up_proj -> model.layers.0.mlp.experts.base_layer, or without an adapter of down_proj
    -> model.layers.0.mlp.experts
    """
    module, _, name = parameter.rpartition(".")
    return f"{module}.base_layer" if name == _INNER and f"{module}.{_OUTER}" in adapted else module


def target_parameters(adapted: Iterable[str], others: Iterable[str]) -> list[str]:
    """The value of target_parameters: the shortest ending of each parameter in `adapted` that none of `others` has.

    An ending has at least two parts.  The result is sorted.
    a.0.experts.down_proj, a.1.experts.down_proj -> ["experts.down_proj"]
    """
    taken = {ending for name in others for ending in endings(name)}
    return sorted({next((end for end in _long(name) if end not in taken), name) for name in adapted})


def _long(name: str) -> Iterable[str]:
    """All endings of a name that have at least two parts, shortest first."""
    return (ending for ending in endings(name) if "." in ending)
