"""A kernel of packed_attention.py: a flash kernel of a library, over sequences of queries and of keys.

Each local chunk of queries (`context_parallel.local_chunks`) is one sequence.  The keys of a chunk are the keys of the
document up to the chunk's last query; with a sliding window, from the first key in the window of the chunk's first
query.  The causal mask is aligned to the bottom right.  With context parallelism both chunks of a rank need a
document's early keys, so keys are copied 1 + 1 / 2cp times.  No tensor has size tokens x tokens.

The kernels of libraries (`Operators`) are in flash2.py (torch's own), flash4.py (flash-attn-4) and ffpa.py (ffpa-attn).
Some take values of the width of keys only.  Narrower values are padded with zeros, whose products the kernel computes
too: with keys of 192 and values of 128, 1.2 times the FLOPs of attention.

On an H200, tests/gpu compared the kernels with the plain tiles (docs/numbers/h200.md).  On the CPU, tests pass the
kernels' inputs to a plain replacement.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sft.mcore.attention.key_source import AllGatheredKeys, HaloKeys, KeySource, LocalKeys
from sft.mcore.attention.package import Package
from sft.mcore.device import send
from sft.parallel import context_parallel
from sft.parallel.halo import Halo


class Demand(NamedTuple):
    """Needs of a run's layers that a kernel may not meet.

    key_width, value_width  of a head
    heads_per_key     query heads that share a key head
    is_deterministic  gradients are equal bit for bit when they are computed again
    """

    device_type: str
    dtype: torch.dtype
    key_width: int
    value_width: int
    heads_per_key: int = 1
    has_window: bool = False
    softcap: float | None = None
    is_deterministic: bool = False


@dataclass(frozen=True)
class Operators:
    """The forward and the backward operator of a library's kernel.

    forward   (query, keys, values, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=, and if the layers
              have them num_before=, softcap=) -> out, log-sum-exp in fp32 [heads, t].  num_before is the number of keys
              before a query's own that the query attends to
    backward  (grad, query, keys, values, out, log-sum-exp, and the rest as forward) -> gradients of query, keys, values
    refused   the reason why the kernel cannot compute such layers on CUDA in bf16; None if it can
    pads_values  values must be as wide as keys
    package   the package of the kernel; None: torch
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    refused: Callable[[Demand], str | None] = lambda demand: None
    pads_values: bool = False
    package: Package | None = None

    def why_not(self, demand: Demand) -> str | None:
        """The reason why the kernel cannot compute such layers; None if it can."""
        if demand.device_type != "cuda":
            return "it needs CUDA"
        if demand.dtype not in (torch.bfloat16, torch.float16):
            return "it computes in bf16 only"
        return self.refused(demand)


def refused_heads(widest: int, width: int) -> str:
    return f"it has heads of up to {widest} in multiples of 8, but heads of this model are {width} wide"


@dataclass(frozen=True, kw_only=True)
class FlashKernel:
    """The kernel with the sequences of one microbatch, for all layers with this window and soft cap.

    key_source    gets the keys, one sequence after the other
    window        a token attends to itself and to the window - 1 tokens before it; None: to all before it
    softcap       limit of the scores; None: no limit
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
    softcap: float | None = None

    @staticmethod
    def of(
        cu_seqlens: np.ndarray,
        cp_size: int,
        cp_rank: int,
        device: torch.device,
        *,
        operators: Operators,
        window: int | None = None,
        softcap: float | None = None,
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
            operators=operators,
            window=window,
            softcap=softcap,
        )

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Implements `AttentionKernel.forward`."""
        padded = self._padded(values, keys)
        out, lse = self.operators.forward(query, keys, padded, *self._boundaries, scale=scale, **self._options)
        return out[..., : values.shape[-1]], lse

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = values.shape[-1]
        grad, values, out = (self._padded(x, keys) for x in (grad, values, out))
        dquery, dkeys, dvalues = self.operators.backward(
            grad, query, keys, values, out, lse, *self._boundaries, scale=scale, **self._options
        )
        return dquery, dkeys, dvalues[..., :width]

    @property
    def _options(self) -> dict[str, float]:
        options: dict[str, float] = {} if self.window is None else {"num_before": self.window - 1}
        return options if self.softcap is None else {**options, "softcap": self.softcap}

    @property
    def _boundaries(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k

    def _padded(self, x: Tensor, keys: Tensor) -> Tensor:
        """x [n, heads, d], if the operators need it with zeros up to the width of keys."""
        missing = keys.shape[-1] - x.shape[-1] if self.operators.pads_values else 0
        return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _boundaries(lengths: np.ndarray, device: torch.device) -> Tensor:
    """Lengths 2, 8 -> int32 [0, 2, 10]."""
    return send(torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)), device)
