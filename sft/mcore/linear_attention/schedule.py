"""Decides in which order chunked_kernel.py computes the chunks of a rank's fragments.

Every fragment is cut into chunks of 64 tokens; its last chunk may be shorter.  Chunks of one fragment depend on each
other; chunks of different fragments do not.  So step i computes chunk i of many fragments at once:

    fragments of 200, 64 and 130 tokens, x: the step computes a chunk of the fragment

                                     step     0 1 2 3
                                     200      x x x x
                                     130      x x x
                                      64      x

A group is a set of fragments of similar length, sorted from the longest, so that each step computes the first few
fragments of the group.  A block is a run of up to INTERVAL steps of one group.  Products that depend on no state are
computed for a whole block at once.  Lengths alone determine the groups and blocks, so the tokens of other documents do
not affect a document's results.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sft.mcore.device import send
from sft.mcore.linear_attention.recurrence import Fragments

CHUNK = 64  # tokens per chunk, as in the package transformers; matrix products compute a chunk's updates of the state
INTERVAL = 8  # most steps of a block.  Forward saves the states at the start of blocks
BLOCK_CHUNKS = 512  # largest value of chunks x heads in a block with several fragments


@dataclass(frozen=True, eq=False)
class Block:
    """Some steps of a group, with n chunks.

    tokens   int64 [n * CHUNK], indices of tokens, chunk by chunk in the order of steps.  In a shorter chunk, the last
             token is repeated
    padding  bool [n, CHUNK], true for the repeated tokens; None: no token is repeated
    kept     int64, indices in `tokens` of the tokens that are not repetitions; None: all of them
    steps    for each step, the slice of its chunks among the n chunks.  A step has at most as many as the step before
    saved    the slice among all saved states that holds the states at the start of the block; None: the first block of
             a group, whose states are not saved
    """

    tokens: Tensor
    padding: Tensor | None
    kept: Tensor | None
    steps: tuple[slice, ...]
    saved: slice | None


@dataclass(frozen=True, eq=False)
class Group:
    """Fragments whose chunks are computed at once.  Either all of them are linked, or none is.

    linked: int64 [num_fragments], the index of each fragment among the rank's linked fragments; None: none is linked
    """

    num_fragments: int
    linked: Tensor | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class ChunkSchedule:
    """The chunks of all fragments of a microbatch.

    num_saved: number of states that forward saves at the starts of blocks
    """

    fragments: Fragments
    groups: tuple[Group, ...]
    num_saved: int

    @staticmethod
    def of(fragments: Fragments, heads: int, device: torch.device) -> "ChunkSchedule":
        """The schedule of a microbatch.  heads: heads with a state on this rank"""
        num_chunks = -(-fragments.lengths // CHUNK)
        linked = np.full(len(num_chunks), -1, dtype=np.int64)
        linked[fragments.linked] = np.arange(len(fragments.linked))
        groups, num_saved = [], 0
        for members in _groups(num_chunks, linked >= 0, heads):
            blocks, steps = [], int(num_chunks[members[0]])
            for start in range(0, steps, INTERVAL):
                active = [int((num_chunks[members] > i).sum()) for i in range(start, min(start + INTERVAL, steps))]
                saved = slice(num_saved, num_saved + active[0]) if start else None
                num_saved += active[0] if start else 0
                blocks.append(_block(fragments, members, start, active, saved, device))
            indices = send(torch.from_numpy(linked[members]), device) if linked[members[0]] >= 0 else None
            groups.append(Group(len(members), indices, tuple(blocks)))
        return ChunkSchedule(fragments, tuple(groups), num_saved)


def _groups(num_chunks: np.ndarray, is_linked: np.ndarray, heads: int) -> Iterator[np.ndarray]:
    """Yield the indices of the fragments of each group, the longest first.

    num_chunks, is_linked: [fragments], number of chunks of each fragment, and whether it is linked
    """
    for chosen in (is_linked, ~is_linked):
        order = np.flatnonzero(chosen)
        order = order[np.argsort(-num_chunks[order], kind="stable")]
        while len(order):
            steps = min(max(1, int(num_chunks[order[0]])), INTERVAL)
            count = max(1, BLOCK_CHUNKS // (heads * steps))
            yield order[:count]
            order = order[count:]


def _block(
    fragments: Fragments, members: np.ndarray, start: int, active: list[int], saved: slice | None, device: torch.device
) -> Block:
    """The block with the steps start, start + 1, ...  members: fragments of the group; active: chunks of each step"""
    starts, stops = fragments.boundaries[:-1][members], fragments.boundaries[1:][members]
    first = np.concatenate([starts[:n] + (start + i) * CHUNK for i, n in enumerate(active)])
    last = np.concatenate([stops[:n] for n in active]) - 1
    tokens = first[:, None] + np.arange(CHUNK)
    padding = tokens > last[:, None]
    tensors = np.minimum(tokens, last[:, None]).ravel(), padding, np.flatnonzero(~padding)
    on_device = [send(torch.from_numpy(x), device) for x in tensors]
    ends = np.cumsum(active).tolist()
    return Block(
        tokens=on_device[0],
        padding=on_device[1] if padding.any() else None,
        kept=on_device[2] if padding.any() else None,
        steps=tuple(slice(end - n, end) for end, n in zip(ends, active)),
        saved=saved,
    )
