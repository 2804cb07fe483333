"""The chunks of a stored tensor that a box needs, and the faults of chunks that do not fill the box."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from sft.errors import CheckpointError
from sft.mcore.checkpoint_io import chunk_index
from sft.mcore.checkpoint_io.chunk_index import ChunkIndex
from sft.weights.torch_dist import TorchDistReader, TorchDistWriter
from tests.unit.fixtures.calls import calls


def chunk(offset: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(sizes))


def parts(size: tuple[int, ...], *chunks: ChunkStorageMetadata) -> ChunkIndex:
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), list(chunks))
    return ChunkIndex("a", entry)


def experts(rows: int = 2) -> list[ChunkStorageMetadata]:
    """Two layers of three experts of [4, 2]; each expert is stored in chunks of `rows` rows."""
    where = [(layer, expert, row, 0) for layer in (1, 0) for expert in (2, 0, 1) for row in range(4 - rows, -1, -rows)]
    return [chunk(offset, (1, 1, rows, 2)) for offset in where]


def told(found: list[Any]) -> list[tuple[Any, ...]]:
    """For each piece: number of the box, and offset in it; offset of the chunk, and offset in it; size."""
    return [
        (
            item.dest_index.index,
            tuple(item.dest_offsets),
            tuple(item.storage_index.offset),
            tuple(item.storage_offsets),
            tuple(item.lengths),
        )
        for item in found
    ]


def test_a_box_of_each_of_two_experts() -> None:
    boxes = [chunk((1, 2, 1, 0), (1, 1, 2, 2)), chunk((0, 1, 0, 1), (1, 1, 2, 1))]
    found = parts((2, 3, 4, 2), *experts()).read_items(boxes)
    assert sorted(told(found)) == [
        (0, (0, 0, 0, 0), (1, 2, 0, 0), (0, 0, 1, 0), (1, 1, 1, 2)),
        (0, (0, 0, 1, 0), (1, 2, 2, 0), (0, 0, 0, 0), (1, 1, 1, 2)),
        (1, (0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1), (1, 1, 2, 1)),
    ]
    assert {tuple(item.dest_index.offset) for item in found} == {(1, 2, 1, 0), (0, 1, 0, 1)}


@pytest.mark.parametrize("last", [1, 2])
def test_a_box_of_several_layers_and_experts(last: int) -> None:
    """The box covers both layers, and the experts from the second to `last`."""
    found = parts((2, 3, 4, 2), *experts(4)).read_items([chunk((0, 1, 0, 0), (2, last, 4, 2))])
    assert sorted(told(found)) == [
        (0, (layer, expert - 1, 0, 0), (layer, expert, 0, 0), (0, 0, 0, 0), (1, 1, 4, 2))
        for layer in (0, 1)
        for expert in range(1, last + 1)
    ]


def test_a_part_of_several_layers() -> None:
    found = parts((4, 2), chunk((0, 0), (3, 2)), chunk((3, 0), (1, 2))).read_items([chunk((2, 1), (1, 1))])
    assert told(found) == [(0, (0, 0), (0, 0), (2, 1), (1, 1))]


def test_no_box_is_compared_with_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing thousands of boxes with thousands of chunks each would take minutes."""
    seen = []

    def compare(key: str, entry: Any, boxes: Any) -> Any:
        seen.append((len(entry.chunks), len(boxes)))
        return create_read_items_for_chunk_list(key, entry, boxes)

    monkeypatch.setattr(chunk_index, "create_read_items_for_chunk_list", compare)
    assert len(parts((2, 3, 4, 2), *experts()).read_items(experts(4))) == 12
    assert seen == [(2, 1)] * 6


@pytest.mark.parametrize(
    "size,chunks,fault",
    [
        ((2, 3, 4, 2), experts(), ""),
        ((2, 3, 4, 2), experts(4), ""),
        ((4, 2), [chunk((0, 0), (3, 2)), chunk((3, 0), (1, 2))], ""),
        ((), [chunk((), ())], ""),
        ((2, 3, 4, 2), experts()[:-1], r"^a \(2, 3, 4, 2\) lacks chunks$"),
        ((4, 2), [], r"^a \(4, 2\) lacks chunks$"),
        ((2, 3, 4, 2), [*experts(), experts(4)[0]], "^a has chunks that overlap: "),
        ((4, 2), [chunk((0, 0), (3, 2)), chunk((2, 0), (1, 2))], "^a has chunks that overlap: "),
        ((2,), [chunk((0,), (1,)), chunk((0,), (1,))], "^a has chunks that overlap: "),
        ((4, 3), [chunk((0, 0), (4, 2)), chunk((1, 2), (3, 1)), chunk((3, 1), (1, 1))], "^a has chunks that overlap: "),
        ((4, 2), [chunk((0, 0), (3, 2)), chunk((3, 0), (2, 2))], r"^a \(4, 2\) has a chunk outside its shape: "),
    ],
)
def test_parts_fill_the_tensor_or_not(size: tuple[int, ...], chunks: list[ChunkStorageMetadata], fault: str) -> None:
    assert re.search(fault or "^$", parts(size, *chunks).fault())


def pinwheel(count: int) -> list[ChunkStorageMetadata]:
    """Five chunks of a tensor [3, 3 * count] that no straight cut separates, `count` times side by side."""
    five = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    return [chunk((row, column + 3 * i), sizes) for i in range(count) for (row, column), sizes in five]


def test_chunks_that_no_cut_separates_are_compared_in_pairs() -> None:
    assert parts((3, 9), *pinwheel(3)).fault() == ""
    assert "overlap" in parts((3, 9), *pinwheel(3)[:-1], chunk((1, 6), (1, 1))).fault()
    [item] = parts((3, 9), *pinwheel(3)).read_items([chunk((1, 4), (1, 1))])
    assert tuple(item.storage_index.offset) == (1, 4)


def test_chunks_without_elements_hold_and_overlap_nothing() -> None:
    index = parts((4, 2), *[chunk((1, 1), (2, 0))] * 2000, chunk((0, 0), (4, 2)))
    assert index.fault() == ""
    assert len(index.read_items([chunk((1, 0), (2, 2))])) == 1


def test_many_chunks_that_overlap_are_refused_before_they_are_compared() -> None:
    assert "overlap" in parts((4, 2), *[chunk((0, 0), (4, 2))] * 1000).fault()
    with pytest.raises(
        CheckpointError, match=r"a \(4, 2\) has 1,001 chunks that overlap or form no grid; at most 1,000"
    ):
        parts((4, 2), *[chunk((0, 0), (4, 2))] * 1001)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_work_grows_with_the_number_of_chunks(axis: int) -> None:
    """Rows or columns, all of which are read: ten times as many chunks need ten times the calls."""

    def work(count: int) -> int:
        sizes = [(2, 1) if axis else (1, 2) for _ in range(count)]
        chunks = [chunk((0, i) if axis else (i, 0), size) for i, size in enumerate(sizes)]

        def read() -> None:
            index = parts((2, count) if axis else (count, 2), *chunks)
            assert index.fault() == "" and len(index.read_items(chunks)) == count

        return calls(read)

    few, more = work(40), work(400)
    assert more < 11 * few


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    writer = TorchDistWriter(tmp_path)
    writer.write_chunk("a", (4, 2), (0, 0), torch.ones(2, 2))
    writer.finish()
    assert TorchDistReader(tmp_path).read("a", (1, 0), (1, 2)).tolist() == [[1.0, 1.0]]
    with pytest.raises(CheckpointError, match="chunks of a are missing"):
        TorchDistReader(tmp_path).read("a", (0, 0), (4, 2))
