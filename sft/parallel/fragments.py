"""Decides which rank computes which tokens in a layer of linear attention.  In numpy, without torch.

Such a layer carries a state from each token of a document to the next.  A fragment is a run of consecutive tokens of
one document that one rank computes.  Under context parallelism (CP) there are two kinds of documents:

    long    The tokens stay on the ranks that zigzag gives them (`context_parallel`).  Each rank computes its two chunks
            of the document as two fragments.  The effect of a fragment on the state is an affine map.  Ranks send maps.
    short   Ranks send all tokens to one rank, which computes the document as one fragment and sends the outputs back.

A document is short if sending its tokens takes fewer bytes than sending the maps of its fragments
(`HeadSizes.max_short`).  Short documents are divided over ranks so that all ranks compute about equally many tokens:

    documents of 64, 8 and 16 tokens, cp 2, documents of up to 16 tokens are short
    rank 0 computes tokens  0..15 and 48..63 of the first document, and the third document
    rank 1 computes tokens 16..31 and 32..47 of the first document, and the second document
"""

import heapq
from dataclasses import dataclass

import numpy as np

from sft.parallel.context_parallel import document_chunks, gathered_positions, runs


@dataclass(frozen=True, kw_only=True)
class Relayout:
    """How the tokens of short documents are sent to the ranks that compute them.

    long_rows     int64, indices of the local tokens of long documents, which are not sent
    send          int64, indices of all other local tokens: first the tokens for rank 0, then the tokens for rank 1, ...
    num_sent      number of tokens for each rank, this rank included
    num_received  number of tokens from each rank, this rank included; tokens arrive in order of rank
    order         int64: received[order] are whole documents, one after the other
    """

    long_rows: np.ndarray
    send: np.ndarray
    num_sent: list[int]
    num_received: list[int]
    order: np.ndarray


@dataclass(frozen=True, kw_only=True)
class FragmentPlan:
    """The fragments of one rank in one microbatch.  Empty documents have no fragments.

    boundaries  int64 [fragments + 1], boundaries among the tokens that this rank computes.  The fragments of long
                documents come first, the early chunk of a document before its late one.  Then come the short documents
                of this rank
    num_linked  number of fragments of long documents, whose states pass between ranks.  Other fragments start with the
                state zero
    relayout    None: cp is 1 or the pack has no short documents, so this rank computes its local tokens in their order.
                With cp 1 every document is one fragment
    """

    boundaries: np.ndarray
    num_linked: int = 0
    relayout: Relayout | None = None

    @staticmethod
    def of(cu_seqlens: np.ndarray, max_short: int, cp_size: int, cp_rank: int) -> "FragmentPlan":
        """cu_seqlens: int32 [documents + 1], padded boundaries of the documents of the whole pack

        max_short: length of the longest document that counts as short (`HeadSizes.max_short`)
        """
        starts, chunk = document_chunks(cu_seqlens, cp_size)
        lengths = np.diff(cu_seqlens.astype(np.int64))
        if cp_size == 1:
            return FragmentPlan(boundaries=boundaries(lengths[lengths > 0]))
        is_long, is_short = lengths > max_short, (lengths > 0) & (lengths <= max_short)
        long = np.repeat(chunk[is_long], 2)
        if not is_short.any():
            return FragmentPlan(boundaries=boundaries(long), num_linked=len(long))
        owner = np.full(len(lengths), -1)
        owner[is_short] = owners(lengths[is_short], cp_size)
        of_ranks = [np.flatnonzero(owner == rank) for rank in range(cp_size)]
        own = lengths[of_ranks[cp_rank]]
        relayout = Relayout(
            long_rows=runs(starts[is_long] // cp_size, 2 * chunk[is_long]),
            send=np.concatenate([runs(starts[of_rank] // cp_size, 2 * chunk[of_rank]) for of_rank in of_ranks]),
            num_sent=[int(2 * chunk[of_rank].sum()) for of_rank in of_ranks],
            num_received=[int(own.sum()) // cp_size] * cp_size,
            order=gathered_positions(boundaries(own), cp_size),  # each rank sends its part of the same documents
        )
        return FragmentPlan(boundaries=boundaries(np.concatenate([long, own])), num_linked=len(long), relayout=relayout)


def owners(lengths: np.ndarray, cp_size: int) -> np.ndarray:
    """The rank that computes each document: int64 [documents].

    Documents are assigned from the longest to the shortest, each to the rank with the fewest tokens so far.

    lengths 8, 16, 8, 4, cp 2 -> ranks 1, 0, 1, 0
    """
    ranks = [(0, rank) for rank in range(cp_size)]  # tokens so far
    owner = np.empty(len(lengths), dtype=np.int64)
    for document in np.argsort(-lengths, kind="stable").tolist():
        num_tokens, owner[document] = ranks[0]
        heapq.heapreplace(ranks, (num_tokens + int(lengths[document]), int(owner[document])))
    return owner


def boundaries(lengths: np.ndarray) -> np.ndarray:
    """The boundaries of consecutive runs of these lengths: lengths 3, 5 -> 0, 3, 8"""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
