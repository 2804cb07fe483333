"""Assigns the tokens of a pack to context-parallel (CP) ranks.  Index arithmetic in numpy, without torch.

In causal attention, late queries attend to more keys than early ones.  So every document is cut into 2 * cp chunks of
equal length, and rank r holds chunks r and 2 * cp - 1 - r (zigzag).  Then all ranks compute equally many (query, key)
pairs:

    one document, cp = 4        chunk     0 1 2 3 4 5 6 7
                                on rank   0 1 2 3 3 2 1 0

    two documents of 8 and 4 tokens, cp = 2, cu_seqlens = [0, 8, 12]

    pack      a0 a1 a2 a3 a4 a5 a6 a7 | b0 b1 b2 b3
    rank 0    a0 a1             a6 a7 | b0       b3    -> a0 a1 a6 a7 b0 b3
    rank 1          a2 a3 a4 a5       |    b1 b2       -> a2 a3 a4 a5 b1 b2

A rank holds its parts of the documents in the order of the pack: of each document, the early chunk and then the late
chunk.  Transformer Engine and the backends in sft/mcore/attention expect packed (THD) input in this order.
Megatron-core and zigzag ring attention (Zhu, 2024) assign tokens in the same way.

`cu_seqlens` are the padded boundaries of the whole pack (see `batch.Pack`).  With cp > 1, the number of tokens of every
document is a multiple of 2 * cp.  Documents may be empty.
"""

from dataclasses import dataclass

import numpy as np


def local_indices(cu_seqlens: np.ndarray, cp_size: int, cp_rank: int) -> np.ndarray:
    """Position in the pack of each token that `cp_rank` holds, in local order: int64 [t / cp_size].

    cu_seqlens = [0, 8], cp_size = 2
    rank 0 -> [0, 1, 6, 7]        rank 1 -> [2, 3, 4, 5]
    """
    starts, chunk = document_chunks(cu_seqlens, cp_size)
    assert 0 <= cp_rank < cp_size, f"cp_rank = {cp_rank} is not one of 0..{cp_size - 1}"
    if cp_size == 1:
        return np.arange(cu_seqlens[-1], dtype=np.int64)
    early = starts + cp_rank * chunk
    late = starts + (2 * cp_size - 1 - cp_rank) * chunk
    return runs(np.stack([early, late], axis=1).ravel(), np.repeat(chunk, 2))


def gathered_positions(cu_seqlens: np.ndarray, cp_size: int) -> np.ndarray:
    """Position of each token of the pack in the concatenation of all ranks' local parts: int64 [t].

    This is the inverse of `local_indices`: np.concatenate(parts)[gathered_positions(...)] is the whole pack.

        cu_seqlens = [0, 8], cp_size = 2: the concatenated parts hold the tokens 0 1 6 7 2 3 4 5
        -> [0, 1, 4, 5, 6, 7, 2, 3]
    """
    starts, chunk = document_chunks(cu_seqlens, cp_size)
    if cp_size == 1:
        return np.arange(cu_seqlens[-1], dtype=np.int64)
    part = int(cu_seqlens[-1]) // cp_size
    chunks = np.arange(2 * cp_size)
    rank = np.minimum(chunks, 2 * cp_size - 1 - chunks)
    is_late = chunks >= cp_size
    first = rank * part + starts[:, None] // cp_size + is_late * chunk[:, None]  # [documents, 2 * cp_size]
    return runs(first.ravel(), np.repeat(chunk, 2 * cp_size))


def document_chunks(cu_seqlens: np.ndarray, cp_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The start of every document and the length of its chunks, both int64 [documents].

    Asserts that every document can be cut into equal chunks.
    """
    assert cp_size >= 1, f"cp_size = {cp_size}: there is at least one rank"
    assert cu_seqlens.ndim == 1 and cu_seqlens.size >= 1, f"cu_seqlens has shape {cu_seqlens.shape}"
    assert np.issubdtype(cu_seqlens.dtype, np.integer), f"cu_seqlens are {cu_seqlens.dtype}, not integers"
    assert cu_seqlens[0] == 0, f"cu_seqlens start at {cu_seqlens[0]}, not at 0"
    boundaries = cu_seqlens.astype(np.int64)
    starts, lengths = boundaries[:-1], np.diff(boundaries)
    assert (lengths >= 0).all(), f"cu_seqlens decrease at document {np.argmax(lengths < 0)}"
    ragged = lengths % (2 * cp_size) != 0
    assert cp_size == 1 or not ragged.any(), (
        f"document {np.argmax(ragged)} has {lengths[np.argmax(ragged)]} tokens, not a multiple of "
        f"2 * cp_size = {2 * cp_size}"
    )
    return starts, lengths // (2 * cp_size)


def runs(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Concatenated runs of consecutive integers: run i begins with first[i] and has length[i] integers.

    first = [0, 6], length = [2, 3] -> [0, 1, 6, 7, 8]
    """
    ends = np.cumsum(length)
    offset = np.repeat(first - (ends - length), length)
    return np.add(offset, np.arange(len(offset)), out=offset)


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one document that one rank holds: an early or a late chunk, or with cp 1 the document."""

    local_start: int  # index of the chunk's first token among the rank's tokens
    length: int
    document_start: int  # index of the document's first token in the pack
    position: int  # position of the chunk's first token in the document


def local_chunks(cu_seqlens: np.ndarray, cp_size: int, cp_rank: int) -> tuple[Chunk, ...]:
    """The chunks of `cp_rank` in local order, two per document.  With cp_size 1, each document is one chunk.

    cu_seqlens = [0, 8], cp_size = 2, rank 0 -> Chunk(0, 2, 0, 0), Chunk(2, 2, 0, 6)
    """
    starts, stops = cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()
    if cp_size == 1:
        return tuple(Chunk(start, stop - start, start, 0) for start, stop in zip(starts, stops))
    chunks = []
    for start, stop in zip(starts, stops):
        length, local = (stop - start) // (2 * cp_size), start // cp_size
        chunks.append(Chunk(local, length, start, cp_rank * length))
        chunks.append(Chunk(local + length, length, start, (2 * cp_size - 1 - cp_rank) * length))
    return tuple(chunks)
