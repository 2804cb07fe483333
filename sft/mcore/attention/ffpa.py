"""Attention with heads that are 512 wide, by the package ffpa-attn (Hopper, bf16), as operators of flash_kernel.py.

This module calls the library's inner functions for packed sequences.  The library's autograd function would save the
keys of the whole pack in every layer.  Every process compiles a kernel when it first calls it.
"""

from typing import Any

from torch import Tensor

from sft.mcore.attention.flash_kernel import Demand, Operators
from sft.mcore.attention.package import Package, shared_arguments

PACKAGE = Package("ffpa-attn", "ffpa_attn.cute", (("_forward_impl_for_device", ()), ("_backward_impl_for_device", ())))
_HOPPER, _WIDTH = 9, 512  # other kernels of the library align the causal mask to the top left, or nobody compared them
_TILE = 64  # rows of a tile of queries, which the query heads of one key head share


def _forward(
    query: Tensor, keys: Tensor, values: Tensor, *sequences: Tensor | int, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor]:
    operator = PACKAGE.function("_forward_impl_for_device")(query.device, _WIDTH, _WIDTH)
    out, lse = operator(query, keys, values, return_lse=True, **shared_arguments(sequences, scale, causal))
    return out, lse


def _backward(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, *saved: Any, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, *sequences = saved
    operator = PACKAGE.function("_backward_impl_for_device")(query.device, _WIDTH, _WIDTH)
    dquery, dkeys, dvalues = operator(query, keys, values, out, grad, lse, **shared_arguments(sequences, scale, causal))
    return dquery, dkeys, dvalues


def _refused(demand: Demand) -> str | None:
    if demand.key_width != _WIDTH or demand.value_width != _WIDTH:
        return f"it is for heads of {_WIDTH}"
    if demand.has_window or demand.softcap is not None:
        return "it has no windows and no model.attention_softcap"
    if _TILE % demand.heads_per_key:
        return f"the query heads of a key head, here {demand.heads_per_key}, must divide {_TILE}"
    if demand.is_deterministic:
        return "it does not promise repeatable gradients"
    if demand.gpu[0] != _HOPPER:
        return f"it was compared with plain torch on GPUs of compute capability {_HOPPER}.x only"
    return None


FFPA = Operators(_forward, _backward, _refused, package=PACKAGE)
