"""Attention over packed documents: the `portable` backend, context parallelism included.

A token attends to the tokens of its own document up to itself.  Queries stay where they are.  Keys and values are
all-gathered over the context-parallel group some heads at a time, and while a kernel works on one lot of heads the
next lot is on its way.  What is gathered is not kept: backward gathers it once more, and sums the gradients of keys
and values over the group, lot by lot.

    kernel   flash_kernel.py   torch's own, on CUDA in bf16
             torch_kernel.py   plain torch, everywhere else
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from sft.mcore.attention import flash_kernel, torch_kernel
from sft.mcore.attention.rope import Rotation
from sft.mcore.device import send

MAX_LOTS = 4  # of heads: with more, kernels and messages become small


class Kernel(Protocol):
    """Attention of this rank's queries to keys that were laid out for it."""

    @property
    def keys(self) -> Tensor | None:
        """int64 [k]: of the gathered local parts, one after the other, the keys it wants; None: as they lie (cp 1)."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """query [t, heads, d], keys and values [k, groups, d] -> out [t, heads, d] and what backward wants of it."""

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values, those of keys and values from these queries alone."""


@dataclass
class PackedDocuments(PackedSeqParams):
    """What attention must know of a microbatch; made by the engine on every pipeline stage, dropped there."""

    kernel: Kernel | None = None  # None: Transformer Engine's
    rotation: Rotation | None = None  # of this rank's tokens, with a kernel


def describe(
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    kernel: Kernel | None,
    rotation: Rotation | None = None,
    device: torch.device,
) -> PackedDocuments:
    """Boundaries of a whole pack -> what attention needs on this rank.

    The same padded tensor is passed as padded and unpadded boundaries: padding is at the tail of a document, where
    causal attention cannot see it, and some Transformer Engine releases drop keys when the two differ.
    """
    boundaries = send(cu_seqlens, device)
    return PackedDocuments(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        kernel=kernel,
        rotation=rotation,
    )


def kernel_of(cu_seqlens: Tensor, *, cp_size: int, cp_rank: int, device: torch.device, by_flash: bool) -> Kernel:
    """cu_seqlens: padded boundaries of the documents of the whole pack; by_flash: torch's kernel."""
    make = flash_kernel.Sequences.of if by_flash else torch_kernel.Tiles.of
    return make(cu_seqlens.cpu().numpy(), cp_size, cp_rank, device)


class PortableAttention(torch.nn.Module):
    """megatron-core's CoreAttention protocol over `document_attention`; it rotates queries and keys, too."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,  # [t, heads, d]
        key: Tensor,  # [t, groups, d]
        value: Tensor,  # [t, groups, d]
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedDocuments | None = None,
        **unused: Any,
    ) -> Tensor:
        documents = packed_seq_params
        assert documents is not None and attention_mask is None and attention_bias is None
        assert documents.kernel is not None and documents.rotation is not None
        return document_attention(
            query, key, value, documents.kernel, self.scale, self.cp_group, documents.rotation
        ).flatten(1)


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    scale: float,
    cp_group: Any,
    rotation: Rotation | None = None,
) -> Tensor:
    """Causal attention within documents.  query [t, heads, d], key and value [t, groups, d] -> [t, heads, d].

    rotation: of queries and keys, before; None: none
    """
    out: Tensor = _DocumentAttention.apply(query, key, value, kernel, scale, cp_group, rotation)
    return out


class _DocumentAttention(torch.autograd.Function):
    """Keeps queries and keys as they were before rotation: a norm may give them back (`saved.py`)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: Kernel,
        scale: float,
        cp_group: Any,
        rotation: Rotation | None,
    ) -> Tensor:
        query, key, value = (x.contiguous() for x in (query, key, value))  # not a view of what the projection made
        lots = _num_lots(key, kernel)
        out = torch.empty_like(query)
        kept = []
        queries = _rotated(query, rotation).chunk(lots, dim=1)
        gathered = _gathered(_rotated(key, rotation), value, kernel, cp_group, lots)
        for some, (keys, values), place in zip(queries, gathered, out.chunk(lots, dim=1)):
            part, lse = kernel.forward(some, keys, values, scale)
            place.copy_(part)
            kept.append(lse)
        ctx.save_for_backward(query, key, value, out, *kept)
        ctx.kernel, ctx.scale, ctx.cp_group, ctx.rotation = kernel, scale, cp_group, rotation
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *kept = ctx.saved_tensors
        kernel, rotation, lots = ctx.kernel, ctx.rotation, len(kept)
        dquery = torch.empty_like(query)
        sums: list[_Summed] = []
        queries = _rotated(query, rotation).chunk(lots, dim=1)
        gathered = _gathered(_rotated(key, rotation), value, kernel, ctx.cp_group, lots)
        parts = zip(queries, gathered, grads[0].chunk(lots, 1), out.chunk(lots, 1), kept, dquery.chunk(lots, 1))
        for some, (keys, values), grad, part, lse, place in parts:
            dpart, dkeys, dvalues = kernel.backward(grad, some, keys, values, part, lse, ctx.scale)
            place.copy_(dpart)
            for before in sums[-1:]:  # one sum over ranks at a time: each is as long as the pack, and wide
                before.wait()
            sums.append(_Summed(dkeys, dvalues, kernel, len(key), ctx.cp_group))
            del dkeys, dvalues  # of the whole pack, too
        both = torch.cat([summed.take() for summed in sums], dim=1)
        dkey, dvalue = both.split(key.shape[-1], dim=-1)
        if rotation is not None:
            dquery, dkey = rotation.undo(dquery), rotation.undo(dkey)
        return dquery, dkey.to(key.dtype), dvalue.to(value.dtype), None, None, None, None


def _rotated(x: Tensor, rotation: Rotation | None) -> Tensor:
    return x if rotation is None else rotation.apply(x)


def _num_lots(key: Tensor, kernel: Kernel) -> int:
    """1 where nothing is gathered."""
    groups = key.shape[1]
    return 1 if kernel.keys is None else max(n for n in range(1, MAX_LOTS + 1) if groups % n == 0)


def _gathered(key: Tensor, value: Tensor, kernel: Kernel, cp_group: Any, lots: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values [k, groups / lots, d] as the kernel wants them, lot by lot.  Collective over cp."""
    if kernel.keys is None:
        yield key, value
        return
    some = list(zip(key.chunk(lots, dim=1), value.chunk(lots, dim=1)))
    coming = _Gathering(*some[0], kernel.keys, cp_group)
    for lot in range(lots):
        here = coming
        if lot + 1 < lots:
            coming = _Gathering(*some[lot + 1], kernel.keys, cp_group)
        yield here.take()


class _Gathering:
    """Local keys and values of some heads, on their way to all ranks."""

    def __init__(self, key: Tensor, value: Tensor, order: Tensor, cp_group: Any) -> None:
        self._order, self._width = order, key.shape[-1]
        local = torch.cat((key, value), dim=-1)
        self._gathered: Any = local.new_empty((local.shape[0] * cp_group.size(), *local.shape[1:]))
        self._work = dist.all_gather_into_tensor(self._gathered, local, group=cp_group, async_op=True)

    def take(self) -> tuple[Tensor, Tensor]:
        """Both [k, groups, d], laid out by `order`."""
        self._work.wait()
        gathered, self._gathered = self._gathered, None
        keys, values = gathered.index_select(0, self._order).split(self._width, dim=-1)
        return keys, values


class _Summed:
    """Gradients of laid out keys and values, partial on every rank, on their way to those of the local ones.

    Sums over chunks and ranks are in fp32 at least.
    """

    def __init__(self, dkeys: Tensor, dvalues: Tensor, kernel: Kernel, num_tokens: int, cp_group: Any) -> None:
        both = torch.cat((dkeys, dvalues), dim=-1)
        self._local, self._work = both, None
        if kernel.keys is None:
            return
        wide = torch.promote_types(both.dtype, torch.float32)
        total = both.new_zeros((num_tokens * cp_group.size(), *both.shape[1:]), dtype=wide)
        total.index_add_(0, kernel.keys, both.to(wide))
        self._local = total.new_empty((num_tokens, *both.shape[1:]))
        self._work = dist.reduce_scatter_tensor(self._local, total, group=cp_group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def take(self) -> Tensor:
        """[t, groups, 2 d]"""
        self.wait()
        return self._local
