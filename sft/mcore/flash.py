"""The `portable` backend at speed: the same attention over packed documents by torch's own flash kernel (CUDA).

Every chunk of queries that a rank has (`cp.local_chunks`) is a sequence of its own to the kernel, whose keys are those
of its document up to its last query: masks are causal from the bottom right.  With context parallelism a document's
early keys are in the sequences of both of a rank's chunks, so keys are laid out once more, 1 + 1 / 2cp times as many at
most.  Never a matrix of tokens x tokens.  The gradients of keys are added up in fp32, over chunks and then over ranks.

Not yet run on a GPU; what is fed to the kernel is tested on the CPU with a plain stand-in for it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sft import cp

MAX_HEAD_DIM = 256  # of the kernel; and a multiple of 8
Kernel = Callable[..., Tensor]
# One split of the keys: by itself the kernel decides by the longest in the pack, which other documents must not do.
_OPTIONS: dict[str, Any] = {"enable_gqa": True, "num_splits": 1}


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """What the kernel is to see of a microbatch; the same in every layer.

    keys       int64 [k]: of the gathered local parts, the keys of all sequences one after the other; None: as they lie
    cu_seqlens_q, cu_seqlens_k   int32 [sequences + 1], boundaries of queries and of `keys`
    """

    keys: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def sequences(cu_seqlens: np.ndarray, cp_size: int, cp_rank: int, device: torch.device) -> Sequences:
    """cu_seqlens: padded boundaries of the documents of the whole pack.

    one document of 8, cp 2, rank 0: queries 0 1 | 6 7, keys 0 1 | 0 1 2 3 4 5 6 7
    """
    chunks = [chunk for chunk in cp.local_chunks(cu_seqlens, cp_size, cp_rank) if chunk.length]
    queries = np.array([chunk.length for chunk in chunks])
    seen = np.array([chunk.position + chunk.length for chunk in chunks])
    keys = None
    if cp_size > 1:
        gathered = cp.gathered_positions(cu_seqlens, cp_size)
        in_pack = [np.arange(c.document_start, c.document_start + n) for c, n in zip(chunks, seen)]
        keys = torch.from_numpy(gathered[np.concatenate(in_pack)]).to(device)
    return Sequences(
        keys=keys,
        cu_seqlens_q=_boundaries(queries, device),
        cu_seqlens_k=_boundaries(seen, device),
        max_seqlen_q=int(queries.max()),
        max_seqlen_k=int(seen.max()),
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Sequences,
    scale: float,
    cp_group: Any,
    kernel: Kernel | None = None,
) -> Tensor:
    """Causal attention within documents.  query [t, heads, d], key and value [t, groups, d] -> [t, heads, d].

    kernel: another than torch's, for benchmarks
    """
    keys, values = (key, value) if seen.keys is None else _LaidOut.apply(key, value, seen.keys, cp_group)
    out: Tensor = (kernel or _kernel())(
        query,
        keys,
        values,
        seen.cu_seqlens_q,
        seen.cu_seqlens_k,
        seen.max_seqlen_q,
        seen.max_seqlen_k,
        scale=scale,
        window_size=(-1, 0),
    )
    return out


def why_not(head_dim: int, dtype: torch.dtype, device_type: str) -> str | None:
    """What keeps this model from the kernel; None where nothing does."""
    if device_type != "cuda":
        return "it needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bf16 only"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"it has heads of up to {MAX_HEAD_DIM} in multiples of 8, and this model's are {head_dim} wide"
    return _missing()


class _LaidOut(torch.autograd.Function):
    """Local keys and values -> those that the sequences see.  Collective over cp."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, order: Tensor, cp_group: Any) -> tuple[Tensor, Tensor]:
        ctx.order, ctx.cp_group, ctx.tokens, ctx.width = order, cp_group, key.shape[0], key.shape[-1]
        local = torch.cat((key, value), dim=-1).contiguous()
        gathered = local.new_empty((local.shape[0] * cp_group.size(), *local.shape[1:]))
        dist.all_gather_into_tensor(gathered, local, group=cp_group)
        keys, values = gathered.index_select(0, order).split(ctx.width, dim=-1)
        return keys.contiguous(), values.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dkeys, dvalues = grads
        wide = torch.promote_types(dkeys.dtype, torch.float32)
        total = dkeys.new_zeros((ctx.tokens * ctx.cp_group.size(), *dkeys.shape[1:-1], 2 * ctx.width), dtype=wide)
        total.index_add_(0, ctx.order, torch.cat((dkeys, dvalues), dim=-1).to(wide))
        local = total.new_empty((ctx.tokens, *total.shape[1:]))
        dist.reduce_scatter_tensor(local, total, group=ctx.cp_group)
        dkey, dvalue = local.to(dkeys.dtype).split(ctx.width, dim=-1)
        return dkey, dvalue, None, None


@cache
def _kernel() -> Kernel:
    """torch's, with those of `_OPTIONS` that its version has."""
    from torch.nn.attention import varlen

    kernel: Kernel = varlen.varlen_attn  # type: ignore[assignment]  # without return_aux a tensor alone
    known = inspect.signature(kernel).parameters
    return partial(kernel, **{name: value for name, value in _OPTIONS.items() if name in known})


@cache
def _missing() -> str | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has none for packed documents; 2.11 has"
    absent = sorted({"scale", "window_size"} - inspect.signature(varlen_attn).parameters.keys())
    return f"that of torch {torch.__version__} takes no {' and no '.join(absent)}; 2.11's does" if absent else None


def _boundaries(lengths: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
