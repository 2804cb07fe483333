"""torch's own flash kernel, FlashAttention-2 (CUDA, bf16), as operators of flash_kernel.py.

This module calls the operators that torch.nn.attention.varlen uses.  `varlen_attn` itself would save the keys of the
whole pack in every layer.  Tests check on the meta device that the operators of the installed torch accept the inputs.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sft.layers.mixers.softmax_bytes import MAX_FLASH_HEAD
from sft.mcore.attention.flash_kernel import OTHER_MAKER, Demand, Operators, refused_heads

# Options that only some releases of torch have.  num_splits is the number of parts into which the kernel splits the
# keys.  By default it depends on the longest sequence of the pack, so a document's result would depend on other
# documents.
_IF_SUPPORTED: dict[str, Any] = {"num_splits": 1}
_WINDOW = ("window_size_left", "window_size_right")  # number of keys before and after the query's own key; -1: all


def _forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *boundaries: Tensor | int,
    scale: float,
    num_before: int = -1,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    window = dict(zip(_WINDOW, (num_before, 0 if causal else -1)))
    options = {name: value for name, value in _IF_SUPPORTED.items() if name in _arguments()}
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, keys, values, *boundaries, 0.0, causal, return_debug_mask=False, scale=scale, **window, **options
    )
    return out, lse


def _backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *saved: Any,
    scale: float,
    num_before: int = -1,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """saved: out, log-sum-exp, and the boundaries of `_forward`"""
    window = dict(zip(_WINDOW, (num_before, 0 if causal else -1)))
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # unused: there is no dropout
    unused = torch.empty(0, device=query.device)
    dquery, dkeys, dvalues = torch.ops.aten._flash_attention_backward(
        grad, query, keys, values, *saved, 0.0, causal, rng_state, unused, scale=scale, **window
    )
    return dquery, dkeys, dvalues


def _refused(demand: Demand) -> str | None:
    if demand.softcap is not None:
        return "it has no model.attention_softcap"
    if demand.value_width > demand.key_width:
        return "it has no values that are wider than keys"
    if demand.key_width > MAX_FLASH_HEAD or demand.key_width % 8:
        return refused_heads(MAX_FLASH_HEAD, demand.key_width)
    if OTHER_MAKER < demand.gpu < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    return None


@cache
def _missing() -> str | None:
    """The reason why the installed torch cannot run the kernel; None if it can."""
    lacking = sorted({"cum_seq_q", "scale", *_WINDOW} - _arguments())
    return f"the operator of torch {torch.__version__} takes no {' and no '.join(lacking)}" if lacking else None


@cache
def _arguments() -> frozenset[str]:
    """Argument names of torch's flash-attention forward operator; empty if this torch has no such operator."""
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    return frozenset() if operator is None else frozenset(x.name for x in operator.default._schema.arguments)


FLASH2 = Operators(
    _forward, _backward, _refused, pads_values=True, starts_all_blocks=True, asked=lambda demand: _missing()
)
