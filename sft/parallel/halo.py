"""Decides which keys of other ranks a rank needs in a layer with a sliding window.  In numpy, without torch.

A token attends to itself and to the `window` - 1 tokens before it in its document.  So the queries of a chunk
(`context_parallel`) need the keys of the chunk, and at most window - 1 keys before it: its halo.

    one document of 12 tokens, cp = 3, window 3        tokens of chunks   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11
                                                       on rank              0     1     2     2     1      0
    rank 0 receives the keys of tokens 8 9, rank 1 the keys of 0 1 and 6 7, rank 2 the keys of 2 3

The tokens before a branch (branches.py) may lie in several documents.  Then its halo has a run of tokens in each:

    a branch after token 4 of this document, window 5      before its first chunk       1 2 3 4 of the document
                                                           before its token 2           3 4 of the document, and 0 1

Ranks exchange these keys by one all-to-all.  A rank receives each key once, even if several of its chunks need it.  The
number of bytes is proportional to the number of chunks and to the window, not to the length of the pack.
"""

from dataclasses import dataclass

import numpy as np

from sft.parallel.branches import Branches
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
    def of(cu_seqlens: np.ndarray, window: int, cp_size: int, cp_rank: int, branches: Branches | None = None) -> "Halo":
        """The halo of one rank.  With cp_size 1, no token is sent, and `key_order` only adds the keys before branches.

        cu_seqlens: padded boundaries of the documents of the whole pack
        """
        ranks = [_Needs.of(cu_seqlens, window, cp_size, rank, branches) for rank in range(cp_size)]
        own, others = ranks[cp_rank], range(cp_size)
        none = np.empty(0, dtype=np.int64)
        sent = [ranks[other].held_by(own) if other != cp_rank else none for other in others]
        received = [own.held_by(ranks[other]) if other != cp_rank else none for other in others]
        local = local_indices(cu_seqlens, cp_size, cp_rank)
        held = np.concatenate([local, *received])
        index_of = np.full(int(cu_seqlens[-1]), -1, dtype=np.int64)  # by position in the pack
        index_of[held] = np.arange(len(held))
        has_tokens = (own.chunk_stops > own.chunk_starts).ravel()
        first = np.concatenate([own.starts, own.chunk_starts[None]]).reshape(-1, has_tokens.size)
        stop = np.concatenate([own.stops, own.chunk_stops[None]]).reshape(-1, has_tokens.size)
        return Halo(
            send=index_of[np.concatenate(sent)],
            num_sent=[len(positions) for positions in sent],
            num_received=[len(positions) for positions in received],
            chunks=tuple(chunk for chunk in local_chunks(cu_seqlens, cp_size, cp_rank) if chunk.length),
            num_before=(stop - first)[:-1, has_tokens].sum(0),
            key_order=index_of[runs(first.T.ravel(), (stop - first).T.ravel())],
        )


@dataclass(frozen=True)
class _Needs:
    """The chunks of one rank in each document, and for each chunk the runs of keys before it that it needs.

    Starts and stops (exclusive) of chunks and of runs are positions in the pack.

    chunk_starts, chunk_stops  int64 [documents, chunks of a document]
    documents, starts, stops   int64 [generations, documents, chunks of a document]: the document of each run, its start
                               and stop.  The last generation is the document of the chunk, the generation before it
                               is the parent of this document, and so on
    """

    chunk_starts: np.ndarray
    chunk_stops: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    @staticmethod
    def of(cu_seqlens: np.ndarray, window: int, cp_size: int, cp_rank: int, branches: Branches | None) -> "_Needs":
        first, length = document_chunks(cu_seqlens, cp_size)
        if cp_size == 1:
            chunk_starts, chunk_stops = first[:, None], cu_seqlens[1:, None].astype(np.int64)
        else:
            chunk_starts = first[:, None] + length[:, None] * np.array([cp_rank, 2 * cp_size - 1 - cp_rank])
            chunk_stops = chunk_starts + length[:, None]
        document = np.broadcast_to(np.arange(len(first))[:, None], chunk_starts.shape)
        stop, lacking, generations = chunk_starts, np.full(chunk_starts.shape, window - 1), []
        while True:
            start = np.maximum(first[document], stop - lacking)
            generations.append((document, start, stop))
            lacking = lacking - (stop - start)
            if branches is None or not (lacking * (branches.parents[document] >= 0)).any():
                break
            is_branch = branches.parents[document] >= 0
            lacking, stop = lacking * is_branch, first[branches.parents[document]] + branches.forks[document]
            document = np.where(is_branch, branches.parents[document], document)
            stop = np.where(is_branch, stop, first[document])
        documents, starts, stops = (np.stack(parts[::-1]) for parts in zip(*generations))
        return _Needs(chunk_starts, chunk_stops, documents, starts, stops)

    def held_by(self, other: "_Needs") -> np.ndarray:
        """Positions in the pack of the keys that this rank needs and `other` holds, ascending: int64."""
        order = np.argsort(self.starts, axis=None, kind="stable")
        documents, first, last = (x.ravel()[order] for x in (self.documents, self.starts, self.stops))
        first[1:] = np.maximum(first[1:], np.maximum.accumulate(last)[:-1])  # each key once
        starts = np.maximum(first[:, None], other.chunk_starts[documents])
        stops = np.minimum(last[:, None], other.chunk_stops[documents])
        return runs(starts.ravel(), np.maximum(stops - starts, 0).ravel())
