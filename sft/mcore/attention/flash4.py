"""FlashAttention-4 of the package flash-attn-4 (CUDA, bf16) as operators of flash_kernel.py.

This module calls the library's inner functions.  The library's autograd function would save the keys of the whole pack
in every layer, and torch's operators for FlashAttention-4 have no soft cap.  packed_attention.py computes sinks.

The library compiles a kernel when it is first called, which takes about 25 s on one core.  It keeps compiled kernels on
disk (`sft/run/environment.py`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sft.layers.mixers.softmax_bytes import MAX_FLASH_HEAD
from sft.mcore.attention.flash_kernel import Demand, Operators, refused_heads
from sft.mcore.attention.package import SEQUENCES, Package, shared_arguments

_SHARED = (*SEQUENCES, "softmax_scale", "causal", "softcap", "window_size_left", "window_size_right")
PACKAGE = Package(
    "flash-attn-4",
    "flash_attn.cute.interface",
    (
        ("_flash_attn_fwd", (*_SHARED, "return_lse")),
        ("_flash_attn_bwd", (*_SHARED, "deterministic")),
        ("_validate_head_dims", ()),
    ),
)
_HOPPER, _BLACKWELL = 9, 10  # major compute capabilities
_GPUS = (_HOPPER, _BLACKWELL)
_COMPARED = 192  # widest heads that are allowed on Blackwell; kernels for wider heads compile, but nobody has run them
_ALIGNMENT = 8  # bf16 elements that one memory access reads


def _forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *sequences: Tensor | int,
    scale: float,
    causal: bool = True,
    **options: float,
) -> tuple[Tensor, Tensor]:
    operator = PACKAGE.function("_flash_attn_fwd")
    out, lse, *_ = operator(
        query, keys, values, return_lse=True, **shared_arguments(sequences, scale, causal), **_limits(**options)
    )
    return out, lse


def _backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *saved: Any,
    scale: float,
    causal: bool = True,
    **options: float,
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, *sequences = saved
    operator, deterministic = PACKAGE.function("_flash_attn_bwd"), torch.are_deterministic_algorithms_enabled()
    named = {**shared_arguments(sequences, scale, causal), **_limits(**options), "deterministic": deterministic}
    dquery, dkeys, dvalues, *_ = operator(query, keys, values, out, grad, lse, **named)
    return dquery, dkeys, dvalues


def _limits(num_before: float | None = None, softcap: float = 0.0) -> Mapping[str, Any]:
    """Arguments for the window and the soft cap.  The library counts keys before and after a query's own key.

    A soft cap of 0 means no soft cap.
    """
    window = {} if num_before is None else {"window_size_left": num_before, "window_size_right": 0}
    return {**window, "softcap": softcap}


def _refused(demand: Demand) -> str | None:
    """The reason against the kernel that `_asked` does not give; None: there is none.

    The library would raise an error only while it compiles the kernel, or nobody has compared its results.
    """
    major, width = demand.gpu[0], demand.key_width
    if major not in _GPUS:
        return f"it has kernels for GPUs of compute capability {_HOPPER}.x and {_BLACKWELL}.x"
    if width > MAX_FLASH_HEAD or width % _ALIGNMENT:
        return refused_heads(MAX_FLASH_HEAD, width)
    if major == _BLACKWELL and width > _COMPARED:
        return f"its heads of {width} were not compared with plain torch on GPUs of compute capability {_BLACKWELL}.x"
    is_grouped = demand.heads_per_key > 1
    if major == _HOPPER and is_grouped and width != demand.value_width:  # flash_bwd_sm90.py of 4.0.0b36
        return "its backward pass with grouped heads needs values as wide as keys"
    return None


def _asked(demand: Demand) -> str | None:
    check = PACKAGE.function("_validate_head_dims")
    try:
        check(demand.key_width, demand.value_width, demand.gpu[0], _ALIGNMENT)
    except AssertionError as error:
        return str(error)
    return None


FLASH4 = Operators(_forward, _backward, _refused, package=PACKAGE, asked=_asked)
