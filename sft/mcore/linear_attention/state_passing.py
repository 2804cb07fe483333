"""Passes states of long documents from fragment to fragment over context-parallel (CP) ranks.

A fragment maps the state S before it to the state A S + B after it (sft/parallel/fragments.py).  The fragments of a
document are its chunks 0 .. 2 cp - 1.  Ranks 0, 1, ..., cp - 1 hold the first cp chunks, and ranks cp - 1, ..., 0 the
others.  The state before chunk c is S_c:

    S_0 = 0        S_c+1 = A_c S_c + B_c

The gradient of the state after chunk c is D_c, where G_c is the gradient of S_c through the outputs of chunk c alone:

    D_last = 0     D_c-1 = A_c^T D_c + G_c

Both recurrences have the same form, so one function computes them.  An all-to-all sends the maps of each head from all
ranks to one rank, which composes them in document order.  A second all-to-all returns the states.  So each rank
composes the maps of its share of the heads.  Shares may differ by one head and may be empty: cp need not divide the
number of heads.  An all-gather of all maps would send cp (K + V) / (K + 2 V) times as many bytes (2.7 at cp 4 with
K = V), and every rank would hold and compose the maps of the whole pack.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class HeadwisePassing:
    """Passes states and their gradients between fragments of long documents on different CP ranks.

    Each rank has two fragments of every long document, n fragments in all, in the order [early, late, early, late,
    ...].  The methods are collective over `cp_group`.
    """

    cp_group: Any

    def initial_states(self, maps: Tensor, offsets: Tensor) -> Tensor:
        """The state before each of this rank's fragments, [n, heads, K, V].

        maps [n, heads, K, K] and offsets [n, heads, K, V]: A and B of these fragments
        """
        return _carried(maps, offsets, self.cp_group, reverse=False)

    def final_gradients(self, maps: Tensor, dstates: Tensor) -> Tensor:
        """The gradient of the state after each of this rank's fragments, [n, heads, K, V].

        maps [n, heads, K, K]: A of these fragments
        dstates [n, heads, K, V]: G, gradients of the states before the fragments through the same fragment's outputs
        """
        return _carried(maps.transpose(-1, -2), dstates, self.cp_group, reverse=True)


def _carried(maps: Tensor, offsets: Tensor, cp_group: Any, *, reverse: bool) -> Tensor:
    """The state before each local fragment, or with `reverse`, the gradient of the state after it, [n, heads, K, V]."""
    num_heads, key_dim = maps.shape[1:3]
    size, rank = cp_group.size(), cp_group.rank()
    shares = [num_heads // size + (other < num_heads % size) for other in range(size)]  # heads that a rank composes
    own = [shares[rank]] * size
    sent = torch.cat((maps, offsets), dim=-1).transpose(0, 1).contiguous()  # [heads, n, K, K + V]
    received = sent.new_empty((sum(own), *sent.shape[1:]))
    dist.all_to_all_single(received, sent, own, shares, group=cp_group)
    received = received.unflatten(0, (size, shares[rank])).unflatten(2, (-1, 2))  # [cp, heads, documents, 2, K, K + V]
    composed = _composed(*received.split((key_dim, sent.shape[-1] - key_dim), dim=-1), reverse=reverse)
    returned = offsets.new_empty((num_heads, *composed.flatten(2, 3).shape[2:]))
    dist.all_to_all_single(returned, composed.flatten(0, 1).flatten(1, 2), shares, own, group=cp_group)
    return returned.transpose(0, 1).contiguous()


def _composed(maps: Tensor, offsets: Tensor, *, reverse: bool) -> Tensor:
    """maps [cp, heads, documents, 2, K, K], offsets [cp, heads, documents, 2, K, V] -> states, shaped like offsets.

    reverse: follow the chunks of a document from the last to the first
    """
    early, late = ([(rank, part) for rank in range(len(maps))] for part in (0, 1))
    chunks = [*early, *reversed(late)]  # in document order
    states = torch.zeros_like(offsets, memory_format=torch.contiguous_format)
    for (rank, part), (next_rank, next_part) in pairwise(reversed(chunks) if reverse else chunks):
        before = maps[rank, :, :, part] @ states[rank, :, :, part]
        torch.add(before, offsets[rank, :, :, part], out=states[next_rank, :, :, next_part])
    return states
