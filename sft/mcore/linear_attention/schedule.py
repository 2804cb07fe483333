"""In which order torch_kernel.py computes the chunks of a rank's fragments.

Every fragment is cut into chunks of 64 tokens; the last one may be shorter.  Chunks of one fragment depend on each
other, chunks of different fragments do not.  So step i computes the chunk i of many fragments at once:

    lengths 200, 64 and 130          step     0 1 2 3
                                     200      x x x x
                                     130      x x x
                                      64      x

A group is a set of fragments of similar length, the longest first, so that the fragments of a step are always the first
ones of the group.  A block is a run of steps of one group, and the unit of all products that do not depend on a state.
Which fragments and steps are computed together depends on lengths alone, so a document's numbers do not depend on the
tokens of other documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sft.mcore.device import send
from sft.mcore.linear_attention.delta_rule import Fragments

CHUNK = 64  # tokens whose updates of the state become matrix products, as in transformers
INTERVAL = 8  # steps of a block.  Forward saves the state at the start of each block but the first
BLOCK_CHUNKS = 512  # chunks times heads of a block with several fragments


@dataclass(frozen=True, eq=False)
class Block:
    """Some steps of a group, with n chunks.

    tokens   int64 [n * CHUNK], step by step.  Where a chunk is shorter, its last token is repeated
    padding  bool [n, CHUNK], true for the repeated tokens; None: there are none
    kept     int64, indices of all other tokens among the n * CHUNK; None: all
    steps    of each step its chunks among the n chunks; their number never increases
    saved    where the states at the start of the block are among the saved ones; None: it is the group's first block
    """

    tokens: Tensor
    padding: Tensor | None
    kept: Tensor | None
    steps: tuple[slice, ...]
    saved: slice | None


@dataclass(frozen=True, eq=False)
class Group:
    """Fragments whose chunks are computed at once; all are linked, or none is.

    linked: int64 [num_fragments], of each fragment its index among the linked ones; None: they are not linked
    """

    num_fragments: int
    linked: Tensor | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class ChunkSchedule:
    """The chunks of all fragments of a microbatch.  num_saved: states that forward saves at starts of blocks"""

    fragments: Fragments
    groups: tuple[Group, ...]
    num_saved: int

    @staticmethod
    def of(fragments: Fragments, heads: int, device: torch.device) -> "ChunkSchedule":
        """heads: value heads of this rank"""
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
    """The fragments of each group, longest first."""
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
    """The block with the steps `start`, `start` + 1, ...  active: number of chunks of each step"""
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
