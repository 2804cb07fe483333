"""Makes a pack of samples, and cuts one context-parallel rank's microbatch out of the pack.

Decides labels and padding.  Labels are shifted here, per document and before sharding, so no rank needs a token of
another rank.  `plan.py`, `balance.py` and `dynamic_cp.py` decide which samples share a pack.
`parallel/context_parallel.py` decides which tokens of a pack a rank holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from sft.batch import Microbatch, Pack, Sample
from sft.parallel import context_parallel
from sft.parallel.alignment import aligned

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
        real_lengths = np.array([len(sample.tokens) for sample in samples], dtype=np.int32)
        assert all(real_lengths > 0)
        aligned_total = int(aligned(real_lengths, multiple).sum())
        assert not least or (aligned_total <= least and least % multiple == 0)
        total = aligned(max(aligned_total, least, 1), lcm(self.pack_multiple, multiple))
        filler_starts = np.arange(aligned_total, total, max(FILLER_TOKENS // multiple, 1) * multiple)
        filler = np.zeros(len(filler_starts), dtype=np.int32)  # a filler document has no real token
        lengths = np.concatenate([real_lengths, filler])
        real_starts = np.cumsum([0, *aligned(real_lengths, multiple)])[:-1]
        cu_seqlens = np.concatenate([real_starts, filler_starts, [total]]).astype(np.int32)
        tokens = np.full(total, self.pad_id, dtype=np.int32)
        labels = np.full(total, self.pad_id, dtype=np.int32)
        loss_weights = np.zeros(total, dtype=np.float32)
        for sample, start, length in zip(samples, cu_seqlens.tolist(), lengths.tolist(), strict=False):
            weight = token_weight(sample.num_supervised, self.reduction)
            tokens[start : start + length] = sample.tokens
            labels[start : start + length - 1] = sample.tokens[1:]
            loss_weights[start : start + length - 1] = sample.weights[1:] * weight
        starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
        return Pack(
            tokens=tokens,
            labels=labels,
            loss_weights=loss_weights,
            position_ids=np.arange(total, dtype=np.int32) - starts,
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            sources=np.concatenate([np.array([sample.source for sample in samples], dtype=np.int32), filler]),
            sample_ids=tuple(sample.sample_id for sample in samples),
        )


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
        supervised=np.bincount(pack.documents[pack.loss_mask], minlength=len(pack.lengths)).astype(np.int32),
        sources=pack.sources,
        num_documents=int((pack.lengths > 0).sum()),
        num_real_tokens=int(pack.lengths.sum()),
        num_aligned_tokens=int(aligned(pack.lengths, doc_multiple).sum()),
        num_tokens=int(pack.loss_mask.sum()),
        sample_ids=pack.sample_ids,
    )
