"""Which token lives on which rank: sft/parallel/context_parallel.py, on small numbers and on random packs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sft.parallel import context_parallel
from tests.zigzag import causal_area, shard, unshard


def pack(*lengths: int) -> np.ndarray:
    """cu_seqlens of documents of these lengths, int32 as in `batch.Pack`."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@st.composite
def packs(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Up to 12 documents (empty ones too) that `cp_size` in 1..32 can cut.  -> (cu_seqlens, cp_size)"""
    cp_size = draw(st.integers(1, 32))
    multiple = 1 if cp_size == 1 else 2 * cp_size
    chunks = draw(st.lists(st.integers(0, 5), max_size=12))
    return pack(*[n * multiple for n in chunks]), cp_size


# --- the answer, written out -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths, cp_size, expected",
    [
        ([8], 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ([4], 2, [[0, 3], [1, 2]]),
        ([8, 4], 2, [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]),
        ([4, 0, 4], 2, [[0, 3, 4, 7], [1, 2, 5, 6]]),
        ([8], 4, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ([0, 16], 4, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        ([6], 3, [[0, 5], [1, 4], [2, 3]]),
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
        ([8], 4, [0, 2, 4, 6, 7, 5, 3, 1]),
        ([3, 2], 1, [0, 1, 2, 3, 4]),
    ],
)
def test_gathered_positions(lengths: list[int], cp_size: int, expected: list[int]) -> None:
    positions = context_parallel.gathered_positions(pack(*lengths), cp_size)
    assert positions.dtype == np.int64
    assert positions.tolist() == expected


def test_shard_and_unshard_follow_the_first_axis() -> None:
    hidden = np.array([[50, 51], [60, 61], [70, 71], [80, 81]])
    parts = [shard(hidden, pack(4), 2, cp_rank) for cp_rank in range(2)]
    assert parts[0].tolist() == [[50, 51], [80, 81]]
    assert parts[1].tolist() == [[60, 61], [70, 71]]
    assert unshard(parts, pack(4), 2).tolist() == hidden.tolist()


def test_local_chunks() -> None:
    chunk = context_parallel.Chunk
    assert context_parallel.local_chunks(pack(8, 4), 2, 0) == (
        chunk(local_start=0, length=2, document_start=0, position=0),
        chunk(local_start=2, length=2, document_start=0, position=6),
        chunk(local_start=4, length=1, document_start=8, position=0),
        chunk(local_start=5, length=1, document_start=8, position=3),
    )
    assert context_parallel.local_chunks(pack(3, 2), 1, 0) == (chunk(0, 3, 0, 0), chunk(3, 2, 3, 0))


def test_causal_area() -> None:
    # 8 tokens see 1..8 keys: 36 pairs, 18 on each of two ranks; 4 more tokens see 1..4 keys: 5 more on each.
    assert [causal_area(pack(8), 1, 0)] == [36]
    assert [causal_area(pack(8), 2, r) for r in range(2)] == [18, 18]
    assert [causal_area(pack(8, 4), 2, r) for r in range(2)] == [23, 23]
    assert [causal_area(pack(8), 4, r) for r in range(4)] == [9, 9, 9, 9]


def test_causal_area_of_a_million_tokens_does_not_overflow() -> None:
    assert causal_area(pack(1_048_576), 8, 3) == 1_048_576 * 1_048_577 // 2 // 8


# --- the properties, on random packs -----------------------------------------------------------------------


@given(packs())
def test_shard_then_unshard_is_the_identity(case: tuple[np.ndarray, int]) -> None:
    cu_seqlens, cp_size = case
    x = np.random.default_rng(0).normal(size=(cu_seqlens[-1], 2))
    parts = [shard(x, cu_seqlens, cp_size, cp_rank) for cp_rank in range(cp_size)]
    assert np.array_equal(unshard(parts, cu_seqlens, cp_size), x)


@given(packs())
def test_ranks_partition_the_tokens(case: tuple[np.ndarray, int]) -> None:
    cu_seqlens, cp_size = case
    parts = [context_parallel.local_indices(cu_seqlens, cp_size, cp_rank) for cp_rank in range(cp_size)]
    assert {len(part) for part in parts} == {cu_seqlens[-1] // cp_size}
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(cu_seqlens[-1]))


@given(packs())
def test_each_token_is_on_the_rank_of_its_chunk(case: tuple[np.ndarray, int]) -> None:
    cu_seqlens, cp_size = case
    owner = np.empty(cu_seqlens[-1], dtype=int)
    for cp_rank in range(cp_size):
        owner[context_parallel.local_indices(cu_seqlens, cp_size, cp_rank)] = cp_rank
    up_and_down = [*range(cp_size), *reversed(range(cp_size))]
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        chunk = -(-(end - start) // (2 * cp_size))  # rounded up: a single rank takes odd lengths too
        expected = [rank for rank in up_and_down for _ in range(chunk)]
        assert owner[start:end].tolist() == expected[: end - start]


@given(packs())
def test_local_parts_keep_the_order_of_the_pack(case: tuple[np.ndarray, int]) -> None:
    cu_seqlens, cp_size = case
    for cp_rank in range(cp_size):
        assert (np.diff(context_parallel.local_indices(cu_seqlens, cp_size, cp_rank)) > 0).all()


@given(packs())
def test_local_chunks_are_the_local_indices(case: tuple[np.ndarray, int]) -> None:
    cu_seqlens, cp_size = case
    for cp_rank in range(cp_size):
        held: list[int] = []
        for chunk in context_parallel.local_chunks(cu_seqlens, cp_size, cp_rank):
            assert chunk.local_start == len(held)
            first = chunk.document_start + chunk.position
            held.extend(range(first, first + chunk.length))
        assert held == context_parallel.local_indices(cu_seqlens, cp_size, cp_rank).tolist()


@given(packs())
def test_ranks_have_equal_causal_area(case: tuple[np.ndarray, int]) -> None:
    cu_seqlens, cp_size = case
    areas = {causal_area(cu_seqlens, cp_size, cp_rank) for cp_rank in range(cp_size)}
    lengths = np.diff(cu_seqlens.astype(np.int64))
    assert areas == {int((lengths * (lengths + 1) // 2).sum()) // cp_size}


# --- what the data path builds on it -----------------------------------------------------------------------


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_labels_are_the_next_token_also_at_chunk_boundaries(cp_size: int) -> None:
    """Labels shifted in the whole pack, then sharded, equal the shifted pack again (pitfall P03)."""
    cu_seqlens = pack(16, 48, 32)
    tokens = np.arange(1000, 1096)
    labels = np.array([*range(1001, 1016), 0, *range(1017, 1064), 0, *range(1065, 1096), 0])
    token_parts = [shard(tokens, cu_seqlens, cp_size, r) for r in range(cp_size)]
    label_parts = [shard(labels, cu_seqlens, cp_size, r) for r in range(cp_size)]
    for local_tokens, local_labels in zip(token_parts, label_parts, strict=True):
        is_last = local_labels == 0
        assert np.array_equal(local_labels[~is_last], local_tokens[~is_last] + 1)
        assert set(local_tokens[is_last]) <= {1015, 1063, 1095}
    assert np.array_equal(unshard(label_parts, cu_seqlens, cp_size), labels)


def test_labels_at_a_chunk_boundary_written_out() -> None:
    labels = np.array([11, 12, 13, 14, 15, 16, 17, 0])  # of tokens 10..17
    assert shard(labels, pack(8), 2, 0).tolist() == [11, 12, 17, 0]  # 12 is a token of rank 1
    assert shard(labels, pack(8), 2, 1).tolist() == [13, 14, 15, 16]  # 16 is a token of rank 0


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_position_ids_restart_in_each_document(cp_size: int) -> None:
    """Position ids, sharded and re-assembled, count from 0 in each document (pitfall P13)."""
    cu_seqlens = pack(16, 48, 32)
    position_ids = np.array([*range(16), *range(48), *range(32)])
    parts = [shard(position_ids, cu_seqlens, cp_size, r) for r in range(cp_size)]
    assert np.array_equal(unshard(parts, cu_seqlens, cp_size), position_ids)


def test_position_ids_of_each_rank_written_out() -> None:
    position_ids = np.array([*range(8), *range(8)])
    assert shard(position_ids, pack(8, 8), 2, 0).tolist() == [0, 1, 6, 7, 0, 1, 6, 7]
    assert shard(position_ids, pack(8, 8), 2, 1).tolist() == [2, 3, 4, 5, 2, 3, 4, 5]


# --- what cannot be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cu_seqlens, cp_size, cp_rank, message",
    [
        ([0, 8, 14], 2, 0, "document 1 has 6 tokens, not a multiple of 2 \\* cp_size = 4"),
        ([0, 8, 4], 2, 0, "cu_seqlens decrease at document 1"),
        ([4, 8], 2, 0, "cu_seqlens start at 4, not at 0"),
        ([0, 8], 2, 2, "cp_rank = 2 is not one of 0..1"),
        ([0, 8], 2, -1, "cp_rank = -1 is not one of 0..1"),
        ([0, 8], 0, 0, "cp_size = 0"),
        ([[0, 8]], 2, 0, "cu_seqlens has shape \\(1, 2\\)"),
        ([0.0, 8.0], 2, 0, "cu_seqlens are float64, not integers"),
    ],
)
def test_what_cannot_be_is_asserted(cu_seqlens: list, cp_size: int, cp_rank: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        context_parallel.local_indices(np.array(cu_seqlens), cp_size, cp_rank)


def test_lengths_that_disagree_are_asserted() -> None:
    with pytest.raises(AssertionError, match="x has 7 tokens, but cu_seqlens ends at 8"):
        shard(np.zeros(7), pack(8), 2, 0)
    with pytest.raises(AssertionError, match="1 parts for cp_size = 2"):
        unshard([np.zeros(4)], pack(8), 2)
    with pytest.raises(AssertionError, match="each part must have 4 tokens; got \\[4, 3\\]"):
        unshard([np.zeros(4), np.zeros(3)], pack(8), 2)
