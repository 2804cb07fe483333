"""FlashAttention-4 of the package flash-attn-4 (CUDA, bf16) as operators of flash_kernel.py.

The library's inner functions are called, because its autograd function would save the keys of the whole pack in every
layer, and because torch's own registration of them passes no soft cap.  Sinks stay with packed_attention.py.

The library compiles a kernel when it is first called, about 25 s each on one core.  It keeps compiled kernels on disk
(`environment.py`).
"""

import importlib
import importlib.metadata
import inspect
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sft.mcore.attention.flash_kernel import Demand, Operators

PACKAGE = "flash-attn-4"
_SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_OPTIONS = ("softmax_scale", "causal", "softcap", "window_size_left", "window_size_right")
_HOPPER, _BLACKWELL = 9, 10  # major compute capabilities
_ALIGNMENT = 8  # numbers in bf16 that one access to memory takes


def _forward(
    query: Tensor, keys: Tensor, values: Tensor, *sequences: Tensor | int, scale: float, **options: float
) -> tuple[Tensor, Tensor]:
    named = _named(sequences, scale, options)
    out, lse, *_ = _library()._flash_attn_fwd(query, keys, values, return_lse=True, **named)
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
    **options: float,
) -> tuple[Tensor, Tensor, Tensor]:
    named = _named(sequences, scale, options)
    deterministic = torch.are_deterministic_algorithms_enabled()
    dquery, dkeys, dvalues, *_ = _library()._flash_attn_bwd(
        query, keys, values, out, grad, lse, deterministic=deterministic, **named
    )
    return dquery, dkeys, dvalues


def _named(sequences: tuple[Tensor | int, ...], scale: float, options: dict[str, float]) -> dict[str, Any]:
    """Arguments that forward and backward share; window_size_left is the number of keys before a query's own."""
    window = {"window_size_left": options["num_before"], "window_size_right": 0} if "num_before" in options else {}
    softcap = options.get("softcap", 0.0)  # 0: no limit
    return dict(zip(_SEQUENCES, sequences)) | window | {"softmax_scale": scale, "softcap": softcap, "causal": True}


def _why_not(demand: Demand) -> str | None:
    if demand.device_type != "cuda":
        return "it needs CUDA"
    if demand.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bf16 only"
    return _wrong_gpu() or _missing() or _unfit(demand)


@cache
def _missing() -> str | None:
    """The reason why the package cannot be used on this machine; None if it can."""
    try:
        release = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    try:
        library = _library()
    except Exception as error:  # of any kind: releases of its parts that do not fit each other raise what they will
        return f"{PACKAGE} {release} cannot be imported ({error})"
    for operator in (library._flash_attn_fwd, library._flash_attn_bwd):
        if lacking := sorted({*_SEQUENCES, *_OPTIONS} - set(inspect.signature(operator).parameters)):
            return f"{PACKAGE} {release} takes no {' and no '.join(lacking)}"
    return None


def _wrong_gpu() -> str | None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (_HOPPER, _BLACKWELL):
        return f"it has kernels for GPUs of compute capability {_HOPPER}.x and {_BLACKWELL}.x"
    return None


def _unfit(demand: Demand) -> str | None:
    """The reason why this GPU's kernels refuse such layers, by the checks of the library where it has one."""
    major = torch.cuda.get_device_capability()[0]
    widths = demand.key_width, demand.value_width
    try:
        _library()._validate_head_dims(*widths, major, _ALIGNMENT)
    except AssertionError as error:
        return str(error)
    if demand.is_grouped and widths[0] != widths[1]:
        return "its backward pass with grouped heads needs values as wide as keys"
    if major == _BLACKWELL and widths[0] > 192:
        return "on Blackwell, its kernels for heads of 256 were not compared with others yet"
    return None


@cache
def _library() -> ModuleType:
    """The module of the inner functions; its import takes seconds."""
    return importlib.import_module("flash_attn.cute.interface")


FLASH4 = Operators(_forward, _backward, _why_not, _missing)
