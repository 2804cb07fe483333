"""Finds the earlier tokens that a causal convolution reads at the first tokens of a chunk.  In numpy, without torch.

Output t of a convolution with n taps reads the tokens t, t - 1, ..., t - n + 1 of its document.  Inside a chunk these
tokens are the rows before row t.  The edges of a chunk are its first n - 1 rows.  At an edge, some of the tokens are
not in the chunk.  They are earlier in the document, on this or another rank (the halo of `sft/parallel/halo.py` with
window n).  Before a branch (`branches`), they are in its ancestors.  Before a document without a parent, they do not
exist, and the convolution takes zeros.

    documents of 4 and 2 tokens, one rank, 3 taps       rows 0 1 2 3 | 4 5        edges 0, 4, 1, 5
    shift 1   row 1 reads row 0, row 5 reads row 4
    shift 2   no edge reads a token
"""

from dataclasses import dataclass

import numpy as np

from sft.parallel.branches import Branches
from sft.parallel.context_parallel import Chunk, local_chunks
from sft.parallel.halo import Halo


@dataclass(frozen=True, kw_only=True)
class Taps:
    """The tokens that a convolution with n taps reads for one microbatch on one rank.

    boundaries  int64 [chunks + 1]: local row at which each chunk begins, and the number of local rows.  Empty chunks
                are left out
    edges       int64 [edges]: the local rows that are among the first n - 1 rows of their chunk
    rows        for each shift from 1 to n - 1, int64 [k]: the edges whose document or ancestors have a token `shift`
                tokens earlier
    sources     for each shift, int64 [k]: index of this earlier token in concat(local tokens, received tokens)
    halo        the tokens that ranks send each other; None with cp 1
    """

    boundaries: np.ndarray
    edges: np.ndarray
    rows: tuple[np.ndarray, ...]
    sources: tuple[np.ndarray, ...]
    halo: Halo | None

    @staticmethod
    def of(
        cu_seqlens: np.ndarray, num_taps: int, cp_size: int, cp_rank: int, branches: Branches | None = None
    ) -> "Taps":
        """The taps of one rank.  cu_seqlens: padded boundaries of the documents of the whole pack; num_taps: n"""
        halo = None
        chunks = local_chunks(cu_seqlens, cp_size, cp_rank)
        start, length, num_before = _columns(chunks)
        if branches is not None:
            num_before += np.repeat(branches.depths, 1 if cp_size == 1 else 2)
        start, length, num_before = (column[length > 0] for column in (start, length, num_before))
        held, first = np.arange(cu_seqlens[-1], dtype=np.int64), start
        if cp_size > 1 or branches is not None:
            halo = Halo.of(cu_seqlens, num_taps, cp_size, cp_rank, branches)
            held = halo.key_order
            first = np.cumsum(length + halo.num_before) - length  # index in `held` of each chunk's first token
        none, offsets = np.empty(0, dtype=np.int64), range(num_taps - 1)
        rows, sources = [], []
        for shift in range(1, num_taps):
            reads = [(length > offset) & (num_before + offset >= shift) for offset in offsets]
            rows.append(np.concatenate([start[read] + offset for offset, read in zip(offsets, reads)]))
            sources.append(np.concatenate([held[first[read] + offset - shift] for offset, read in zip(offsets, reads)]))
        edges = np.concatenate([none, *(start[length > offset] + offset for offset in offsets)])
        boundaries = np.append(start, length.sum())
        return Taps(
            boundaries=boundaries,
            edges=edges,
            rows=tuple(rows),
            sources=tuple(sources),
            halo=halo if cp_size > 1 else None,
        )


def _columns(chunks: tuple[Chunk, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """local_start, length and position of the chunks, each int64 [chunks]."""
    columns = ([chunk.local_start for chunk in chunks], [c.length for c in chunks], [c.position for c in chunks])
    start, length, position = (np.array(column, dtype=np.int64) for column in columns)
    return start, length, position
