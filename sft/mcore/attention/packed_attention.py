"""Causal attention over packed documents whose tokens are split over the context-parallel group.

A token attends to the tokens of its own document up to itself.  Queries stay on their rank.  Keys and values are
all-gathered over the group, one head group at a time.  While a kernel computes one head group, the next is gathered.
Gathered keys and values are not saved.  Backward gathers them again, and reduce-scatters their gradients per head
group.

A head group is at least 1/4 of the key/value heads, with the query heads that use them (`num_head_groups`).  The kernel
is flash_kernel.py (torch's own flash attention, on CUDA in bf16) or torch_kernel.py (plain torch, everywhere else).
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sft.mcore.attention.activation_bytes import num_head_groups
from sft.mcore.attention.rope import Rotation


class Kernel(Protocol):
    """Attention of this rank's queries in one microbatch to keys in the order `key_order`."""

    @property
    def key_order(self) -> Tensor | None:
        """int64 [k]: for each key that the kernel needs, its index in the gathered parts; None: all in order (cp 1)."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """query [t, heads, d], keys and values [k, key heads, d] -> out [t, heads, d], log-sum-exp for backward."""

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values.  Gradients of keys and values come from this rank's queries alone."""


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    scale: float,
    cp_group: Any,
    rotation: Rotation | None = None,
) -> Tensor:
    """query [t, heads, d], key and value [t, key heads, d] of this rank's tokens -> [t, heads, d].

    rotation: applied to queries and keys first; None: no rotation
    """
    out: Tensor = _PackedAttention.apply(query, key, value, kernel, scale, cp_group, rotation)
    return out


class _PackedAttention(torch.autograd.Function):
    """Saves queries and keys before rotation, because a norm may recompute them (`saved_tensors.py`)."""

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
        # Copies, because a view would keep the whole output of the projection in memory.
        query, key, value = (x.contiguous() for x in (query, key, value))
        num_groups = _num_groups(key, kernel)
        out = torch.empty_like(query)
        sums = []
        queries = _rotated_queries(query, rotation).chunk(num_groups, dim=1)
        gathered = _gathered(_rotated_keys(key, rotation), value, kernel, cp_group, num_groups)
        for group_query, (keys, values), group_out in zip(queries, gathered, out.chunk(num_groups, dim=1)):
            result, lse = kernel.forward(group_query, keys, values, scale)
            group_out.copy_(result)
            sums.append(lse)
        ctx.save_for_backward(query, key, value, out, *sums)
        ctx.kernel, ctx.scale, ctx.cp_group, ctx.rotation = kernel, scale, cp_group, rotation
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *sums = ctx.saved_tensors
        kernel, rotation, num_groups = ctx.kernel, ctx.rotation, len(sums)
        dquery = torch.empty_like(query)
        scatters: list[_ReduceScatter] = []
        queries = _rotated_queries(query, rotation).chunk(num_groups, dim=1)
        gathered = _gathered(_rotated_keys(key, rotation), value, kernel, ctx.cp_group, num_groups)
        by_group = (x.chunk(num_groups, dim=1) for x in (grads[0], out, dquery))
        for group_query, (keys, values), lse, grad, group_out, group_dquery in zip(queries, gathered, sums, *by_group):
            result, dkeys, dvalues = kernel.backward(grad, group_query, keys, values, group_out, lse, ctx.scale)
            group_dquery.copy_(result)
            if scatters:  # one reduce-scatter at a time, because each holds fp32 sums for every token of the pack
                scatters[-1].wait()
            scatters.append(_ReduceScatter(dkeys, dvalues, kernel, len(key), ctx.cp_group))
            del dkeys, dvalues  # these tensors are as long as the pack
        both = torch.cat([scatter.result() for scatter in scatters], dim=1)
        dkey, dvalue = both.split(key.shape[-1], dim=-1)
        if rotation is not None:
            dquery, dkey = rotation.query_gradient(dquery), rotation.undo(dkey)
        return dquery, dkey.to(key.dtype), dvalue.to(value.dtype), None, None, None, None


def _rotated_queries(query: Tensor, rotation: Rotation | None) -> Tensor:
    return query if rotation is None else rotation.apply_to_query(query)


def _rotated_keys(key: Tensor, rotation: Rotation | None) -> Tensor:
    return key if rotation is None else rotation.apply(key)


def _num_groups(key: Tensor, kernel: Kernel) -> int:
    """Head groups of key [t, key heads, d]; 1 if keys are not gathered."""
    return 1 if kernel.key_order is None else num_head_groups(key.shape[1])


def _gathered(
    key: Tensor, value: Tensor, kernel: Kernel, cp_group: Any, num_groups: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values [k, key heads / num_groups, d] in the kernel's order, one head group after the other.

    Collective over cp.  When a head group is yielded, the all-gather of the next is in progress.
    """
    if kernel.key_order is None:
        yield key, value
        return
    groups = list(zip(key.chunk(num_groups, dim=1), value.chunk(num_groups, dim=1)))
    next_gather = _AllGather(*groups[0], kernel.key_order, cp_group)
    for index in range(num_groups):
        gather = next_gather
        if index + 1 < num_groups:
            next_gather = _AllGather(*groups[index + 1], kernel.key_order, cp_group)
        yield gather.result()


class _AllGather:
    """The all-gather of one head group's keys and values, in progress."""

    def __init__(self, key: Tensor, value: Tensor, order: Tensor, cp_group: Any) -> None:
        self._order, self._head_dim = order, key.shape[-1]
        local = torch.cat((key, value), dim=-1)
        self._gathered: Any = local.new_empty((local.shape[0] * cp_group.size(), *local.shape[1:]))
        self._work = dist.all_gather_into_tensor(self._gathered, local, group=cp_group, async_op=True)

    def result(self) -> tuple[Tensor, Tensor]:
        """Keys and values, each [k, key heads, d] in `order`.  Call it once; it frees the buffer."""
        self._work.wait()
        gathered, self._gathered = self._gathered, None
        keys, values = gathered.index_select(0, self._order).split(self._head_dim, dim=-1)
        return keys, values


class _ReduceScatter:
    """Gradients of keys and values in the kernel's order -> gradients of local keys and values, summed over ranks.

    Sums over chunks and ranks are in fp32 or float64.
    """

    def __init__(self, dkeys: Tensor, dvalues: Tensor, kernel: Kernel, num_tokens: int, cp_group: Any) -> None:
        both = torch.cat((dkeys, dvalues), dim=-1)
        self._local, self._work = both, None
        if kernel.key_order is None:
            return
        wide = torch.promote_types(both.dtype, torch.float32)
        total = both.new_zeros((num_tokens * cp_group.size(), *both.shape[1:]), dtype=wide)
        total.index_add_(0, kernel.key_order, both.to(wide))
        self._local = total.new_empty((num_tokens, *both.shape[1:]))
        self._work = dist.reduce_scatter_tensor(self._local, total, group=cp_group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def result(self) -> Tensor:
        """[t, key heads, 2 d]"""
        self.wait()
        return self._local
