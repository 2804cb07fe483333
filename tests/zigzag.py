"""Zigzag sharding for tests: take a rank's part of an array, put all parts together."""

from collections.abc import Sequence

import numpy as np

from sft.parallel.context_parallel import gathered_positions, local_indices


def shard(x: np.ndarray, cu_seqlens: np.ndarray, cp_size: int, cp_rank: int) -> np.ndarray:
    """The part of `x` that `cp_rank` holds: [t, ...] -> [t / cp_size, ...], a copy.

    x = [5, 6, 7, 8], cu_seqlens = [0, 4], cp_size = 2
    rank 0 -> [5, 8]        rank 1 -> [6, 7]
    """
    assert len(x) == cu_seqlens[-1], f"x has {len(x)} tokens, but cu_seqlens ends at {cu_seqlens[-1]}"
    return x[local_indices(cu_seqlens, cp_size, cp_rank)]


def unshard(parts: Sequence[np.ndarray], cu_seqlens: np.ndarray, cp_size: int) -> np.ndarray:
    """The whole array from all ranks' parts, in rank order: cp_size arrays [t / cp_size, ...] -> [t, ...].

    parts = [5, 8], [6, 7], cu_seqlens = [0, 4], cp_size = 2 -> [5, 6, 7, 8]
    """
    assert len(parts) == cp_size, f"{len(parts)} parts for cp_size = {cp_size}"
    lengths = [len(part) for part in parts]
    expected = int(cu_seqlens[-1]) // cp_size
    assert set(lengths) == {expected}, f"each part must have {expected} tokens; got {lengths}"
    return np.concatenate(parts)[gathered_positions(cu_seqlens, cp_size)]
