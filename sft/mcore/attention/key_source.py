"""Gets the keys and values of other context-parallel ranks, and returns their gradients.

    LocalKeys        cp 1: the rank has all keys, and nothing is sent
    AllGatheredKeys  cp > 1: every rank gets the keys of the whole pack, one head group at a time
    HaloKeys         a sliding window, with cp > 1 or with branches: a rank gets the keys before its chunks, by one
                     all-to-all (sft/parallel/halo.py); with cp 1 it copies them

Gathered keys and values are not saved: backward gathers them again.  Gradients of keys and values are summed over
chunks and ranks in fp32 or float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sft.layers.mixers.softmax_bytes import num_head_groups
from sft.mcore.device import send
from sft.mcore.wide import wide, wide_dtype
from sft.parallel.halo import Halo


class Transfer:
    """A collective in progress.

    work    torch's handle of the collective; None: nothing is in progress
    finish  called after the collective; returns the tensors that `result` returns
    """

    def __init__(self, work: Any, finish: Callable[[], Sequence[Tensor]]) -> None:
        self._work: Any = work
        self._finish: Any = finish

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None  # the handle keeps the buffers alive

    def result(self) -> Any:
        """The received tensors.  Call it once; it frees the buffers."""
        self.wait()
        finish, self._finish = self._finish, None
        return finish()


class KeySource(Protocol):
    """The interface of the classes of this module."""

    def num_groups(self, num_key_heads: int) -> int:
        """Number of head groups, which are transferred one after the other."""

    def start(self, key: Tensor, value: Tensor, cp_group: Any) -> Transfer:
        """Start the transfer of key and value [t, key heads, d] of this rank's t tokens.

        The result is the keys and values [k, key heads, d] in the kernel's order.  Keys and values may differ in width.
        """

    def start_return(self, dkeys: Tensor, dvalues: Tensor, num_tokens: int, cp_group: Any) -> Transfer:
        """Start to return the gradients dkeys and dvalues [k, key heads, d] in the kernel's order.

        The result is the gradients [num_tokens, key heads, d] of this rank's tokens, summed over ranks.
        """


@dataclass(frozen=True)
class LocalKeys:
    """The keys of this rank, with cp 1."""

    def num_groups(self, num_key_heads: int) -> int:
        return 1

    def start(self, key: Tensor, value: Tensor, cp_group: Any) -> Transfer:
        return Transfer(None, lambda: (key, value))

    def start_return(self, dkeys: Tensor, dvalues: Tensor, num_tokens: int, cp_group: Any) -> Transfer:
        return Transfer(None, lambda: (dkeys, dvalues))


@dataclass(frozen=True)
class AllGatheredKeys:
    """The keys of the whole pack, gathered from all ranks.

    key_order: int64 [k], for each key that the kernel needs, its index in the concatenated parts of all ranks
    """

    key_order: Tensor

    def num_groups(self, num_key_heads: int) -> int:
        return num_head_groups(num_key_heads)

    def start(self, key: Tensor, value: Tensor, cp_group: Any) -> Transfer:
        """Start an all-gather of one head group's keys and values."""
        local, widths = torch.cat((key, value), dim=-1), [key.shape[-1], value.shape[-1]]
        gathered = local.new_empty((local.shape[0] * cp_group.size(), *local.shape[1:]))
        work = dist.all_gather_into_tensor(gathered, local, group=cp_group, async_op=True)
        return Transfer(work, lambda: gathered.index_select(0, self.key_order).split(widths, dim=-1))

    def start_return(self, dkeys: Tensor, dvalues: Tensor, num_tokens: int, cp_group: Any) -> Transfer:
        """Start a reduce-scatter of the gradients of one head group's keys and values."""
        widths = [dkeys.shape[-1], dvalues.shape[-1]]
        total = _summed(dkeys, dvalues, self.key_order, num_tokens * cp_group.size())
        local = total.new_empty((num_tokens, *total.shape[1:]))
        work = dist.reduce_scatter_tensor(local, total, group=cp_group, async_op=True)
        return Transfer(work, lambda: local.split(widths, dim=-1))


@dataclass(frozen=True, kw_only=True)
class HaloKeys:
    """The arrays of `Halo` for one microbatch, as tensors on the device.

    key_order     int64 [k], for each key that the kernel needs, its index in concat(local tokens, received tokens)
    send          int64, indices of the local tokens that other ranks need
    num_sent, num_received  number of tokens for and from each rank
    """

    key_order: Tensor
    send: Tensor
    num_sent: list[int]
    num_received: list[int]

    @staticmethod
    def of(halo: Halo, device: torch.device) -> "HaloKeys":
        order, sent = (send(torch.from_numpy(np.ascontiguousarray(x)), device) for x in (halo.key_order, halo.send))
        return HaloKeys(key_order=order, send=sent, num_sent=halo.num_sent, num_received=halo.num_received)

    def num_groups(self, num_key_heads: int) -> int:
        return 1  # the messages are small

    def start(self, key: Tensor, value: Tensor, cp_group: Any) -> Transfer:
        """Start an all-to-all that gives each rank the keys and values before its chunks."""
        if len(self.num_sent) == 1:  # cp 1: the keys before a branch are copied
            return Transfer(None, lambda: (key.index_select(0, self.key_order), value.index_select(0, self.key_order)))
        local, widths = torch.cat((key, value), dim=-1), [key.shape[-1], value.shape[-1]]
        received, sent = local.new_empty((sum(self.num_received), *local.shape[1:])), local.index_select(0, self.send)
        work = dist.all_to_all_single(received, sent, self.num_received, self.num_sent, group=cp_group, async_op=True)

        def finish() -> Sequence[Tensor]:
            nonlocal local, received
            held = torch.cat((local, received))
            del local, received
            return held.index_select(0, self.key_order).split(widths, dim=-1)

        return Transfer(work, finish)

    def start_return(self, dkeys: Tensor, dvalues: Tensor, num_tokens: int, cp_group: Any) -> Transfer:
        """Start an all-to-all that returns the gradients of received keys and values to the ranks of these tokens."""
        widths = [dkeys.shape[-1], dvalues.shape[-1]]
        total = _summed(dkeys, dvalues, self.key_order, num_tokens + sum(self.num_received))
        if len(self.num_sent) == 1:
            return Transfer(None, lambda: total.split(widths, dim=-1))
        local, dreceived = total[:num_tokens], total[num_tokens:]
        returned = total.new_empty((len(self.send), *total.shape[1:]))
        work = dist.all_to_all_single(
            returned, dreceived, self.num_sent, self.num_received, group=cp_group, async_op=True
        )
        return Transfer(work, lambda: local.index_add_(0, self.send, returned).split(widths, dim=-1))


def _summed(dkeys: Tensor, dvalues: Tensor, order: Tensor, num_tokens: int) -> Tensor:
    """Sum the gradients of keys and values over chunks, in fp32 or float64.

    dkeys, dvalues [k, key heads, d], order [k]: index of each key's token
    -> [num_tokens, key heads, width of keys + width of values]
    """
    widths = [dkeys.shape[-1], dvalues.shape[-1]]
    total = dkeys.new_zeros((num_tokens, dkeys.shape[1], sum(widths)), dtype=wide_dtype(dkeys.dtype))
    for part, gradients in zip(total.split(widths, dim=-1), (dkeys, dvalues)):  # one at a time in fp32
        part.index_add_(0, order, wide(gradients))
    return total
