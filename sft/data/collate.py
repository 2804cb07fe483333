"""Samples -> the microbatch of one context-parallel rank: packed, filled up, and cut.

Does not decide which samples share a pack (`packing/`), nor which tokens of a pack a rank holds: it is given a function
for that (`parallel/context_parallel.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sft.batch import Microbatch, Pack, Sample
from sft.data.packing.pack import add_filler, filler_pack, make_pack, pad_to
from sft.parallel.alignment import aligned

LocalIndices = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Collator:
    """How a rank's microbatches are made.

    doc_multiple   documents are padded to a multiple of it
    pack_multiple  packs are filled to a multiple of it, with filler documents
    pad_to_length  packs are filled to this length (data.pad_to_seq_length); None: to the multiple only
    reduction      loss.reduction: decides the weight of a token in its sample
    local_indices  cu_seqlens of a pack (int32 numpy) -> the positions in the pack that this rank holds
    """

    doc_multiple: int
    pack_multiple: int
    pad_id: int
    local_indices: LocalIndices
    pad_to_length: int | None = None
    reduction: str = "token"

    def microbatch(self, samples: Sequence[Sample]) -> Microbatch:
        """This rank's part of the pack of these samples; without samples, of a pack of filler."""
        doc_multiple, pad_id = self.doc_multiple, self.pad_id
        if samples:
            pack = make_pack(samples, doc_multiple=doc_multiple, pad_id=pad_id, reduction=self.reduction)
        else:
            pack = filler_pack(doc_multiple=doc_multiple, pad_id=pad_id)
        if self.pad_to_length is not None:
            pack = pad_to(pack, length=self.pad_to_length, doc_multiple=doc_multiple, pad_id=pad_id)
        pack = add_filler(pack, multiple=self.pack_multiple, doc_multiple=doc_multiple, pad_id=pad_id)
        return local_part(pack, self.local_indices(pack.cu_seqlens), doc_multiple=doc_multiple)


def local_part(pack: Pack, indices: np.ndarray, *, doc_multiple: int) -> Microbatch:
    """The microbatch of the rank that holds positions `indices` of the pack; counts are of the whole pack."""

    def at_indices(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array[indices]).to(dtype).unsqueeze(0)  # [1, t]

    return Microbatch(
        tokens=at_indices(pack.tokens, torch.int64),
        labels=at_indices(pack.labels, torch.int64),
        position_ids=at_indices(pack.position_ids, torch.int64),
        loss_weights=at_indices(pack.loss_weights, torch.float32),
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
