"""Decides which rank computes which tokens in a layer with a recurrence.  In numpy, without torch.

Such a layer carries a state from each token of a document to the next.  A fragment is a run of consecutive tokens of
one document that one rank computes.  Under context parallelism (CP) there are two kinds of documents:

    long    The tokens stay on the ranks that zigzag gives them (`context_parallel`).  Each rank computes its two chunks
            of the document as two fragments.  The effect of a fragment on the state is an affine map.  Ranks send maps.
    short   Ranks send all tokens to one rank, which computes the document as one fragment and sends the outputs back.

A document is short if sending its tokens takes fewer bytes than sending the maps of its fragments
(`RecurrentSizes.max_short`).  Short documents are divided over ranks so that all ranks compute about equally many
tokens:

    documents of 64, 8 and 16 tokens, cp 2, documents of up to 16 tokens are short
    rank 0 computes tokens  0..15 and 48..63 of the first document, and the third document
    rank 1 computes tokens 16..31 and 32..47 of the first document, and the second document

A branch (`branches`) begins with the state of its parent at the fork.  So documents are also cut at the forks of their
branches.  Fragments of long documents and of all documents of a tree are linked: a linked fragment begins with the
state after another fragment.

    documents of 10 and 4 tokens, cp 1, the second is a branch of the first with fork 3
    fragments    0: tokens 0..2    1: tokens 3..9    2: the branch        1 and 2 start with the state after 0
"""

import heapq
from dataclasses import dataclass

import numpy as np

from sft.parallel.branches import Branches
from sft.parallel.context_parallel import document_chunks, gathered_positions, runs


@dataclass(frozen=True, kw_only=True)
class Relayout:
    """How the tokens of short documents are sent to the ranks that compute them.

    kept          int64, indices of the local tokens that are not sent, in the order in which this rank computes them
    send          int64, indices of all other local tokens: first the tokens for rank 0, then the tokens for rank 1, ...
    num_sent      number of tokens for each rank, this rank included
    num_received  number of tokens from each rank, this rank included; tokens arrive in order of rank
    order         int64: received[order] are whole documents, one after the other
    """

    kept: np.ndarray
    send: np.ndarray
    num_sent: list[int]
    num_received: list[int]
    order: np.ndarray


@dataclass(frozen=True, kw_only=True)
class FragmentLinks:
    """The linked fragments of a pack: first those of rank 0 in the order of rank 0, then those of rank 1, ...

    counts        number of linked fragments of each rank
    predecessors  int64, for each fragment the index of its predecessor, whose last state is the first state of the
                  fragment.  The predecessor is the fragment before it in its document.  The first fragment of a branch
                  has as predecessor the fragment of the parent that ends at the fork.  -1: the first state is zero
    """

    counts: list[int]
    predecessors: np.ndarray


@dataclass(frozen=True, kw_only=True)
class FragmentPlan:
    """The fragments of one rank in one microbatch.  Empty documents have no fragments.

    boundaries  int64 [fragments + 1], boundaries among the tokens that this rank computes.  The fragments of long
                documents come first, the early chunk of a document before its late chunk.  Then come the short
                documents of this rank, first those of trees.  With cp 1, all documents are short
    num_linked  number of this rank's linked fragments, which come first.  Other fragments start with the state zero
    links       the linked fragments of all ranks
    relayout    how this rank gets the tokens that it computes.  None: it computes its local tokens in their order.
                With cp 1, a relayout only changes the order of tokens
    """

    boundaries: np.ndarray
    num_linked: int
    links: FragmentLinks
    relayout: Relayout | None = None

    @staticmethod
    def of(
        cu_seqlens: np.ndarray, max_short: int, cp_size: int, cp_rank: int, branches: Branches | None = None
    ) -> "FragmentPlan":
        """cu_seqlens: int32 [documents + 1], padded boundaries of the documents of the whole pack

        max_short: length of the longest document that counts as short (`RecurrentSizes.max_short`)
        """
        starts, chunk = document_chunks(cu_seqlens, cp_size)
        lengths = np.diff(cu_seqlens.astype(np.int64))
        in_tree = np.zeros(len(lengths), dtype=bool) if branches is None else branches.in_tree
        is_long = (lengths > max_short) & (cp_size > 1)
        is_short, owner = (lengths > 0) & ~is_long, np.full(len(lengths), -1)
        owner[is_short] = owners(lengths[is_short], cp_size)
        order = np.argsort(~in_tree, kind="stable")
        of_ranks = [order[owner[order] == rank] for rank in range(cp_size)]
        own, whole = of_ranks[cp_rank], [of_rank[in_tree[of_rank]] for of_rank in of_ranks]
        edges = _Edges.of(starts, branches)
        linked = [
            edges.cut(
                np.concatenate([_long_chunks(starts[is_long], chunk[is_long], cp_size, rank), starts[whole[rank]]]),
                np.concatenate([np.repeat(chunk[is_long], 2), lengths[whole[rank]]]),
            )
            for rank in range(cp_size)
        ]
        kept = runs(starts[is_long] // cp_size, 2 * chunk[is_long])
        relayout = None
        if cp_size == 1 and (np.diff(own) < 0).any():
            kept, none = runs(starts[own], lengths[own]), np.empty(0, dtype=np.int64)
            relayout = Relayout(kept=kept, send=none, num_sent=[0], num_received=[0], order=none)
        elif cp_size > 1 and is_short.any():
            relayout = Relayout(
                kept=kept,
                send=np.concatenate([runs(starts[of_rank] // cp_size, 2 * chunk[of_rank]) for of_rank in of_ranks]),
                num_sent=[int(2 * chunk[of_rank].sum()) for of_rank in of_ranks],
                num_received=[int(lengths[own].sum()) // cp_size] * cp_size,
                order=gathered_positions(boundaries(lengths[own]), cp_size),  # ranks send parts of the same documents
            )
        return FragmentPlan(
            boundaries=boundaries(np.concatenate([np.diff(linked[cp_rank]).ravel(), lengths[own[~in_tree[own]]]])),
            num_linked=len(linked[cp_rank]),
            links=FragmentLinks(
                counts=[len(x) for x in linked], predecessors=edges.predecessors(np.concatenate(linked))
            ),
            relayout=relayout,
        )


@dataclass(frozen=True, kw_only=True)
class _Edges:
    """Where documents begin, where they are cut for their branches, and what is before them, as positions in the pack.

    starts  int64 [documents]
    forks   int64, ascending: a branch begins after the token before this position
    before  int64 [documents], the position after the token before the document; -1: it has no parent
    """

    starts: np.ndarray
    forks: np.ndarray
    before: np.ndarray

    @staticmethod
    def of(starts: np.ndarray, branches: Branches | None) -> "_Edges":
        before = np.full(len(starts), -1, dtype=np.int64)
        if branches is not None:
            is_branch = branches.parents >= 0
            before[is_branch] = starts[branches.parents[is_branch]] + branches.forks[is_branch]
        return _Edges(starts=starts, forks=np.unique(before[before >= 0]), before=before)

    def cut(self, first: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Cut runs of tokens at forks.  Returns the start and the end of each fragment: int64 [fragments, 2].

        first, length: int64 [runs], the position of each run's first token, and its number of tokens
        """
        after, stop = np.searchsorted(self.forks, first, side="right"), np.searchsorted(self.forks, first + length)
        starts = np.cumsum(stop - after + 1) - (stop - after + 1)  # index of each run's first fragment
        is_first = np.isin(np.arange(len(first) + (stop - after).sum()), starts)
        begin = np.empty(len(is_first), dtype=np.int64)
        begin[is_first], begin[~is_first] = first, self.forks[runs(after, stop - after)]
        end = np.append(begin, 0)[1:]
        end[np.append(is_first, True)[1:]] = first + length
        return np.stack([begin, end], axis=1)

    def predecessors(self, fragments: np.ndarray) -> np.ndarray:
        """`FragmentLinks.predecessors` of all linked fragments of a pack, given by their starts and ends."""
        begin, end = fragments.T
        # An empty document has the same start as the next one; side="right" finds the document that has tokens.
        document = np.searchsorted(self.starts, begin, side="right") - 1
        wanted = np.where(begin == self.starts[document], self.before[document], begin)
        order = np.argsort(end)
        numbers = order[np.searchsorted(end, wanted, sorter=order)]
        assert (end[numbers] == wanted)[wanted >= 0].all(), "a fork is larger than the number of tokens of its parent"
        return np.where(wanted < 0, -1, numbers)


def _long_chunks(starts: np.ndarray, chunk: np.ndarray, cp_size: int, cp_rank: int) -> np.ndarray:
    """The start in the pack of a rank's two chunks of each long document, the early chunk first: int64 [2 * documents].

    starts, chunk: int64 [documents], the start of each long document, and the length of its chunks
    """
    return np.stack([starts + cp_rank * chunk, starts + (2 * cp_size - 1 - cp_rank) * chunk], axis=1).ravel()


def owners(lengths: np.ndarray, cp_size: int) -> np.ndarray:
    """The rank that computes each document: int64 [documents].

    Documents are assigned from the longest to the shortest, each to the rank with the fewest tokens so far.

    lengths 8, 16, 8, 4, cp 2 -> ranks 1, 0, 1, 0
    """
    ranks = [(0, rank) for rank in range(cp_size)]  # (tokens so far, rank)
    owner = np.zeros(len(lengths), dtype=np.int64)
    for document in np.argsort(-lengths, kind="stable").tolist():
        num_tokens, owner[document] = ranks[0]
        heapq.heapreplace(ranks, (num_tokens + int(lengths[document]), int(owner[document])))
    return owner


def boundaries(lengths: np.ndarray) -> np.ndarray:
    """The boundaries of consecutive runs of these lengths: lengths 3, 5 -> 0, 3, 8"""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
