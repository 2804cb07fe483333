"""Describes how PEFT stores the adapters of a parameter that holds the matrices of all experts of a layer.

A parameter of E experts has one pair of factors, whatever the order of the parameter's axes:

    lora_A [E * rank, in]    rows e * rank to (e + 1) * rank belong to expert e
    lora_B [out, rank * E]   column k * E + e belongs to expert e, and to row k of the expert's A
"""

from collections.abc import Callable, Sequence

import torch

from sft.hf.tensor_view import HfView


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
