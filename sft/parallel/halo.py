"""Decides which keys of other ranks a rank needs in a layer with a sliding window.  In numpy, without torch.

A token attends to itself and to the `window` - 1 tokens before it in its document.  So the queries of a chunk
(`context_parallel`) need the keys of the chunk, and at most window - 1 keys before it: its halo.

    one document of 12 tokens, cp = 3, window 3        tokens of chunks   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11
                                                       on rank              0     1     2     2     1      0
    rank 0 receives the keys of tokens 8 9, rank 1 those of 0 1 and 6 7, rank 2 those of 2 3

Ranks exchange these keys by one all-to-all.  A rank receives each key once, even if both of its chunks need it.  The
number of bytes is proportional to the number of chunks and to the window, not to the length of the pack.
"""

from dataclasses import dataclass

import numpy as np

from sft.parallel.context_parallel import Chunk, document_chunks, local_chunks, local_indices, runs


@dataclass(frozen=True, kw_only=True)
class Halo:
    """Tokens that one rank sends and receives for one microbatch, and the keys that its chunks need.

    send          int64, indices of local tokens: first the tokens for rank 0, then the tokens for rank 1, ...
    num_sent      number of tokens for each rank
    num_received  number of tokens from each rank; tokens arrive in order of rank
    chunks        the rank's chunks that have tokens
    num_before    int64 [chunks], number of keys that the chunk needs before its first token
    key_order     int64: concat(local tokens, received tokens)[key_order] are the keys that the chunks need, one chunk
                  after the other: first the keys before the chunk, then the keys of the chunk
    """

    send: np.ndarray
    num_sent: list[int]
    num_received: list[int]
    chunks: tuple[Chunk, ...]
    num_before: np.ndarray
    key_order: np.ndarray

    @staticmethod
    def of(cu_seqlens: np.ndarray, window: int, cp_size: int, cp_rank: int) -> "Halo":
        """cu_seqlens: padded boundaries of the documents of the whole pack; cp_size: at least 2"""
        ranks = [_Needs.of(cu_seqlens, window, cp_size, rank) for rank in range(cp_size)]
        own, others = ranks[cp_rank], range(cp_size)
        none = np.empty(0, dtype=np.int64)
        sent = [ranks[other].held_by(own) if other != cp_rank else none for other in others]
        received = [own.held_by(ranks[other]) if other != cp_rank else none for other in others]
        local = local_indices(cu_seqlens, cp_size, cp_rank)
        held = np.concatenate([local, *received])
        index_of = np.full(int(cu_seqlens[-1]), -1, dtype=np.int64)  # by position in the pack
        index_of[held] = np.arange(len(held))
        chunks = tuple(chunk for chunk in local_chunks(cu_seqlens, cp_size, cp_rank) if chunk.length)
        num_before = np.array([min(window - 1, chunk.position) for chunk in chunks], dtype=np.int64)
        first = np.array([chunk.document_start + chunk.position for chunk in chunks], dtype=np.int64) - num_before
        lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        return Halo(
            send=index_of[np.concatenate(sent)],
            num_sent=[len(positions) for positions in sent],
            num_received=[len(positions) for positions in received],
            chunks=chunks,
            num_before=num_before,
            key_order=index_of[runs(first, lengths + num_before)],
        )


@dataclass(frozen=True)
class _Needs:
    """The two chunks of one rank in each document, and for each chunk the run of earlier keys that the rank lacks.

    Each array is int64 [documents, 2]: the start or the end (exclusive) of chunks or of runs, as positions in the pack.
    """

    chunk_starts: np.ndarray
    chunk_stops: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    @staticmethod
    def of(cu_seqlens: np.ndarray, window: int, cp_size: int, cp_rank: int) -> "_Needs":
        documents, length = document_chunks(cu_seqlens, cp_size)
        chunk_starts = documents[:, None] + length[:, None] * np.array([cp_rank, 2 * cp_size - 1 - cp_rank])
        chunk_stops = chunk_starts + length[:, None]
        starts = np.maximum(documents[:, None], chunk_starts - (window - 1))
        starts[:, 1] = np.maximum(starts[:, 1], chunk_stops[:, 0])  # the rank has the keys of its early chunk
        return _Needs(chunk_starts, chunk_stops, starts, chunk_starts)

    def held_by(self, other: "_Needs") -> np.ndarray:
        """Positions in the pack of the needed keys that `other` holds, in order: int64."""
        starts = np.maximum(self.starts[:, :, None], other.chunk_starts[:, None, :])
        stops = np.minimum(self.stops[:, :, None], other.chunk_stops[:, None, :])
        return runs(starts.ravel(), np.maximum(stops - starts, 0).ravel())
