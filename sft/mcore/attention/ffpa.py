"""Attention with heads of more than 256 by the package ffpa-attn (CUDA, bf16), as operators of flash_kernel.py.

The library's functions for packed sequences are called below its autograd function, which would save the keys of the
whole pack in every layer.  The library compiles a kernel when it is first called, in every process anew.
"""

import importlib
import importlib.metadata
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sft.layers.mixers.softmax import MAX_FLASH_HEAD
from sft.mcore.attention.flash_kernel import Demand, Operators

PACKAGE = "ffpa-attn"
_SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _forward(
    query: Tensor, keys: Tensor, values: Tensor, *sequences: Tensor | int, scale: float
) -> tuple[Tensor, Tensor]:
    operator = _library()._forward_impl_for_device(query.device, query.shape[-1], values.shape[-1])
    out, lse = operator(query, keys, values, return_lse=True, **_named(sequences, scale))
    return out, lse


def _backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    *sequences: Tensor | int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    operator = _library()._backward_impl_for_device(query.device, query.shape[-1], values.shape[-1])
    dquery, dkeys, dvalues = operator(query, keys, values, out, grad, lse, **_named(sequences, scale))
    return dquery, dkeys, dvalues


def _named(sequences: tuple[Tensor | int, ...], scale: float) -> dict[str, Any]:
    return dict(zip(_SEQUENCES, sequences)) | {"softmax_scale": scale, "causal": True}


def _why_not(demand: Demand) -> str | None:
    if demand.key_width <= MAX_FLASH_HEAD:
        return f"it is for heads of more than {MAX_FLASH_HEAD}"
    if demand.device_type != "cuda":
        return "it needs CUDA"
    if demand.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bf16 only"
    if demand.has_window or demand.softcap is not None:
        return "it has no windows and no model.attention_softcap"
    if demand.value_width != demand.key_width:
        return "it needs values as wide as keys"
    if demand.is_deterministic:
        return "it does not promise repeatable gradients"
    return _missing() or _unfit(demand.key_width)


@cache
def _missing() -> str | None:
    """The reason why the package cannot be used on this machine; None if it can."""
    try:
        release = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    try:
        _library()
    except Exception as error:  # of any kind: releases of its parts that do not fit each other raise what they will
        return f"{PACKAGE} {release} cannot be imported ({error})"
    return None


def _unfit(width: int) -> str | None:
    """The reason why this GPU has no kernel of its own for such heads, by the library's rules.

    The kernels that it has for all other GPUs align the causal mask to the top left.
    """
    major, minor = torch.cuda.get_device_capability()
    library = _library()
    is_fit = library._use_sm90_specialized(major, width, width)
    is_fit = is_fit or library._use_sm100_d512_specialized(major, minor, width, width)
    return None if is_fit else f"it has no kernel for heads of {width} on compute capability {major}.{minor}"


@cache
def _library() -> ModuleType:
    """The module of the inner functions; its import takes seconds."""
    with warnings.catch_warnings():  # it warns that the cache of flash-attn-4, which a run turns on, is not its own
        warnings.filterwarnings("ignore", message="FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")
        return importlib.import_module("ffpa_attn.cute")


FFPA = Operators(_forward, _backward, _why_not, _missing)
