"""A kernel of packed_attention.py that calls the flash kernel of a library for packed sequences.

Each local chunk of queries (`context_parallel.local_chunks`) is one sequence.  The keys of this sequence are the keys
of the document from its first token to the chunk's last query.  With a sliding window they begin with the first key in
the window of the chunk's first query.  The causal mask is aligned to the bottom right: the last query attends to the
last key.  With context parallelism both chunks of a rank need a document's early keys, so the two sequences together
have (1 + 1 / (2 cp)) times the keys of the document.  No tensor has size tokens x tokens.

A branch (sft/parallel/branches.py) also attends to tokens of its ancestors, in further calls (parent_keys.py).  With a
window, the last keys of the ancestors are copied before each chunk instead (sft/parallel/halo.py).

The kernels of libraries (`Operators`) are in flash2.py (torch's own), flash3.py (flash-attn-3), flash4.py
(flash-attn-4) and ffpa.py (ffpa-attn).  torch's kernel needs values that are as wide as keys.  Narrower values are
padded with zeros, which costs FLOPs: with keys of width 192 and values of width 128, 1.2 times the FLOPs.

On an H200, tests/gpu compared all kernels but FlashAttention-3 with the plain tiles (docs/numbers/h200.md).  On the
CPU, tests pass the kernels' inputs to a plain replacement.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sft.layers import kernel_rates
from sft.mcore.attention.flash_call import Call, Rows
from sft.mcore.attention.key_source import AllGatheredKeys, HaloKeys, KeySource, LocalKeys
from sft.mcore.attention.package import Package
from sft.mcore.attention.parent_keys import ParentKeys, last_forks
from sft.mcore.device import send
from sft.parallel import context_parallel
from sft.parallel.branches import Branches
from sft.parallel.halo import Halo
from sft.parallel.length_classes import length_classes

# Replaces the compute capability of an AMD GPU, which means something else.  Only torch's flash kernel runs there.
OTHER_MAKER = (0, 0)


class Demand(NamedTuple):
    """Properties of a run's attention layers that a kernel may not support.

    key_width, value_width  width of a key head and of a value head
    heads_per_key     number of query heads that share a key head
    has_window        whether the layers have a sliding window
    softcap           limit of the scores; None: no limit
    is_deterministic  whether gradients must be equal, bit for bit, when they are computed again
    capability        compute capability of the GPU; None: that of this machine's GPU, or Hopper's on a machine without
                      a GPU
    """

    device_type: str
    dtype: torch.dtype
    key_width: int
    value_width: int
    heads_per_key: int = 1
    has_window: bool = False
    softcap: float | None = None
    is_deterministic: bool = False
    capability: tuple[int, int] | None = None

    @property
    def gpu(self) -> tuple[int, int]:
        """The compute capability of the GPU on which the layers run; OTHER_MAKER for a GPU that is not NVIDIA's."""
        if self.capability is not None:
            return self.capability
        if torch.version.hip is not None:
            return OTHER_MAKER
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)

    def rate(self, kernel: str) -> kernel_rates.Rate | None:
        """The rate of the kernel for such layers; None: the rate is not known, or it does not compute such layers."""
        architecture = kernel_rates.architecture_of(self.gpu[0])
        has_softcap = self.softcap is not None
        widths, is_grouped = (self.key_width, self.value_width), self.heads_per_key > 1
        return kernel_rates.rate(kernel, architecture, *widths, self.has_window, has_softcap, is_grouped)


@dataclass(frozen=True)
class Operators:
    """The forward and the backward operator of a library's kernel.

    forward   (query, keys, values, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=) -> out, log-sum-exp
              in fp32 [heads, t].  Layers with a window also pass num_before=, the number of keys before a query's own
              key to which the query attends.  Layers with a soft cap also pass softcap=.  Calls in which every query
              attends to all keys of its sequence also pass causal=False
    backward  (grad, query, keys, values, out, log-sum-exp, then the other arguments of forward) -> gradients of query,
              keys and values
    refused   demand -> the reason why no release of the kernel computes such layers in bf16 on this GPU; None if it can
    pads_values  whether values must be padded to the width of keys
    package   the package of the kernel; None: the kernel is torch's own
    asked     demand -> the reason by which the installed package itself refuses such layers; None if it accepts them
    starts_all_blocks  whether the kernel starts the same number of blocks for each sequence (length_classes.py)
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    refused: Callable[[Demand], str | None] = lambda demand: None
    pads_values: bool = False
    package: Package | None = None
    asked: Callable[[Demand], str | None] = lambda demand: None
    starts_all_blocks: bool = False

    def why_not(self, demand: Demand) -> str | None:
        """The reason why the kernel cannot compute layers with this demand; None if it can."""
        if demand.device_type != "cuda":
            return "it needs CUDA"
        if demand.dtype not in (torch.bfloat16, torch.float16):
            return "it computes in bf16 only"
        if reason := self.refused(demand):
            return reason
        missing = self.package and (self.package.absent() or self.package.broken())
        return missing or self.asked(demand)


def refused_heads(widest: int, width: int) -> str:
    return f"it has heads of up to {widest} in multiples of 8, but heads of this model are {width} wide"


@dataclass(frozen=True, kw_only=True)
class FlashKernel:
    """The kernel and the sequences of one microbatch, for all layers with this window and soft cap.

    key_source    gets keys and values in the kernel's order: one sequence after the other.  With cp > 1, the keys of
                  parents follow, each once
    calls         the calls of the operators that compute all sequences
    parent_keys   the calls in which branches attend to keys of their parents; None: there are none
    window        a token attends to itself and to the window - 1 tokens before it; None: to all tokens before it
    softcap       limit of the scores; None: no limit
    """

    key_source: KeySource
    calls: Sequence[Call]
    operators: Operators
    parent_keys: ParentKeys | None = None
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
        branches: Branches | None = None,
    ) -> "FlashKernel":
        """The kernel of a microbatch on one rank.

        cu_seqlens: int32 [documents + 1], padded boundaries of the documents of the whole pack

        one document of 8 tokens, cp 2, rank 0 -> two sequences: queries 0 1 | 6 7, keys 0 1 | 0 1 2 3 4 5 6 7
        """
        chunks = [chunk for chunk in context_parallel.local_chunks(cu_seqlens, cp_size, cp_rank) if chunk.length]
        num_queries = np.array([chunk.length for chunk in chunks])
        num_keys = np.array([chunk.position + chunk.length for chunk in chunks])
        halo = None
        if window is not None and (cp_size > 1 or branches is not None):
            halo = Halo.of(cu_seqlens, window, cp_size, cp_rank, branches)
            num_keys = num_queries + halo.num_before
        classes = [order := np.arange(len(chunks))]
        if operators.starts_all_blocks:
            classes = length_classes(num_queries, num_keys)
        key_source: KeySource = LocalKeys()
        key_starts = cu_seqlens[:-1].astype(np.int64)
        if halo is not None:
            key_source = HaloKeys.of(halo, device)
        elif cp_size > 1:
            order = np.concatenate(classes)  # keys are gathered by index in any order, so each class gets a slice
            gathered = context_parallel.gathered_positions(cu_seqlens, cp_size)
            starts = np.array([chunk.document_start for chunk in chunks])
            in_pack = context_parallel.runs(starts[order], num_keys[order])
            if branches is not None:
                last = last_forks(branches)
                in_pack = np.concatenate([in_pack, context_parallel.runs(key_starts, last)])
                key_starts = len(in_pack) - last.sum() + np.cumsum(last) - last
            key_source = AllGatheredKeys(send(torch.from_numpy(gathered[in_pack]), device))
        parent_keys = None
        if branches is not None and halo is None:
            query_starts, split = cu_seqlens.astype(np.int64) // cp_size, operators.starts_all_blocks
            parent_keys = ParentKeys.of(
                branches, query_starts, key_starts, is_copy=cp_size > 1, starts_all_blocks=split, device=device
            )
        return FlashKernel(
            key_source=key_source,
            calls=[Call.of(num_queries, num_keys, sequences, order, device) for sequences in classes],
            operators=operators,
            parent_keys=parent_keys,
            window=window,
            softcap=softcap,
        )

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Implements `AttentionKernel.forward`."""
        padded, out, lse = self._padded(values, keys), None, None
        for call in self.calls:
            q, k = call.queries, call.keys
            results = self.operators.forward(
                query[q], keys[k], padded[k], *call.boundaries, scale=scale, **self._options
            )
            out, lse = _written(out, results[0], q, len(query)), _written(lse, results[1], q, len(query), axis=1)
        assert out is not None and lse is not None
        if self.parent_keys is not None:
            forward = partial(self.operators.forward, scale=scale, **self._options)
            self.parent_keys.add(forward, (query, keys, padded), out, lse)
        return out[..., : values.shape[-1]], lse

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = values.shape[-1]
        grad, values, out = (self._padded(x, keys) for x in (grad, values, out))
        backward = partial(self.operators.backward, scale=scale, **self._options)
        dquery = dkeys = dvalues = None
        for call in self.calls:
            q, k = call.queries, call.keys
            inputs = grad[q], query[q], keys[k], values[k], out[q], lse[:, q].contiguous()
            results = backward(*inputs, *call.boundaries)
            dquery = _written(dquery, results[0], q, len(query))
            dkeys = _written(dkeys, results[1], k, len(keys))
            dvalues = _written(dvalues, results[2], k, len(keys))
        assert dquery is not None and dkeys is not None and dvalues is not None
        if self.parent_keys is not None:
            inputs = grad, query, keys, values, out, lse
            self.parent_keys.add_gradients(backward, inputs, (dquery, dkeys, dvalues), lse.dtype)
        return dquery, dkeys, dvalues[..., :width]

    @property
    def _options(self) -> dict[str, float]:
        options: dict[str, float] = {} if self.window is None else {"num_before": self.window - 1}
        return options if self.softcap is None else {**options, "softcap": self.softcap}

    def _padded(self, x: Tensor, keys: Tensor) -> Tensor:
        """x [n, heads, d], padded with zeros to the width of keys if the operators need that."""
        missing = keys.shape[-1] - x.shape[-1] if self.operators.pads_values else 0
        return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _written(whole: Tensor | None, part: Tensor, rows: Rows, count: int, axis: int = 0) -> Tensor:
    """Write a part into its rows of a tensor with `count` rows along `axis`, and return the tensor.

    whole: the tensor; None: it is allocated here.  If the part has all rows, the part itself is returned
    """
    if isinstance(rows, slice) and rows == slice(0, count):
        return part
    if whole is None:
        whole = part.new_empty([*part.shape[:axis], count, *part.shape[axis + 1 :]])
    if isinstance(rows, slice):
        whole.narrow(axis, rows.start, rows.stop - rows.start).copy_(part)
    else:
        whole.index_copy_(axis, rows, part)
    return whole
