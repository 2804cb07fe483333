"""Passes states from fragment to fragment, also over context-parallel (CP) ranks.

A fragment maps the state S before it to the state A S + B after it (recurrence.py).  Each linked fragment has at most
one predecessor, p: the fragment before it in its document, or for a branch the fragment of its parent that ends at the
fork.  Several fragments may have the same predecessor.  S_f is the state before fragment f:

    S_f = 0 without predecessor        S_f = A_p S_p + B_p

D_f is the gradient of the state after f, where G_s is the gradient of S_s through the outputs of s alone:

    D_f = sum of A_s^T D_s + G_s over all fragments s whose predecessor is f

Both recurrences go through the fragments of the pack level by level.  A fragment of level 0 has no predecessor, and the
predecessor of a fragment of level i + 1 is in level i.  Chunk i of a long document without branches is in level i.
Each level but the last is one batched product, however many branches there are.

An all-to-all sends the maps of each head from all ranks to one rank, which composes them.  A second all-to-all returns
the states.  So each rank composes the maps of its share of the heads.  Shares may differ by one head and may be empty:
cp need not divide the number of heads.  With n_r of the n fragments on rank r, and h_r heads in its share, all ranks
together send

    (sum of n_r * (heads - h_r)) * (a + K V)   numbers, and then   (sum of h_r * (n - n_r)) * K V   numbers

where A has a numbers: K^2 in the delta rule.  An all-gather of all maps would send cp (a + K V) / (a + 2 K V) times as
many bytes (2.7 at cp 4 with K = V in the delta rule), and every rank would hold and compose the maps of the whole pack.
With cp 1, nothing is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sft.mcore.device import send
from sft.mcore.linear_attention.recurrence import Maps
from sft.parallel.context_parallel import runs
from sft.parallel.cp_group import CpGroup
from sft.parallel.fragments import FragmentLinks


@dataclass(frozen=True, kw_only=True)
class LevelStep:
    """The step from a level to the next level.  Slices are slices of fragments in the order of composition.

    before    the fragments of the level that have successors
    after     the fragments of the next level, which are these successors
    followed  the fragments of `after` that have successors themselves; they come first in `after`
    parents   int64, the index in `before` of the predecessor of each fragment of `after`; None: 0, 1, 2, ...
    children  int64, the indices in `after`, sorted by predecessor; None if `parents` is None
    sums      pairs of tensors (to, from): rows of `children`.  For each pair in turn, the rows `from` are added to the
              rows `to`.  Then the first child of each predecessor has the sum over all children of the predecessor
    firsts    int64, for each fragment of `before` the row of its first child in `children`
    """

    before: slice
    after: slice
    followed: slice
    parents: Tensor | None
    children: Tensor | None
    sums: tuple[tuple[Tensor, Tensor], ...]
    firsts: Tensor | None


_Compose = Callable[[Tensor, Tensor, Maps, Sequence[LevelStep]], Tensor]


@dataclass(frozen=True, kw_only=True)
class HeadwisePassing:
    """Passes states and their gradients between the linked fragments of a pack.  Collective over cp.

    Inputs and results have the order of this rank's n linked fragments.

    cp        the ranks that share the pack
    maps      how maps act on states
    counts    number of linked fragments of each rank
    shares    number of heads that each rank composes
    composed  int64, the order of composition: indices of fragments, or with cp > 1 of received rows, each of which is a
              head of a fragment
    returned  int64, the inverse of this permutation
    steps     one step for each level but the last
    read      the rows that backward reads of this rank's maps and states
    """

    cp: CpGroup
    maps: Maps
    counts: list[int]
    shares: list[int]
    composed: Tensor
    returned: Tensor
    steps: tuple[LevelStep, ...]
    read: "ReadRows"

    @staticmethod
    def of(links: FragmentLinks, heads: int, cp: CpGroup, device: torch.device, *, maps: Maps) -> "HeadwisePassing":
        """The passing of a microbatch.  heads: heads with a state on this rank; maps: how maps act on states"""
        shares = [heads // cp.size + (rank < heads % cp.size) for rank in range(cp.size)]
        order, steps = _steps(links.predecessors, device)
        read = ReadRows.of(links, cp.rank, device)
        if cp.size > 1:  # each rank sends rows [heads of the receiver's share, fragments of the sender]
            counts, share = np.array(links.counts), shares[cp.rank]
            before, count = np.repeat(np.cumsum(counts) - counts, counts), np.repeat(counts, counts)
            first = before * share + np.arange(len(order)) - before
            order = (first[:, None] + count[:, None] * np.arange(share))[order].ravel()
        composed, returned = (send(torch.from_numpy(rows), device) for rows in (order, np.argsort(order)))
        return HeadwisePassing(
            cp=cp,
            maps=maps,
            counts=links.counts,
            shares=shares,
            composed=composed,
            returned=returned,
            steps=steps,
            read=read,
        )

    def initial_states(self, maps: Tensor, offsets: Tensor) -> Tensor:
        """The state before each of this rank's fragments, [n, heads, K, V].

        maps [n, heads, ...] and offsets [n, heads, K, V]: A and B of these fragments
        """
        return self._carried(maps, offsets, _states)

    def final_gradients(self, maps: Tensor, dstates: Tensor) -> Tensor:
        """The gradient of the state after each of this rank's fragments, [n, heads, K, V].

        maps [n, heads, ...]: A of these fragments
        dstates [n, heads, K, V]: G, gradients of the states before the fragments through the same fragment's outputs
        """
        return self._carried(self.maps.transposed(maps), dstates, _gradients)

    def _carried(self, maps: Tensor, offsets: Tensor, compose: _Compose) -> Tensor:
        if self.cp.size == 1:
            of_maps, of_offsets = (x.index_select(0, self.composed) for x in (maps, offsets))
            return compose(of_maps, of_offsets, self.maps, self.steps).index_select(0, self.returned)
        (n, heads, key_dim, value_dim), share = offsets.shape, self.shares[self.cp.rank]
        all_received = [share * count for count in self.counts]
        all_sent = [other * n for other in self.shares]
        numbers = maps.flatten(2), offsets.flatten(2)
        sent = torch.cat(numbers, dim=-1).transpose(0, 1).flatten(0, 1)  # [heads * n, numbers of A and of B]
        received = sent.new_empty((sum(all_received), *sent.shape[1:]))
        dist.all_to_all_single(received, sent, all_received, all_sent, group=self.cp.members)
        received = received.index_select(0, self.composed).unflatten(0, (sum(self.counts), share))
        of_maps, of_offsets = (
            x.unflatten(-1, y.shape[2:])
            for x, y in zip(received.split([x.shape[-1] for x in numbers], -1), (maps, offsets))
        )
        composed = compose(of_maps, of_offsets, self.maps, self.steps)
        returned = offsets.new_empty((heads * n, key_dim, value_dim))
        by_rank = composed.flatten(0, 1).index_select(0, self.returned)
        dist.all_to_all_single(returned, by_rank, all_sent, all_received, group=self.cp.members)
        return returned.unflatten(0, (heads, n)).transpose(0, 1).contiguous()


@dataclass(frozen=True, kw_only=True)
class ReadRows:
    """The rows that backward reads of the maps A and of the states before this rank's n linked fragments.

    Backward reads A only of fragments that have both a predecessor and a successor.  Fragments with the same
    predecessor, such as branches at one fork, have the same state.

    count   n
    maps    int64, the fragments whose A is read; None: all
    states  int64, one fragment for each state; None: all states differ
    before  int64 [n], the state before each fragment, as index in `states`; None: all states differ
    """

    count: int
    maps: Tensor | None
    states: Tensor | None
    before: Tensor | None

    @staticmethod
    def of(links: FragmentLinks, cp_rank: int, device: torch.device) -> "ReadRows":
        first, count = sum(links.counts[:cp_rank]), links.counts[cp_rank]
        predecessors, own = links.predecessors, slice(first, first + count)
        is_read = ((predecessors >= 0) & np.isin(np.arange(len(predecessors)), predecessors))[own]
        _, states, before = np.unique(predecessors[own], return_index=True, return_inverse=True)

        def sent(rows: np.ndarray, is_less: bool) -> Tensor | None:
            return send(torch.from_numpy(rows), device) if is_less else None

        return ReadRows(
            count=count,
            maps=sent(np.flatnonzero(is_read), not is_read.all()),
            states=sent(states, len(states) < count),
            before=sent(before, len(states) < count),
        )

    def kept(self, maps: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of maps and states [n, heads, ...] to save for backward."""
        return _chosen(maps, self.maps), _chosen(states, self.states)

    def restored(self, maps: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Maps and states [n, heads, ...] from the rows that were kept, with zeros for maps that are not read."""
        if self.maps is not None:
            kept, maps = maps, maps.new_zeros((self.count, *maps.shape[1:]))
            maps.index_copy_(0, self.maps, kept)
        return maps, _chosen(states, self.before)


def _chosen(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _states(maps: Tensor, offsets: Tensor, act: Maps, steps: Sequence[LevelStep]) -> Tensor:
    """The state before each fragment, from maps [fragments, heads, ...] and offsets [fragments, heads, K, V]."""
    states = torch.zeros_like(offsets, memory_format=torch.contiguous_format)
    for step in steps:
        after = act.times(maps[step.before], states[step.before])
        after += offsets[step.before]
        states[step.after] = after if step.parents is None else after.index_select(0, step.parents)
    return states


def _gradients(maps: Tensor, dstates: Tensor, act: Maps, steps: Sequence[LevelStep]) -> Tensor:
    """The gradient of the state after each fragment.  Replaces dstates by gradients of the states before them.

    maps: A, transposed
    """
    last = torch.zeros_like(dstates, memory_format=torch.contiguous_format)
    for step in reversed(steps):
        dstates[step.followed] += act.times(maps[step.followed], last[step.followed])
        if step.children is None or step.firsts is None:
            last[step.before] = dstates[step.after]
            continue
        of_children = dstates[step.after].index_select(0, step.children)
        for to, others in step.sums:  # adds in the same order at each call: no row occurs twice
            of_children.index_add_(0, to, of_children.index_select(0, others))
        last[step.before] = of_children.index_select(0, step.firsts)
    return last


def _steps(predecessors: np.ndarray, device: torch.device) -> tuple[np.ndarray, tuple[LevelStep, ...]]:
    """The order in which the linked fragments of a pack are composed, and the steps.

    predecessors: as in `FragmentLinks`
    """
    num_successors = np.bincount(predecessors[predecessors >= 0], minlength=len(predecessors))
    by_predecessor = np.argsort(predecessors, kind="stable")
    first_successor = np.cumsum(num_successors) - num_successors + (predecessors < 0).sum()
    level = _followed_first(np.flatnonzero(predecessors < 0), num_successors)
    order, steps, start = [level], [], 0
    while num_successors[level].any():
        before = level[num_successors[level] > 0]
        successors = by_predecessor[runs(first_successor[before], num_successors[before])]
        after, stop = _followed_first(successors, num_successors), start + len(level)
        index = np.empty(len(predecessors), dtype=np.int64)
        index[before] = np.arange(len(before))
        parents = index[predecessors[after]]
        steps.append(
            LevelStep(
                before=slice(start, start + len(before)),
                after=slice(stop, stop + len(after)),
                followed=slice(stop, stop + int((num_successors[after] > 0).sum())),
                **_relatives(parents, num_successors[before], device),
            )
        )
        order.append(after)
        level, start = after, stop
    return np.concatenate(order), tuple(steps)


def _followed_first(fragments: np.ndarray, num_successors: np.ndarray) -> np.ndarray:
    return fragments[np.argsort(num_successors[fragments] == 0, kind="stable")]


def _relatives(parents: np.ndarray, num_children: np.ndarray, device: torch.device) -> dict[str, Any]:
    """The fields of `LevelStep` about parents and children.

    parents: index of each child's parent; num_children: number of children of each parent

    Siblings are added in pairs, then pairs in pairs: 5 siblings a b c d e -> a + b, c + d, then (a + b) + (c + d), then
    e.  So hundreds of siblings take a few additions.
    """
    if np.array_equal(parents, np.arange(len(num_children))):
        return {"parents": None, "children": None, "sums": (), "firsts": None}

    def sent(rows: np.ndarray) -> Tensor:
        return send(torch.from_numpy(rows), device)

    first, rows = np.cumsum(num_children) - num_children, np.arange(len(parents))
    number, count = rows - np.repeat(first, num_children), np.repeat(num_children, num_children)  # among siblings
    strides = [2**i for i in range(int(num_children.max() - 1).bit_length())]
    to = [rows[(number % (2 * stride) == 0) & (number + stride < count)] for stride in strides]
    return {
        "parents": sent(parents),
        "children": sent(np.argsort(parents, kind="stable")),
        "sums": tuple((sent(x), sent(x + stride)) for x, stride in zip(to, strides)),
        "firsts": sent(first),
    }
