"""The tokens of each rank: sft/parallel/context_parallel.py with small numbers and random packs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sft.parallel import context_parallel


def pack(*lengths: int) -> np.ndarray:
    """cu_seqlens of documents of these lengths, int32 as in `batch.Pack`."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@st.composite
def packs(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Up to 12 documents, also empty ones, whose lengths fit `cp_size` in 1..32.  -> (cu_seqlens, cp_size)"""
    cp_size = draw(st.integers(1, 32))
    multiple = 1 if cp_size == 1 else 2 * cp_size
    chunks = draw(st.lists(st.integers(0, 5), max_size=12))
    return pack(*[n * multiple for n in chunks]), cp_size


@pytest.mark.parametrize(
    "lengths, cp_size, expected",
    [
        ([8], 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ([8, 4], 2, [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]),
        ([4, 0, 4], 2, [[0, 3, 4, 7], [1, 2, 5, 6]]),
        ([0, 16], 4, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        ([3, 2], 1, [[0, 1, 2, 3, 4]]),
        ([], 2, [[], []]),
    ],
)
def test_local_indices(lengths: list[int], cp_size: int, expected: list[list[int]]) -> None:
    for cp_rank, indices in enumerate(expected):
        local = context_parallel.local_indices(pack(*lengths), cp_size, cp_rank)
        assert local.dtype == np.int64
        assert local.tolist() == indices


@pytest.mark.parametrize(
    "lengths, cp_size, expected",
    [
        ([8], 2, [0, 1, 4, 5, 6, 7, 2, 3]),
        ([8, 4], 2, [0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5]),
        ([3, 2], 1, [0, 1, 2, 3, 4]),
    ],
)
def test_gathered_positions(lengths: list[int], cp_size: int, expected: list[int]) -> None:
    positions = context_parallel.gathered_positions(pack(*lengths), cp_size)
    assert positions.dtype == np.int64
    assert positions.tolist() == expected


def test_local_chunks() -> None:
    chunk = context_parallel.Chunk
    assert context_parallel.local_chunks(pack(8, 4), 2, 0) == (
        chunk(local_start=0, length=2, document_start=0, position=0),
        chunk(local_start=2, length=2, document_start=0, position=6),
        chunk(local_start=4, length=1, document_start=8, position=0),
        chunk(local_start=5, length=1, document_start=8, position=3),
    )
    assert context_parallel.local_chunks(pack(3, 2), 1, 0) == (chunk(0, 3, 0, 0), chunk(3, 2, 3, 0))


@given(packs())
def test_any_pack(case: tuple[np.ndarray, int]) -> None:
    """Ranks share all tokens, each holds its zigzag chunks in order, and all have the same amount of attention."""
    cu_seqlens, cp_size = case
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    owner = np.full(cu_seqlens[-1], -1)
    areas = set()
    for cp_rank in range(cp_size):
        held = context_parallel.local_indices(cu_seqlens, cp_size, cp_rank)
        assert len(held) == cu_seqlens[-1] // cp_size and (np.diff(held) > 0).all()
        owner[held] = cp_rank
        by_chunks: list[int] = []
        for chunk in context_parallel.local_chunks(cu_seqlens, cp_size, cp_rank):
            assert chunk.local_start == len(by_chunks)
            first = chunk.document_start + chunk.position
            by_chunks.extend(range(first, first + chunk.length))
        assert by_chunks == held.tolist()
        # number of keys to which the rank's queries attend
        areas.add(int((held - np.repeat(starts, lengths)[held] + 1).sum()))
    up_and_down = [*range(cp_size), *reversed(range(cp_size))]
    for start, length in zip(starts, lengths, strict=True):
        chunk_length = -(-length // (2 * cp_size))  # rounded up: with cp 1, lengths may be odd
        expected = [rank for rank in up_and_down for _ in range(chunk_length)]
        assert owner[start : start + length].tolist() == expected[:length]
    assert len(areas) == 1


@pytest.mark.parametrize(
    "cu_seqlens, cp_size, cp_rank, message",
    [
        ([0, 8, 14], 2, 0, "document 1 has 6 tokens, not a multiple of 2 \\* cp_size = 4"),
        ([0, 8, 4], 2, 0, "cu_seqlens decrease at document 1"),
        ([4, 8], 2, 0, "cu_seqlens start at 4, not at 0"),
        ([0, 8], 2, 2, "cp_rank = 2 is not one of 0..1"),
        ([[0, 8]], 2, 0, "cu_seqlens has shape \\(1, 2\\)"),
    ],
)
def test_what_cannot_be_is_asserted(cu_seqlens: list, cp_size: int, cp_rank: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        context_parallel.local_indices(np.array(cu_seqlens), cp_size, cp_rank)
