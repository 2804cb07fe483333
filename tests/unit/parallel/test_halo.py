"""The keys that a rank needs from other ranks in a layer with a sliding window, compared with sets of positions."""

import numpy as np
import pytest

from sft.layers.traffic import halo_tokens
from sft.parallel.branches import Branches
from sft.parallel.context_parallel import local_indices
from sft.parallel.fragments import boundaries
from sft.parallel.halo import Halo
from tests.trees import random_tree, rows_before

PACKS = ([12], [8], [24, 24, 48], [48, 0, 24, 72], [240], [24] * 7 + [120])
WINDOWS = (1, 2, 3, 5, 8, 9, 13, 40, 1000)


def needed(cu_seqlens: np.ndarray, window: int, positions: np.ndarray) -> set[int]:
    """All keys of the pack to which the queries at these positions attend."""
    keys: set[int] = set()
    for position in positions.tolist():
        document = max(start for start in cu_seqlens.tolist() if start <= position)
        keys |= set(range(max(document, position - window + 1), position + 1))
    return keys


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_ranks_exchange_exactly_the_keys_that_they_lack(cp_size: int, window: int) -> None:
    for lengths in PACKS:
        lengths = [length - length % (2 * cp_size) for length in lengths]
        cu_seqlens = boundaries(np.array(lengths)).astype(np.int32)
        local = [local_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)]
        halos = [Halo.of(cu_seqlens, window, cp_size, rank) for rank in range(cp_size)]
        boxes = [np.split(local[r][halos[r].send], np.cumsum(halos[r].num_sent)[:-1]) for r in range(cp_size)]
        total = 0
        for rank, halo in enumerate(halos):
            received = np.concatenate([boxes[other][rank] for other in range(cp_size)])
            assert [len(boxes[other][rank]) for other in range(cp_size)] == halo.num_received
            lacking = needed(cu_seqlens, window, local[rank]) - set(local[rank].tolist())
            assert sorted(received.tolist()) == sorted(lacking)  # each key once
            keys, at = np.concatenate([local[rank], received])[halo.key_order], 0
            for chunk, before in zip(halo.chunks, halo.num_before.tolist(), strict=True):
                first = chunk.document_start + chunk.position
                expected = list(range(first - before, first + chunk.length))
                assert keys[at : at + len(expected)].tolist() == expected
                assert before == min(window - 1, chunk.position)
                at += len(expected)
            assert at == len(keys)
            total += len(received)
        assert total == halo_tokens(np.array(lengths), window, cp_size).sum()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_keys_before_a_branch(cp_size: int, window: int) -> None:
    """Branches behind the same tokens need them, too; a rank receives each of them once."""
    for seed in range(4):
        cu_seqlens, branches = random_tree(seed, multiple=2 * cp_size)
        local = [local_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)]
        halos = [Halo.of(cu_seqlens, window, cp_size, rank, branches) for rank in range(cp_size)]
        boxes = [np.split(local[r][halos[r].send], np.cumsum(halos[r].num_sent)[:-1]) for r in range(cp_size)]
        for rank, halo in enumerate(halos):
            received = np.concatenate([boxes[other][rank] for other in range(cp_size)])
            assert [len(boxes[other][rank]) for other in range(cp_size)] == halo.num_received
            keys, expected = np.concatenate([local[rank], received])[halo.key_order].tolist(), list[int]()
            for chunk, num_before in zip(halo.chunks, halo.num_before.tolist(), strict=True):
                document = int(np.searchsorted(cu_seqlens, chunk.document_start))
                first = chunk.document_start + chunk.position
                path = [*rows_before(cu_seqlens, branches, document), *range(chunk.document_start, first)]
                before = path[max(0, len(path) - window + 1) :]
                assert num_before == len(before)
                expected += [*before, *range(first, first + chunk.length)]
            assert keys == expected
            assert sorted(received.tolist()) == sorted({*expected} - {*local[rank].tolist()})


def test_the_example_of_a_branch() -> None:
    halo = Halo.of(np.array([0, 8, 12]), 5, 1, 0, Branches.of([-1, 0], [0, 5]))
    assert halo.num_before.tolist() == [0, 4] and halo.key_order.tolist() == [*range(8), 1, 2, 3, 4, 8, 9, 10, 11]


def test_the_example_of_the_module() -> None:
    ranks = [Halo.of(np.array([0, 12]), 3, 3, rank) for rank in range(3)]
    assert [halo.num_received for halo in ranks] == [[0, 2, 0], [2, 0, 2], [0, 2, 0]]
    assert [halo.num_sent for halo in ranks] == [[0, 2, 0], [2, 0, 2], [0, 2, 0]]
    assert ranks[0].send.tolist() == [0, 1] and ranks[1].send.tolist() == [2, 3, 0, 1]
    # with the exchange 2 3 | 4 5, and without it 4 5 | 6 7
    assert ranks[2].key_order.tolist() == [4, 5, 0, 1, 0, 1, 2, 3]
    assert halo_tokens(np.array([12]), 3, 3) == 8 and halo_tokens(np.array([12]), 3, 1) == 0


def test_tokens_exchanged_follow_the_window_and_not_the_length() -> None:
    """64K tokens on cp 4, window 128: six of eight chunks have a neighbour chunk on another rank; the first chunk has
    none before it."""
    assert halo_tokens(np.array([65536, 131072]), 128, 4).tolist() == [6 * 127, 6 * 127]
