"""Makes a pack of samples, and cuts one context-parallel rank's microbatch out of the pack.

Decides labels and padding.  Labels are shifted once per document, before a pack is sharded, so no rank needs a token
of another rank.  `plan.py`, `balance.py` and `dynamic_cp.py` decide which samples share a pack.
`parallel/context_parallel.py` decides which tokens of a pack a rank holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import numpy as np

from sft.batch import BranchTargets, Microbatch, Pack, Sample
from sft.data.packing.teacher_targets import local_teacher
from sft.data.packing.tree_packs import PackDocuments, PackTargets, supervision, tree_of
from sft.parallel import context_parallel
from sft.parallel.alignment import aligned

# Length of the longest filler document.  With short ones, kernels take time for many documents.  With long ones,
# attention takes time; up to 4,096 tokens, it is a small part of the work per token.
FILLER_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Collator:
    """Makes packs, and cuts this rank's microbatch out of each.  All its packs have one context-parallel size.

    cp_rank  rank of this process among the cp_size ranks that share a pack
    """

    doc_multiple: int  # every document is padded to a multiple of doc_multiple tokens
    pad_id: int  # id of padding tokens
    pack_multiple: int = 1  # filler documents pad every pack to a multiple of pack_multiple tokens
    pad_to_length: int = 0  # packs are padded to at least this length
    cp_size: int = 1
    cp_rank: int = 0
    reduction: str = "token"  # loss.reduction: decides the weight of each supervised token
    shared: str = "each"  # loss.shared: how often a token counts that several texts supervise

    def microbatch(self, samples: Sequence[Sample]) -> Microbatch:
        """This rank's part of the pack of these samples; without samples, the pack holds only filler documents."""
        pack = self.pack(samples)
        indices = context_parallel.local_indices(pack.cu_seqlens, self.cp_size, self.cp_rank)
        microbatch = local_part(pack, indices, cp_size=self.cp_size, doc_multiple=self.doc_multiple)
        if all(sample.teacher is None for sample in samples):
            return microbatch
        return replace(microbatch, teacher=local_teacher(samples, pack.cu_seqlens, indices))

    def pack(self, samples: Sequence[Sample]) -> Pack:
        """Concatenates padded samples and computes their labels and weights; `Pack` shows an example in numbers.

        The last token of a document and its padding have the label `pad_id` with weight 0.

        Filler documents follow, as few as possible with at most `FILLER_TOKENS` each, until the length is at least
        `pad_to_length` and a multiple of `pack_multiple`.  If pad_to_length is not 0, padded samples must not exceed
        it.

            one document of 96 tokens, pack_multiple 512, doc_multiple 32 -> one filler document of 416 tokens
            no sample -> at least one filler document
        """
        multiple, least = self.doc_multiple, self.pad_to_length
        trees = [tree_of(sample) for sample in samples]
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
        targets, first = PackTargets.none(total, self.pad_id), 0
        tokens = np.full(total, self.pad_id, dtype=np.int32)
        for sample, tree in zip(samples, trees, strict=True):
            starts = cu_seqlens[first : first + len(tree.branches)].astype(np.int64)
            positions = context_parallel.runs(starts, np.diff(tree.starts))
            tokens[positions] = sample.tokens
            targets.add(tree, starts, positions, sample.tokens, supervision(sample, self.reduction, self.shared))
            first += len(starts)
        first_tokens, of_trees = cu_seqlens[:-1], dict[str, Any]()
        if any(sample.tree is not None for sample in samples):
            documents = PackDocuments.of(trees, len(filler))
            of_trees = {**documents._asdict(), "label_counts": targets.counts, "further": targets.further()}
            first_tokens = first_tokens - documents.branches.depths.astype(np.int32)  # where texts begin
        sources = [sample.source for sample, tree in zip(samples, trees) for _ in range(len(tree.branches))]
        return Pack(
            tokens=tokens,
            labels=targets.labels,
            loss_weights=targets.weights,
            position_ids=np.arange(total, dtype=np.int32) - np.repeat(first_tokens, np.diff(cu_seqlens)),
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            sources=np.concatenate([np.array(sources, dtype=np.int32), filler]),
            sample_ids=tuple(sample.sample_id for sample in samples),
            **of_trees,
        )


def local_part(pack: Pack, indices: np.ndarray, *, cp_size: int, doc_multiple: int) -> Microbatch:
    """The microbatch of the rank that holds the tokens at `indices` of a pack.

    Lengths and counts of the microbatch are those of the whole pack.
    """
    import torch  # not at the top, because the import takes a second, and errors about data should not wait for it

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
        firsts=pack.firsts,
        texts=pack.texts,
        label_counts=None if pack.label_counts is None else at_indices(pack.label_counts, torch.int32),
        further=None if pack.further is None else _local_targets(pack.further, indices),
    )


def _supervised(pack: Pack) -> np.ndarray:
    """int32 [documents]: the number of supervised labels of each document; a label counts for each text that
    supervises it.

    Labels of a sample with a tree count for the first document of the sample.
    """
    documents, count = pack.documents, len(pack.lengths)
    if pack.firsts is None or pack.label_counts is None or pack.further is None:
        return np.bincount(documents[pack.loss_mask], minlength=count).astype(np.int32)
    firsts = pack.firsts[documents]
    labels = np.bincount(firsts, weights=pack.label_counts, minlength=count)
    further = np.bincount(firsts[pack.further.rows], weights=pack.further.counts, minlength=count)
    return (labels + further).astype(np.int32)


def _local_targets(further: BranchTargets, indices: np.ndarray) -> BranchTargets:
    """The further targets of a rank that holds the tokens at `indices`, rising, of a pack; rows index these tokens."""
    rows = np.minimum(np.searchsorted(indices, further.rows), len(indices) - 1)
    is_local = indices[rows] == further.rows
    rows, labels, weights, counts = (x[is_local] for x in (rows, further.labels, further.weights, further.counts))
    return BranchTargets(rows=rows, labels=labels, weights=weights, counts=counts)
