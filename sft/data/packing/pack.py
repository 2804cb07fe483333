"""Makes a pack of samples, and cuts one context-parallel rank's microbatch out of the pack.

Decides labels and padding.  Labels are shifted here, per document and before sharding, so no rank needs a token of
another rank.  `plan.py`, `balance.py` and `dynamic_cp.py` decide which samples share a pack.
`parallel/context_parallel.py` decides which tokens of a pack a rank holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import numpy as np

from sft.batch import BranchTargets, Microbatch, Pack, Sample, Tree
from sft.parallel import context_parallel
from sft.parallel.alignment import aligned
from sft.parallel.branches import Branches

# Length of the longest filler document.  Kernels take time for each document, and the time of attention grows with the
# square of its length: up to 4,096 tokens, attention is a small part of the work per token.
FILLER_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Collator:
    """Makes packs, and cuts this rank's microbatch out of each.  All its packs have one context-parallel size.

    cp_rank  rank of this process among the cp_size ranks that share a pack
    """

    doc_multiple: int  # every document is padded to a multiple of doc_multiple tokens
    pad_id: int
    pack_multiple: int = 1  # filler documents pad every pack to a multiple of pack_multiple tokens
    pad_to_length: int = 0  # packs are padded to at least this length
    cp_size: int = 1
    cp_rank: int = 0
    reduction: str = "token"  # loss.reduction: decides the weight of each supervised token

    def microbatch(self, samples: Sequence[Sample]) -> Microbatch:
        """This rank's part of the pack of these samples; without samples, the pack holds only filler documents."""
        pack = self.pack(samples)
        indices = context_parallel.local_indices(pack.cu_seqlens, self.cp_size, self.cp_rank)
        return local_part(pack, indices, cp_size=self.cp_size, doc_multiple=self.doc_multiple)

    def pack(self, samples: Sequence[Sample]) -> Pack:
        """Concatenates padded samples and computes their labels and weights; `Pack` shows an example in numbers.

        The last token of a document and its padding predict nothing; their labels are `pad_id`, a valid id that no
        computation uses.

        Filler documents follow, as few as possible with at most `FILLER_TOKENS` each, until the length is at least
        `pad_to_length` and a multiple of `pack_multiple`.  The samples must not exceed `pad_to_length`.

            one document of 96 tokens, pack_multiple 512, doc_multiple 32 -> one filler document of 416 tokens
            no sample -> at least one filler document
        """
        multiple, least = self.doc_multiple, self.pad_to_length
        trees = [_tree_of(sample) for sample in samples]
        real_lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(tree.starts) for tree in trees)])
        assert all(real_lengths > 0)
        aligned_total = int(aligned(real_lengths, multiple).sum())
        assert not least or (aligned_total <= least and least % multiple == 0)
        total = aligned(max(aligned_total, least, 1), lcm(self.pack_multiple, multiple))
        filler_starts = np.arange(aligned_total, total, max(FILLER_TOKENS // multiple, 1) * multiple)
        filler = np.zeros(len(filler_starts), dtype=np.int32)  # a filler document has no real token
        lengths = np.concatenate([real_lengths.astype(np.int32), filler])
        real_starts = np.cumsum([0, *aligned(real_lengths, multiple)])[:-1]
        cu_seqlens = np.concatenate([real_starts, filler_starts, [total]]).astype(np.int32)
        targets, first = _Targets.none(total, self.pad_id), 0
        tokens = np.full(total, self.pad_id, dtype=np.int32)
        for sample, tree in zip(samples, trees, strict=True):
            starts = cu_seqlens[first : first + len(tree.branches)].astype(np.int64)
            positions = context_parallel.runs(starts, np.diff(tree.starts))
            tokens[positions] = sample.tokens
            targets.add(sample, tree, starts, positions, self.reduction)
            first += len(starts)
        has_trees = any(sample.tree is not None for sample in samples)
        branches = _joined(trees, len(filler)) if has_trees else None
        num_before = np.arange(total, dtype=np.int32) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
        depths = 0 if branches is None else np.repeat(branches.depths, np.diff(cu_seqlens)).astype(np.int32)
        sources = [sample.source for sample, tree in zip(samples, trees) for _ in range(len(tree.branches))]
        return Pack(
            tokens=tokens,
            labels=targets.labels,
            loss_weights=targets.weights,
            position_ids=num_before + depths,
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            sources=np.concatenate([np.array(sources, dtype=np.int32), filler]),
            sample_ids=tuple(sample.sample_id for sample in samples),
            branches=branches,
            texts=_texts(trees) if has_trees else None,
            label_counts=targets.counts if has_trees else None,
            further=targets.further() if has_trees else None,
        )


class _Targets(NamedTuple):
    """The targets of a pack in the making; `Pack` describes the arrays.  others: further targets, one by one"""

    labels: np.ndarray
    weights: np.ndarray
    counts: np.ndarray
    others: list[tuple[int, int, np.float32, int]]

    @staticmethod
    def none(total: int, pad_id: int) -> "_Targets":
        labels = np.full(total, pad_id, dtype=np.int32)
        return _Targets(labels, np.zeros(total, dtype=np.float32), np.zeros(total, dtype=np.int32), [])

    def add(self, sample: Sample, tree: Tree, starts: np.ndarray, positions: np.ndarray, reduction: str) -> None:
        """Shift the labels of a sample to the tokens before them.

        starts: position in the pack of each document of the sample; positions: of each of its tokens
        """
        weights, counts = _supervision(sample, reduction)
        is_first = np.zeros(len(positions), dtype=bool)
        is_first[tree.starts[:-1]] = True
        labels = np.flatnonzero(~is_first)
        rows = positions[labels] - 1
        self.labels[rows], self.weights[rows], self.counts[rows] = (
            sample.tokens[labels],
            weights[labels],
            counts[labels],
        )
        parents, forks = tree.branches.parents, tree.branches.forks
        for branch in np.flatnonzero((parents >= 0) & (weights[tree.starts[:-1]] > 0)).tolist():
            row, label = int(starts[parents[branch]] + forks[branch] - 1), int(tree.starts[branch])
            target = int(sample.tokens[label]), weights[label], int(counts[label])
            if self.weights[row] > 0:
                self.others.append((row, *target))
            else:
                self.labels[row], self.weights[row], self.counts[row] = target

    def further(self) -> BranchTargets:
        rows, labels, weights, counts = np.array(self.others, dtype=np.float64).reshape(-1, 4).T
        order = np.argsort(rows, kind="stable")
        return BranchTargets(
            rows=rows[order].astype(np.int64),
            labels=labels[order].astype(np.int64),
            weights=weights[order].astype(np.float32),
            counts=counts[order].astype(np.int32),
        )


def _tree_of(sample: Sample) -> Tree:
    """The sample's tree; for a sample without one, the tree of a single document."""
    if sample.tree is not None:
        return sample.tree
    count, none = len(sample.tokens), np.zeros((0, 3), dtype=np.int64)
    return Tree(np.array([0, count]), Branches.of([-1], [0]), np.array([[0, count]]), none, np.zeros(0, np.float32))


def _supervision(sample: Sample, reduction: str) -> tuple[np.ndarray, np.ndarray]:
    """For each token of a sample, its weight in the loss, float32, and the number of texts that supervise it, int32."""
    if sample.tree is None:
        weights = sample.weights * token_weight(sample.num_supervised, reduction)
        return weights, (weights > 0).astype(np.int32)
    weights, counts = np.zeros(len(sample.tokens), np.float32), np.zeros(len(sample.tokens), np.int32)
    texts, starts, stops = sample.tree.spans.T
    of_text = np.bincount(texts, weights=stops - starts, minlength=len(sample.tree.ends))
    for text, start, stop, weight in zip(texts, starts, stops, sample.tree.span_weights):
        weights[start:stop] += weight * token_weight(int(of_text[text]), reduction)
        counts[start:stop] += 1
    return weights, counts


def _first_documents(trees: Sequence[Tree]) -> list[int]:
    """The index in the pack of the first document of each tree."""
    return np.cumsum([0, *(len(tree.branches) for tree in trees)]).tolist()


def _joined(trees: Sequence[Tree], num_filler: int) -> Branches:
    """The parents of all documents of a pack: those of its trees, then filler documents."""
    filler = [np.full(num_filler, -1)], [np.zeros(num_filler, dtype=np.int64)]
    parents = [
        np.where(tree.branches.parents < 0, -1, tree.branches.parents + first)
        for tree, first in zip(trees, _first_documents(trees))
    ]
    return Branches.of(
        np.concatenate([*parents, *filler[0]]), np.concatenate([*(tree.branches.forks for tree in trees), *filler[1]])
    )


def _texts(trees: Sequence[Tree]) -> np.ndarray:
    return np.concatenate([tree.ends + [first, 0] for tree, first in zip(trees, _first_documents(trees))])


def token_weight(num_supervised: int, reduction: str) -> np.float32:
    """The weight of each supervised token of a sample with `num_supervised` such tokens; reduction: `loss.reduction`.

    num_supervised 4 -> "token" 1, "sample" 1/4, "sqrt" 1/2
    """
    exponent = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}[reduction]
    return np.float32(max(num_supervised, 1) ** exponent)


def local_part(pack: Pack, indices: np.ndarray, *, cp_size: int, doc_multiple: int) -> Microbatch:
    """The microbatch of the rank that holds positions `indices` of a pack; lengths and counts are of the whole pack."""
    import torch  # not at the top: the import takes a second, and errors about data come before

    def at_indices(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array[indices]).to(dtype).unsqueeze(0)  # [1, t]

    return Microbatch(
        cp_size=cp_size,
        tokens=at_indices(pack.tokens, torch.int64),
        labels=at_indices(pack.labels, torch.int64),
        position_ids=at_indices(pack.position_ids, torch.int64),
        loss_weights=at_indices(pack.loss_weights, torch.float32),
        second_labels=at_indices(pack.second_labels, torch.int64),
        second_mask=at_indices(pack.second_mask, torch.bool),
        documents=at_indices(pack.documents, torch.int32),
        cu_seqlens=torch.from_numpy(pack.cu_seqlens),
        max_seqlen=pack.max_seqlen,
        lengths=pack.lengths,
        supervised=_supervised(pack),
        sources=pack.sources,
        num_documents=len(pack.sample_ids),
        num_real_tokens=int(pack.lengths.sum()),
        num_aligned_tokens=int(aligned(pack.lengths, doc_multiple).sum()),
        num_tokens=int(_supervised(pack).sum()),
        sample_ids=pack.sample_ids,
        branches=pack.branches,
        texts=pack.texts,
        label_counts=None if pack.label_counts is None else at_indices(pack.label_counts, torch.int32),
        further=None if pack.further is None else _local_targets(pack.further, indices),
    )


def _supervised(pack: Pack) -> np.ndarray:
    """int32 [documents]: number of supervised labels; a label counts as often as texts supervise it.

    The first document of a tree counts those of the whole tree.
    """
    documents, count = pack.documents, len(pack.lengths)
    if pack.branches is None or pack.label_counts is None or pack.further is None:
        return np.bincount(documents[pack.loss_mask], minlength=count).astype(np.int32)
    roots = pack.branches.roots[documents]
    labels = np.bincount(roots, weights=pack.label_counts, minlength=count)
    return (labels + np.bincount(roots[pack.further.rows], weights=pack.further.counts, minlength=count)).astype(
        np.int32
    )


def _local_targets(further: BranchTargets, indices: np.ndarray) -> BranchTargets:
    """The further targets of the tokens at positions `indices` of a pack, with rows among these tokens."""
    order = np.argsort(indices)
    at = np.minimum(np.searchsorted(indices[order], further.rows), len(order) - 1)
    is_local = indices[order][at] == further.rows
    rows = order[at[is_local]]
    by_row = np.argsort(rows, kind="stable")
    labels, weights, counts = (x[is_local][by_row] for x in (further.labels, further.weights, further.counts))
    return BranchTargets(rows=rows[by_row], labels=labels, weights=weights, counts=counts)
