"""Ways to compute attention over one pack, for benchmarks: the trainer's own, torch's, Transformer Engine's.

Decides which run here and gives each as a call; times nothing.

    flash   sft's path through torch's kernel, a rank's share of it
    tiles   sft's plain torch
    sdpa    torch's own attention, one call a document, by the kernel that torch chooses
    cudnn   the same by cuDNN
    te      Transformer Engine's DotProductAttention over packed documents, by the kernel that it chooses
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sft.mcore.attention import flash_kernel, packed_attention, torch_kernel
from sft.parallel import context_parallel
from tools import measure

NAMES = ("flash", "sdpa", "te", "cudnn", "tiles")
OTHERS = ("te", "cudnn")  # which may refuse a shape
REFUSALS = (RuntimeError, ValueError, AssertionError, ImportError)  # theirs, of many kinds


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One pack; the same tensors for every way."""

    boundaries: np.ndarray
    tensors: Sequence[Tensor]  # query, key, value, gradient
    device: torch.device

    @property
    def scale(self) -> float:
        return float(self.tensors[0].shape[-1] ** -0.5)


Way = Callable[[], tuple[Tensor, Tensor]]  # the output, and the gradient that it gets


def why_not(name: str, device: torch.device) -> str | None:
    """What keeps a way from running on this device; None where nothing is known to."""
    if name not in OTHERS:
        return None
    if device.type != "cuda":
        return "it needs CUDA"
    if name == "te":
        try:
            import transformer_engine.pytorch  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            return f"transformer_engine does not import here ({error})"
    return None


def whole(p: Problem, name: str) -> Way:
    """The whole pack on one device.  The way must run here (`why_not`), and may refuse the shape when it is called."""
    if name == "flash":
        return by_flash(p, 1, 0)[0]
    made: dict[str, Callable[[Problem], Way]] = {"tiles": by_tiles, "sdpa": by_sdpa, "cudnn": by_cudnn, "te": by_te}
    return made[name](p)


def is_refusal(name: str, error: Exception) -> bool:
    """Whether that is a kernel which does not take this shape, rather than a fault."""
    return name in OTHERS and isinstance(error, REFUSALS) and not isinstance(error, torch.OutOfMemoryError)


def reason(error: Exception) -> str:
    """In a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def by_sdpa(p: Problem) -> Way:
    query, key, value, gradient = p.tensors
    ends = p.boundaries.tolist()

    def way() -> tuple[Tensor, Tensor]:
        parts = [measure.sdpa(query[a:b], key[a:b], value[a:b], p.scale) for a, b in zip(ends, ends[1:])]
        return torch.cat(parts) if len(parts) > 1 else parts[0], gradient

    return way


def by_cudnn(p: Problem) -> Way:
    way = by_sdpa(p)

    def by_that_kernel() -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return way()

    return by_that_kernel


def by_te(p: Problem) -> Way:
    from transformer_engine.pytorch import DotProductAttention

    query, key, value, gradient = p.tensors
    _, heads, width = query.shape
    core = DotProductAttention(
        heads, width, num_gqa_groups=key.shape[1], attention_dropout=0.0, qkv_format="thd",
        attn_mask_type="padding_causal", softmax_scale=p.scale,
    )  # fmt: skip
    boundaries, longest = torch.from_numpy(p.boundaries).to(p.device), int(np.diff(p.boundaries).max())

    def way() -> tuple[Tensor, Tensor]:
        out = core(
            query, key, value, qkv_format="thd", attn_mask_type="padding_causal",
            cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=longest, max_seqlen_kv=longest,
        )  # fmt: skip
        return out.view(query.shape), gradient

    return way


def by_tiles(p: Problem) -> Way:
    query, key, value, gradient = p.tensors
    kernel, nobody = torch_kernel.TorchKernel.of(p.boundaries, 1, 0, p.device), None
    return lambda: (packed_attention.packed_attention(query, key, value, kernel, p.scale, nobody), gradient)


def by_flash(p: Problem, cp_size: int, rank: int) -> tuple[Way, Sequence[Tensor], np.ndarray]:
    """The share of a rank; its own queries, keys and values; and where they are in the pack."""
    kernel = flash_kernel.FlashKernel.of(p.boundaries, cp_size, rank, p.device, measure.operators_for(p.device))
    here = context_parallel.local_indices(p.boundaries, cp_size, rank)
    rows = torch.from_numpy(here).to(p.device)
    if cp_size == 1:
        query, key, value, gradient = p.tensors
    else:
        query, key, value, gradient = (x.detach()[rows].requires_grad_(i < 3) for i, x in enumerate(p.tensors))
    everybody: Any = SimpleNamespace(size=lambda: cp_size, rank=lambda: rank)
    return (
        lambda: (packed_attention.packed_attention(query, key, value, kernel, p.scale, everybody), gradient),
        (query, key, value),
        here,
    )
