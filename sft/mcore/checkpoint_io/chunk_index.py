"""Finds the chunks of a stored tensor that overlap a slice, and checks that the chunks cover the tensor.

A mixture of experts stores all experts under one key, with one chunk for each layer and expert.  torch compares every
slice with every such chunk: with 48 layers of 128 experts, every save and load takes minutes.  This module cuts the
tensor along one axis after another, at coordinates that no chunk crosses, and looks chunks up in the tree of these
cuts.  If the chunks form a grid, each leaf of the tree has one chunk.  So the work grows with the number of chunks and
slices, not with their product.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from sft.errors import CheckpointError

_MOST_LEVELS = 32  # largest number of levels of the tree; a grid needs one for each axis
_MOST_UNCUT = 1000  # largest number of chunks that no cut separates; each pair of such chunks is compared


@dataclass(frozen=True, kw_only=True)
class _Cuts:
    """Groups of chunks along `axis`: group i lies in [starts[i], ends[i]), and groups do not overlap."""

    axis: int
    starts: list[int]
    ends: list[int]
    groups: "list[_Tree]"


_Tree = _Cuts | list[ChunkStorageMetadata]  # a list: chunks that no cut separates, or one chunk


class ChunkIndex:
    """The chunks of the tensor `key`.  Raises CheckpointError if no cut separates more than _MOST_UNCUT chunks."""

    def __init__(self, key: str, entry: TensorStorageMetadata) -> None:
        self._key, self._entry = key, entry
        self._tree = _tree([chunk for chunk in entry.chunks if 0 not in chunk.sizes])
        if uncut := next((chunks for chunks in _lists(self._tree) if len(chunks) > _MOST_UNCUT), None):
            raise CheckpointError(
                f"{key} {tuple(entry.size)} has {len(uncut):,} chunks that overlap or form no grid; at most "
                f"{_MOST_UNCUT:,} are compared with each other."
            )

    def read_items(self, slices: Sequence[ChunkStorageMetadata]) -> list[ReadItem]:
        """The read items of the slices; `dest_index.index` of an item is the number of its slice."""
        items = []
        for number, wanted in enumerate(slices):
            entry = replace(self._entry, chunks=list(_candidates(self._tree, wanted)))
            for item in create_read_items_for_chunk_list(self._key, entry, [wanted]):
                items.append(replace(item, dest_index=replace(item.dest_index, index=number)))
        return items

    def fault(self) -> str:
        """A description of a fault of the chunks; empty if every element of the tensor is in exactly one chunk."""
        size, chunks = self._entry.size, self._entry.chunks
        for chunk in chunks:
            if any(o < 0 or o + n > end for o, n, end in zip(chunk.offsets, chunk.sizes, size, strict=True)):
                return f"{self._key} {tuple(size)} has a chunk outside its shape: {chunk}"
        for uncut in _lists(self._tree):
            if pair := next((pair for pair in combinations(uncut, 2) if _overlap(*pair)), None):
                return f"{self._key} has chunks that overlap: {pair[0]} and {pair[1]}"
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
            return f"{self._key} {tuple(size)} lacks chunks"
        return ""


def _tree(chunks: list[ChunkStorageMetadata], first_axis: int = 0, level: int = 0) -> _Tree:
    num_axes = len(chunks[0].offsets) if len(chunks) > 1 and level < _MOST_LEVELS else 0
    for axis in ((first_axis + turn) % num_axes for turn in range(num_axes)):
        starts, ends, groups = _cut(chunks, axis)
        if len(groups) > 1:
            trees = [_tree(group, axis + 1, level + 1) for group in groups]
            return _Cuts(axis=axis, starts=starts, ends=ends, groups=trees)
    return chunks


def _cut(
    chunks: list[ChunkStorageMetadata], axis: int
) -> tuple[list[int], list[int], list[list[ChunkStorageMetadata]]]:
    """Cut the chunks into groups along `axis`, so that no chunk crosses a cut.

    Returns the starts, the ends and the chunks of all groups.
    """
    starts: list[int] = []
    ends: list[int] = []
    groups: list[list[ChunkStorageMetadata]] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[axis]):
        start, end = chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis]
        if not groups or start >= ends[-1]:
            starts.append(start)
            ends.append(end)
            groups.append([])
        groups[-1].append(chunk)
        ends[-1] = max(ends[-1], end)
    return starts, ends, groups


def _lists(tree: _Tree) -> Iterator[list[ChunkStorageMetadata]]:
    """The lists of chunks that no cut separates."""
    if isinstance(tree, list):
        yield tree
    else:
        for group in tree.groups:
            yield from _lists(group)


def _candidates(tree: _Tree, wanted: ChunkStorageMetadata) -> Iterator[ChunkStorageMetadata]:
    """All chunks that the slice can overlap, and possibly other chunks."""
    if isinstance(tree, list):
        yield from tree
        return
    start = wanted.offsets[tree.axis]
    first, last = bisect_right(tree.ends, start), bisect_left(tree.starts, start + wanted.sizes[tree.axis])
    for group in tree.groups[first:last]:
        yield from _candidates(group, wanted)


def _overlap(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> bool:
    return all(
        start_a < start_b + size_b and start_b < start_a + size_a
        for start_a, size_a, start_b, size_b in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
