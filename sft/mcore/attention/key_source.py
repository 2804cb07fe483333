"""How a rank gets the keys and values of other context-parallel ranks, and returns their gradients.

    LocalKeys       with cp 1: a rank has all keys
    AllGatheredKeys every rank gets the keys of the whole pack, one head group at a time
    HaloKeys        sliding windows: a rank gets the keys before its chunks, with one all-to-all (sft/parallel/halo.py)

Gathered keys and values are not saved: backward asks for them again.  Gradients of keys and values are summed over
chunks and ranks in fp32 or float64.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sft.layers.mixers.softmax_bytes import num_head_groups
from sft.mcore.device import send
from sft.parallel.halo import Halo


class Transfer(Protocol):
    """A collective in progress."""

    def wait(self) -> None: ...

    def result(self) -> Any:
        """The received tensors.  Call it once; it frees the buffer."""


class KeySource(Protocol):
    def num_groups(self, num_key_heads: int) -> int:
        """Number of head groups that are transferred one after the other."""

    def start(self, key: Tensor, value: Tensor, cp_group: Any) -> Transfer:
        """key, value [t, key heads, d] of local tokens -> keys and values [k, key heads, d] in the kernel's order.

        Keys and values may differ in width.
        """

    def start_return(self, dkeys: Tensor, dvalues: Tensor, num_tokens: int, cp_group: Any) -> Transfer:
        """dkeys, dvalues [k, key heads, d] in the kernel's order -> both [num_tokens, key heads, d] of local tokens."""


@dataclass(frozen=True)
class _Arrived:
    """Nothing is in progress."""

    value: Any

    def wait(self) -> None:
        pass

    def result(self) -> Any:
        return self.value


@dataclass(frozen=True)
class LocalKeys:
    def num_groups(self, num_key_heads: int) -> int:
        return 1

    def start(self, key: Tensor, value: Tensor, cp_group: Any) -> Transfer:
        return _Arrived((key, value))

    def start_return(self, dkeys: Tensor, dvalues: Tensor, num_tokens: int, cp_group: Any) -> Transfer:
        return _Arrived((dkeys, dvalues))


@dataclass(frozen=True)
class AllGatheredKeys:
    """key_order: int64 [k], for each key that the kernel needs, its index in the concatenated parts of all ranks"""

    key_order: Tensor

    def num_groups(self, num_key_heads: int) -> int:
        return num_head_groups(num_key_heads)

    def start(self, key: Tensor, value: Tensor, cp_group: Any) -> Transfer:
        return _AllGather(key, value, self.key_order, cp_group)

    def start_return(self, dkeys: Tensor, dvalues: Tensor, num_tokens: int, cp_group: Any) -> Transfer:
        return _ReduceScatter(dkeys, dvalues, self.key_order, num_tokens, cp_group)


@dataclass(frozen=True, kw_only=True)
class HaloKeys:
    """The tensors of `Halo`, for one microbatch.

    key_order  int64 [k], indices in concat(local tokens, received tokens)
    send       int64, indices of local tokens
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
        return _HaloTransfer(key, value, self, cp_group)

    def start_return(self, dkeys: Tensor, dvalues: Tensor, num_tokens: int, cp_group: Any) -> Transfer:
        return _HaloReturn(dkeys, dvalues, self, num_tokens, cp_group)


class _AllGather:
    """The all-gather of one head group's keys and values."""

    def __init__(self, key: Tensor, value: Tensor, order: Tensor, cp_group: Any) -> None:
        self._order, self._widths = order, [key.shape[-1], value.shape[-1]]
        local = torch.cat((key, value), dim=-1)
        self._gathered: Any = local.new_empty((local.shape[0] * cp_group.size(), *local.shape[1:]))
        self._work: Any = dist.all_gather_into_tensor(self._gathered, local, group=cp_group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None  # it keeps the buffer

    def result(self) -> tuple[Tensor, Tensor]:
        self.wait()
        gathered, self._gathered = self._gathered, None
        keys, values = gathered.index_select(0, self._order).split(self._widths, dim=-1)
        return keys, values


class _ReduceScatter:
    """The sum over ranks of the gradients of one head group's keys and values."""

    def __init__(self, dkeys: Tensor, dvalues: Tensor, order: Tensor, num_tokens: int, cp_group: Any) -> None:
        self._widths = [dkeys.shape[-1], dvalues.shape[-1]]
        total = _summed(dkeys, dvalues, order, num_tokens * cp_group.size())
        self._local = total.new_empty((num_tokens, *total.shape[1:]))
        self._work: Any = dist.reduce_scatter_tensor(self._local, total, group=cp_group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def result(self) -> tuple[Tensor, ...]:
        self.wait()
        return self._local.split(self._widths, dim=-1)


class _HaloTransfer:
    """The all-to-all of the keys and values before the chunks of other ranks."""

    def __init__(self, key: Tensor, value: Tensor, keys: HaloKeys, cp_group: Any) -> None:
        self._keys, self._widths = keys, [key.shape[-1], value.shape[-1]]
        local = torch.cat((key, value), dim=-1)
        sent = local.index_select(0, keys.send)
        self._received: Any = local.new_empty((sum(keys.num_received), *local.shape[1:]))
        self._local: Any = local
        self._work: Any = dist.all_to_all_single(
            self._received, sent, keys.num_received, keys.num_sent, group=cp_group, async_op=True
        )

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None  # it keeps the buffer

    def result(self) -> tuple[Tensor, Tensor]:
        self.wait()
        held = torch.cat((self._local, self._received))
        self._local = self._received = None
        keys, values = held.index_select(0, self._keys.key_order).split(self._widths, dim=-1)
        return keys, values


class _HaloReturn:
    """The all-to-all that returns the gradients of received keys and values to the ranks that hold these tokens."""

    def __init__(self, dkeys: Tensor, dvalues: Tensor, keys: HaloKeys, num_tokens: int, cp_group: Any) -> None:
        self._widths = [dkeys.shape[-1], dvalues.shape[-1]]
        total = _summed(dkeys, dvalues, keys.key_order, num_tokens + sum(keys.num_received))
        self._local, dreceived = total[:num_tokens], total[num_tokens:]
        self._send = keys.send
        self._returned = total.new_empty((len(keys.send), *total.shape[1:]))
        self._work: Any = dist.all_to_all_single(
            self._returned, dreceived, keys.num_sent, keys.num_received, group=cp_group, async_op=True
        )

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._local.index_add_(0, self._send, self._returned)

    def result(self) -> tuple[Tensor, ...]:
        self.wait()
        return self._local.split(self._widths, dim=-1)


def _summed(dkeys: Tensor, dvalues: Tensor, order: Tensor, num_tokens: int) -> Tensor:
    """Gradients of keys and values [num_tokens, key heads, d of both], summed over chunks in fp32 or float64."""
    wide, widths = torch.promote_types(dkeys.dtype, torch.float32), [dkeys.shape[-1], dvalues.shape[-1]]
    total = dkeys.new_zeros((num_tokens, dkeys.shape[1], sum(widths)), dtype=wide)
    for part, gradients in zip(total.split(widths, dim=-1), (dkeys, dvalues)):  # one at a time in fp32
        part.index_add_(0, order, gradients.to(wide))
    return total
