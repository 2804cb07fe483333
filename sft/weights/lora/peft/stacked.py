"""Describes how PEFT stores the adapters of a parameter that holds the matrices of all experts of a layer.

A parameter of E experts has one pair of factors, whatever the order of the parameter's axes:

    lora_A [E * rank, in]    rows e * rank to (e + 1) * rank belong to expert e
    lora_B [out, rank * E]   column k * E + e belongs to expert e, and to row k of the expert's A

PEFT wraps the parameters of a module one around the other, in the order in which the module registers them:
gate_up_proj first, then down_proj.  So the name of the wrapper of gate_up_proj ends with `base_layer` if both have
adapters.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from sft.hf.tensor_view import HfView
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


def a_of_experts(stored: torch.Tensor, num_experts: int) -> torch.Tensor:
    """lora_A [experts * rank, in], or its rows of some experts -> [experts, rank, in]"""
    return stored.unflatten(0, (num_experts, -1))


def b_of_experts(stored: torch.Tensor, num_experts: int) -> torch.Tensor:
    """lora_B [out, rank * experts] -> [experts, out, rank]"""
    return stored.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def stacked_part(
    where: Sequence[slice], shape: Sequence[int], rows: torch.Tensor | None, target: torch.Tensor
) -> tuple[tuple[slice, ...], torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The fields `where`, `target` and `arranged` of `folder.AdapterPart` for a part of our factors of stacked experts.

    where: the part of [experts, rank, in] or [experts, out, rank], whose shape is `shape`
    rows: for a factor B, the result of `rows_in_file`; None: it is a factor A
    """
    experts, *axes = where
    count = experts.stop - experts.start
    if rows is None:
        stored = slice(experts.start * shape[1], experts.stop * shape[1]), axes[1]
        return stored, target, lambda part: a_of_experts(part, count)[:, axes[0]]
    own = rows[axes[0]]
    whole = slice(0, shape[1]), slice(0, shape[0] * shape[2])
    return (whole, target, lambda part: b_of_experts(part, shape[0])[experts, own][..., axes[1]])


def stacked_a(factors: torch.Tensor) -> torch.Tensor:
    """[experts, rank, in] -> lora_A [experts * rank, in]"""
    return factors.flatten(0, 1)


def stacked_b(factors: torch.Tensor) -> torch.Tensor:
    """[experts, out, rank] -> lora_B [out, rank * experts]"""
    return factors.permute(1, 2, 0).flatten(1)


def rows_in_file(views: Sequence[HfView]) -> torch.Tensor:
    """For each row of our weight, its row in the stored matrix of an expert: int64 [out].

    views: the parts of our weight.  gate and up of 2 rows each, which alternate in the file -> 0, 2, 1, 3
    """
    return torch.tensor([view.row(number) for view in views for number in range(view.num_rows)])
