"""The `portable` backend at speed: the same attention over packed documents by torch's own flash kernel (CUDA).

Every chunk of queries that a rank has (`context_parallel.local_chunks`) is a sequence of its own to the kernel, whose keys are those
of its document up to its last query: masks are causal from the bottom right.  With context parallelism a document's
early keys are in the sequences of both of a rank's chunks, so keys are laid out once more, 1 + 1 / 2cp times as many.
Never a matrix of tokens x tokens.

The kernel is that of torch.nn.attention.varlen, by the operators underneath: `varlen_attn` itself would keep the keys
of the whole pack in every layer for backward.

Not yet run on a GPU; what is fed to the kernel is tested on the CPU with a plain stand-in for it, and that this torch's
operators take it, on the meta device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.mcore.device import send
from sft.parallel import context_parallel

MAX_HEAD_DIM = 256  # of the kernel; and a multiple of 8
# One split of the keys: by itself the kernel decides by the longest in the pack, which other documents must not do.
_WHERE_KNOWN: dict[str, Any] = {"num_splits": 1}
_CAUSAL: dict[str, int] = {"window_size_left": -1, "window_size_right": 0}


@dataclass(frozen=True)
class Operators:
    """torch's two, or others for tests and benchmarks; see `_forward` and `_backward`."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


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
    operators: Operators

    @staticmethod
    def of(
        cu_seqlens: np.ndarray,
        cp_size: int,
        cp_rank: int,
        device: torch.device,
        operators: Operators | None = None,
    ) -> "Sequences":
        """cu_seqlens: padded boundaries of the documents of the whole pack.

        one document of 8, cp 2, rank 0: queries 0 1 | 6 7, keys 0 1 | 0 1 2 3 4 5 6 7
        """
        chunks = [chunk for chunk in context_parallel.local_chunks(cu_seqlens, cp_size, cp_rank) if chunk.length]
        queries = np.array([chunk.length for chunk in chunks])
        seen = np.array([chunk.position + chunk.length for chunk in chunks])
        keys = None
        if cp_size > 1:
            gathered = context_parallel.gathered_positions(cu_seqlens, cp_size)
            in_pack = [np.arange(c.document_start, c.document_start + n) for c, n in zip(chunks, seen)]
            keys = send(torch.from_numpy(gathered[np.concatenate(in_pack)]), device)
        return Sequences(
            keys=keys,
            cu_seqlens_q=_boundaries(queries, device),
            cu_seqlens_k=_boundaries(seen, device),
            max_seqlen_q=int(queries.max()),
            max_seqlen_k=int(seen.max()),
            operators=operators or TORCH,
        )

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """query [t, heads, d], keys and values [k, groups, d] -> out [t, heads, d], log-sum-exp [heads, t]."""
        return self.operators.forward(query, keys, values, *self._boundaries, scale=scale)

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values."""
        return self.operators.backward(grad, query, keys, values, out, lse, *self._boundaries, scale=scale)

    @property
    def _boundaries(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k


def _forward(
    query: Tensor, keys: Tensor, values: Tensor, *boundaries: Tensor | int, scale: float
) -> tuple[Tensor, Tensor]:
    """boundaries: as in `Sequences`, queries before keys, tensors before longest."""
    options = {name: value for name, value in _WHERE_KNOWN.items() if name in _arguments()}
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, keys, values, *boundaries, 0.0, True, return_debug_mask=False, scale=scale, **_CAUSAL, **options
    )
    return out, lse


def _backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    *boundaries: Tensor | int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    nothing_random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # there is no dropout
    unused = torch.empty(0, device=query.device)
    dquery, dkeys, dvalues = torch.ops.aten._flash_attention_backward(
        grad, query, keys, values, out, lse, *boundaries, 0.0, True, nothing_random, unused, scale=scale, **_CAUSAL
    )
    return dquery, dkeys, dvalues


TORCH = Operators(_forward, _backward)


def why_not(head_dim: int, dtype: torch.dtype, device_type: str) -> str | None:
    """What keeps this model from the kernel; None where nothing does."""
    if device_type != "cuda":
        return "it needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bf16 only"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"it has heads of up to {MAX_HEAD_DIM} in multiples of 8, and this model's are {head_dim} wide"
    return _missing()


@cache
def _missing() -> str | None:
    absent = sorted({"cum_seq_q", "scale", *_CAUSAL} - _arguments())
    if absent:
        return f"that of torch {torch.__version__} takes no {' and no '.join(absent)}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    return None


@cache
def _arguments() -> frozenset[str]:
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    return frozenset() if operator is None else frozenset(x.name for x in operator.default._schema.arguments)


def _boundaries(lengths: np.ndarray, device: torch.device) -> Tensor:
    return send(torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)), device)
