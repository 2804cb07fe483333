"""FlashAttention-3 of the package flash-attn-3 (Hopper, bf16) as operators of flash_kernel.py.

This module calls the operators that the library registers with torch.  torch.nn.attention could replace torch's flash
kernel by these operators, but only for all layers of the process.  The library's autograd function would save the keys
of the whole pack in every layer.

The checks of the library are in C++ and run on a GPU only, so this module repeats them: hopper/flash_api.cpp of
flash-attention, commit 0251105a.  A build may leave out kernels; its module `flash_attn_config` says which.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sft.layers.mixers.softmax_bytes import MAX_FLASH_HEAD
from sft.mcore.attention.flash_kernel import Demand, Operators, refused_heads
from sft.mcore.attention.package import SEQUENCES, Package

_WINDOW = ("window_size_left", "window_size_right")  # number of keys before and after the query's own key; -1: all
_SHARED = (*SEQUENCES, "softmax_scale", "is_causal", *_WINDOW)
_FORWARD, _BACKWARD = "flash_attn_3_gpu.fwd", "flash_attn_3_gpu.bwd"
PACKAGE = Package(
    "flash-attn-3",
    "flash_attn_interface",
    (
        (_FORWARD, ("q", "k", "v", "num_splits", *_SHARED)),
        (_BACKWARD, ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "deterministic", *_SHARED)),
    ),
)
_HOPPER = 9  # major compute capability
_WIDTHS = (64, 96, 128, 192, MAX_FLASH_HEAD)  # a head takes the kernel of the next width


def _forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *sequences: Tensor | int,
    scale: float,
    num_before: int = -1,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    # With more than one split of the keys, the result of a document would depend on the longest one of the pack.
    named = {**_named(sequences, scale, num_before, causal), "num_splits": 1}
    out, lse, *_ = PACKAGE.function(_FORWARD)(q=query, k=keys, v=values, **named)
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
    out, lse, *sequences = saved
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, keys, values)]
    inputs = dict(zip(("q", "k", "v", "dq", "dk", "dv"), (query, keys, values, *gradients)))
    named = {**inputs, **_named(sequences, scale, num_before, causal), "out": out, "softmax_lse": lse}
    PACKAGE.function(_BACKWARD)(dout=grad, deterministic=torch.are_deterministic_algorithms_enabled(), **named)
    dquery, dkeys, dvalues = gradients
    return dquery, dkeys, dvalues


def _named(sequences: Any, scale: float, num_before: int, causal: bool) -> Mapping[str, Any]:
    shared = dict(zip(SEQUENCES, sequences, strict=True))
    return {
        **shared,
        "softmax_scale": scale,
        "is_causal": causal,
        **dict(zip(_WINDOW, (num_before, 0 if causal else -1))),
    }


def _refused(demand: Demand) -> str | None:
    width, value_width = demand.key_width, demand.value_width
    if demand.gpu[0] != _HOPPER:
        return f"it has kernels for GPUs of compute capability {_HOPPER}.x"
    if width > MAX_FLASH_HEAD or width % 8:
        return refused_heads(MAX_FLASH_HEAD, width)
    if value_width != width and not (128 < width <= 192 and 96 < value_width <= 128 and value_width % 8 == 0):
        return f"it has no kernel for keys of width {width} with values of width {value_width}"
    if demand.softcap is not None:
        return "nobody has compared its gradients with model.attention_softcap"
    if demand.is_deterministic and width > 192:
        return "its gradients of heads wider than 192 are not deterministic"
    return None


def _asked(demand: Demand) -> str | None:
    """A message about the kernels that the layers need and this build leaves out; None: it has all of them."""
    try:
        flags: Mapping[str, bool] = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):  # older releases do not list the kernels that are left out
        return None
    left_out = {name.partition("DISABLE_")[2] for name, is_set in flags.items() if is_set}
    missing = [name for name in _needed(demand) if name in left_out]
    return f"this build of flash-attn-3 leaves out {' and '.join(missing)}" if missing else None


def _needed(demand: Demand) -> Iterator[str]:
    """The parts of flash-attn-3 that the layers need, by their names after DISABLE_ in its build flags."""
    yield from ("BACKWARD", "VARLEN")
    yield f"HDIM{next(width for width in _WIDTHS if demand.key_width <= width)}"
    if demand.value_width != demand.key_width:
        yield "HDIMDIFF192"
    if demand.has_window:
        yield "LOCAL"


FLASH3 = Operators(_forward, _backward, _refused, package=PACKAGE, asked=_asked)
