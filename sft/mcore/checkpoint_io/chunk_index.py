"""Finds the chunks of a stored tensor that overlap a slice, and checks that the chunks cover the tensor.

A mixture of experts stores all experts under one key, with one chunk for each layer and expert.  torch compares every
slice with every such chunk: with 48 layers of 128 experts, every save and load takes minutes.  This module looks chunks
up by the leading axes, along which all chunks have size 1.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


class ChunkIndex:
    """The chunks of the tensor `key`, indexed by their offsets along the axes of layers and experts."""

    def __init__(self, key: str, entry: TensorStorageMetadata) -> None:
        self._key, self._entry = key, entry
        chunks, num_axes = entry.chunks, len(entry.size)
        long_axes = (axis for axis in range(num_axes) if any(chunk.sizes[axis] != 1 for chunk in chunks))
        self._depth = next(long_axes, num_axes)
        self._by_offset: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
        for chunk in chunks:
            self._by_offset.setdefault(tuple(chunk.offsets[: self._depth]), []).append(chunk)

    def read_items(self, slices: Sequence[ChunkStorageMetadata]) -> list[ReadItem]:
        """The read items of the slices; `dest_index.index` of an item is the number of its slice."""
        items = []
        for number, wanted in enumerate(slices):
            entry = replace(self._entry, chunks=self._candidates(wanted))
            for item in create_read_items_for_chunk_list(self._key, entry, [wanted]):
                items.append(replace(item, dest_index=replace(item.dest_index, index=number)))
        return items

    def fault(self) -> str:
        """What is wrong with the chunks; empty if every element of the tensor is in exactly one chunk."""
        size, chunks = self._entry.size, self._entry.chunks
        for chunk in chunks:
            if any(o < 0 or o + n > end for o, n, end in zip(chunk.offsets, chunk.sizes, size, strict=True)):
                return f"{self._key} {tuple(size)} has a chunk outside its shape: {chunk}"
        for neighbours in self._by_offset.values():
            if overlapping := self._overlapping(neighbours):
                return f"{self._key} has chunks that overlap: {overlapping[0]} and {overlapping[1]}"
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
            return f"{self._key} {tuple(size)} lacks chunks"
        return ""

    def _overlapping(self, chunks: list[ChunkStorageMetadata]) -> tuple[ChunkStorageMetadata, ...]:
        """Two chunks that overlap, or ().  Skips pairs that are disjoint along the first axis longer than 1."""
        axis, open_chunks = self._depth, []  # type: int, list[ChunkStorageMetadata]
        for chunk in sorted(chunks, key=lambda chunk: tuple(chunk.offsets)):
            if axis < len(chunk.offsets):
                start = chunk.offsets[axis]
                open_chunks = [other for other in open_chunks if other.offsets[axis] + other.sizes[axis] > start]
            if match := next((other for other in open_chunks if _overlap(chunk, other)), None):
                return match, chunk
            open_chunks.append(chunk)
        return ()

    def _candidates(self, wanted: ChunkStorageMetadata) -> list[ChunkStorageMetadata]:
        """All chunks that the slice can overlap, and possibly other chunks."""
        if any(size != 1 for size in wanted.sizes[: self._depth]):
            return self._entry.chunks
        return self._by_offset.get(tuple(wanted.offsets[: self._depth]), [])


def _overlap(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> bool:
    return all(
        start_a < start_b + size_b and start_b < start_a + size_a
        for start_a, size_a, start_b, size_b in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
