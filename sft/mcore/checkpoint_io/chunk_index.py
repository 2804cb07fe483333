"""Which parts of a stored tensor a box of it needs, and whether the parts fill it.

A mixture of experts keeps all its experts under one key, a part for each layer and expert.  torch compares every box
with every part, save for those apart along the longest axis, which here no two are: with 48 layers of 128 experts,
minutes for every save and load.  Here parts are looked up by the axes in front, along which none is longer than 1.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


class Parts:
    """The parts of the tensor `key` by their place in the stack of layers and experts."""

    def __init__(self, key: str, entry: TensorStorageMetadata) -> None:
        self._key, self._entry = key, entry
        chunks, num_axes = entry.chunks, len(entry.size)
        wide = (axis for axis in range(num_axes) if any(chunk.sizes[axis] != 1 for chunk in chunks))
        self._depth = next(wide, num_axes)
        self._at: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
        for chunk in chunks:
            self._at.setdefault(tuple(chunk.offsets[: self._depth]), []).append(chunk)

    def items(self, boxes: Sequence[ChunkStorageMetadata]) -> list[ReadItem]:
        """What to read for each of the boxes; `dest_index.index` says for which."""
        found = []
        for number, box in enumerate(boxes):
            near = replace(self._entry, chunks=self._near(box))
            for item in create_read_items_for_chunk_list(self._key, near, [box]):
                found.append(replace(item, dest_index=replace(item.dest_index, index=number)))
        return found

    def fault(self) -> str:
        """What is wrong with the parts; empty where every element of the tensor is in exactly one."""
        size, chunks = self._entry.size, self._entry.chunks
        for chunk in chunks:
            if any(o < 0 or o + n > end for o, n, end in zip(chunk.offsets, chunk.sizes, size, strict=True)):
                return f"{self._key} {tuple(size)} has a part outside of it: {chunk}"
        for near in self._at.values():
            if both := self._overlapping(near):
                return f"{self._key} has parts that overlap: {both[0]} and {both[1]}"
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
            return f"{self._key} {tuple(size)} is not whole"
        return ""

    def _overlapping(self, near: list[ChunkStorageMetadata]) -> tuple[ChunkStorageMetadata, ...]:
        """Two that do, or none.  Each is compared with those that do not end before it along the first wide axis."""
        axis, before = self._depth, []  # type: int, list[ChunkStorageMetadata]
        for one in sorted(near, key=lambda chunk: tuple(chunk.offsets)):
            if axis < len(one.offsets):
                before = [other for other in before if other.offsets[axis] + other.sizes[axis] > one.offsets[axis]]
            if found := next((other for other in before if _overlap(one, other)), None):
                return found, one
            before.append(one)
        return ()

    def _near(self, box: ChunkStorageMetadata) -> list[ChunkStorageMetadata]:
        """All that the box can overlap, and perhaps some more."""
        if any(size != 1 for size in box.sizes[: self._depth]):
            return self._entry.chunks
        return self._at.get(tuple(box.offsets[: self._depth]), [])


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + length_b and b < a + length_a
        for a, length_a, b, length_b in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
