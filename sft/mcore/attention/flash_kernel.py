"""A kernel of packed_attention.py: torch's own flash attention (CUDA, bf16).

The kernel treats each local chunk of queries (`context_parallel.local_chunks`) as one sequence.  The keys of a chunk
are the keys of the document up to the chunk's last query; with a sliding window, from the first key in the window of
the chunk's first query.  The causal mask is aligned to the bottom right.  With context parallelism both chunks of a
rank need a document's early keys, so keys are copied 1 + 1 / 2cp times.  No tensor has size tokens x tokens.

The module calls the operators below torch.nn.attention.varlen.  `varlen_attn` itself would save the keys of the whole
pack in every layer for backward.

The operators take values of the width of keys only.  Narrower values are padded with zeros, whose products the kernel
computes too: with keys of 192 and values of 128, 1.2 times the FLOPs of attention.

On an H200, tests/gpu compared the kernel with the plain tiles (docs/numbers/h200.md).  On the CPU, tests pass the
kernel's inputs to a plain replacement.  On the meta device, tests check that the operators of the installed torch
accept these inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.layers.mixers.softmax import MAX_FLASH_HEAD
from sft.mcore.attention.key_source import AllGatheredKeys, HaloKeys, KeySource, LocalKeys
from sft.mcore.device import send
from sft.parallel import context_parallel
from sft.parallel.halo import Halo

# Options that only some releases of torch have.  num_splits is the number of splits of the keys.  By default the kernel
# chooses it by the longest sequence of the pack, so the result of a document would depend on other documents.
_IF_SUPPORTED: dict[str, Any] = {"num_splits": 1}
_WINDOW = ("window_size_left", "window_size_right")  # keys before and after the query's own; -1: all


@dataclass(frozen=True)
class Operators:
    """torch's two operators, or replacements for tests and benchmarks; see `_forward` and `_backward`."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class FlashKernel:
    """The kernel with the sequences of one microbatch; the same in every layer with this window.

    key_source    gets the keys, one sequence after the other
    window        a token attends to itself and to the window - 1 tokens before it; None: to all before it
    cu_seqlens_q  int32 [sequences + 1], boundaries of the sequences' queries
    cu_seqlens_k  int32 [sequences + 1], boundaries of the sequences' keys
    """

    key_source: KeySource
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    operators: Operators
    window: int | None = None

    @staticmethod
    def of(
        cu_seqlens: np.ndarray,
        cp_size: int,
        cp_rank: int,
        device: torch.device,
        *,
        operators: Operators | None = None,
        window: int | None = None,
    ) -> "FlashKernel":
        """cu_seqlens: int32 [documents + 1], padded boundaries of the documents of the whole pack.

        one document of 8, cp 2, rank 0: queries 0 1 | 6 7, keys 0 1 | 0 1 2 3 4 5 6 7
        """
        chunks = [chunk for chunk in context_parallel.local_chunks(cu_seqlens, cp_size, cp_rank) if chunk.length]
        num_queries = np.array([chunk.length for chunk in chunks])
        num_keys = np.array([chunk.position + chunk.length for chunk in chunks])
        key_source: KeySource = LocalKeys()
        if cp_size > 1 and window is not None:
            halo = Halo.of(cu_seqlens, window, cp_size, cp_rank)
            num_keys, key_source = num_queries + halo.num_before, HaloKeys.of(halo, device)
        elif cp_size > 1:
            gathered = context_parallel.gathered_positions(cu_seqlens, cp_size)
            in_pack = [np.arange(c.document_start, c.document_start + n) for c, n in zip(chunks, num_keys)]
            key_source = AllGatheredKeys(send(torch.from_numpy(gathered[np.concatenate(in_pack)]), device))
        return FlashKernel(
            key_source=key_source,
            cu_seqlens_q=_boundaries(num_queries, device),
            cu_seqlens_k=_boundaries(num_keys, device),
            max_seqlen_q=int(num_queries.max()),
            max_seqlen_k=int(num_keys.max()),
            operators=operators or TORCH,
            window=window,
        )

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Implements `AttentionKernel.forward`."""
        padded = _padded(values, keys)
        out, lse = self.operators.forward(query, keys, padded, *self._boundaries, scale=scale, **self._options)
        return out[..., : values.shape[-1]], lse

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = values.shape[-1]
        grad, values, out = (_padded(x, keys) for x in (grad, values, out))
        dquery, dkeys, dvalues = self.operators.backward(
            grad, query, keys, values, out, lse, *self._boundaries, scale=scale, **self._options
        )
        return dquery, dkeys, dvalues[..., :width]

    @property
    def _options(self) -> dict[str, int]:
        return {} if self.window is None else {"num_before": self.window - 1}

    @property
    def _boundaries(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k


def _forward(
    query: Tensor, keys: Tensor, values: Tensor, *boundaries: Tensor | int, scale: float, num_before: int = -1
) -> tuple[Tensor, Tensor]:
    """boundaries: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k; num_before: keys before a query's own."""
    window = dict(zip(_WINDOW, (num_before, 0)))
    options = {name: value for name, value in _IF_SUPPORTED.items() if name in _arguments()}
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, keys, values, *boundaries, 0.0, True, return_debug_mask=False, scale=scale, **window, **options
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
    num_before: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    window = dict(zip(_WINDOW, (num_before, 0)))
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # unused: there is no dropout
    unused = torch.empty(0, device=query.device)
    dquery, dkeys, dvalues = torch.ops.aten._flash_attention_backward(
        grad, query, keys, values, out, lse, *boundaries, 0.0, True, rng_state, unused, scale=scale, **window
    )
    return dquery, dkeys, dvalues


TORCH = Operators(_forward, _backward)


def why_not(head_dim: int, dtype: torch.dtype, device_type: str) -> str | None:
    """The reason why this model cannot use the kernel; None if it can."""
    if device_type != "cuda":
        return "it needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bf16 only"
    if head_dim > MAX_FLASH_HEAD or head_dim % 8:
        return f"it has heads of up to {MAX_FLASH_HEAD} in multiples of 8, but heads of this model are {head_dim} wide"
    return _missing()


@cache
def _missing() -> str | None:
    """The reason why torch or the GPU cannot run the kernel; None if they can."""
    lacking = sorted({"cum_seq_q", "scale", *_WINDOW} - _arguments())
    if lacking:
        return f"that of torch {torch.__version__} takes no {' and no '.join(lacking)}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    return None


@cache
def _arguments() -> frozenset[str]:
    """Argument names of torch's flash-attention forward operator; empty if this torch has no such operator."""
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    return frozenset() if operator is None else frozenset(x.name for x in operator.default._schema.arguments)


def _padded(x: Tensor, keys: Tensor) -> Tensor:
    """x [n, heads, d] with zeros up to the width of keys."""
    missing = keys.shape[-1] - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _boundaries(lengths: np.ndarray, device: torch.device) -> Tensor:
    """Lengths 2, 8 -> int32 [0, 2, 10]."""
    return send(torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)), device)
