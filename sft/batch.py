"""The types that data and model share: sample, pack and microbatch.

    Sample      one tokenised conversation                               (numpy, no padding)
    Pack        concatenated documents, each padded to doc_multiple      (numpy, the same on every rank)
    Microbatch  the part of a pack that one context-parallel rank holds  (torch, the model's input)

sft/data/packing/pack.py shifts the labels once per document, before a pack is split over context-parallel ranks.  So
no rank needs a token of another rank for its labels.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch  # takes a second, which errors about data need not wait for


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One tokenised conversation.

    tokens   int32 [n]
    weights  float32 [n], above 0 for supervised tokens: the assistant's text and its end-of-turn token
    source   index of the sample's source in data.train, or of its data file
    """

    sample_id: int
    tokens: np.ndarray
    weights: np.ndarray
    source: int = 0

    @property
    def num_supervised(self) -> int:
        """Number of supervised labels.  A document's first token is never a label."""
        return int(np.count_nonzero(self.weights[1:]))


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Concatenated documents, each padded to a multiple of `doc_multiple`.  Labels are shifted once per document.

        documents [5, 6, 7] and [8, 9], doc_multiple 4; only the tokens 6 and 7 are supervised
        tokens       5 6 7 0  8 9 0 0
        labels       6 7 0 0  9 0 0 0
        loss_weights 1 1 0 0  0 0 0 0
        second_mask  1 0 0 0  0 0 0 0
        position_ids 0 1 2 3  0 1 2 3
        cu_seqlens   0 4 8
        lengths      3 2

    The first four arrays have shape [t], where t counts padded tokens: int32, int32, float32, int32.
    cu_seqlens  int32 [num_documents + 1], padded boundaries
    lengths     int32 [num_documents], real lengths; 0 marks a filler document
    sources     int32 [num_documents], index of each document's source; 0 for a filler document
    sample_ids  the sample of each real document, in order
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_weights: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    lengths: np.ndarray
    sources: np.ndarray
    sample_ids: tuple[int, ...]

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [t]: whether the label is supervised, that is, has a weight above 0."""
        return self.loss_weights > 0

    @property
    def second_labels(self) -> np.ndarray:
        """int32 [t]: the label of the next position, for multi-token prediction; valid where `second_mask` is True."""
        return np.append(self.labels[1:], self.labels[:1])

    @property
    def second_mask(self) -> np.ndarray:
        """bool [t]: whether the second token after this one is of the same document, and is supervised."""
        is_same = np.diff(self.documents, append=-1) == 0
        return is_same & np.append(self.loss_mask[1:], False)

    @property
    def documents(self) -> np.ndarray:
        """int32 [t]: index of each token's document.  Padding belongs to the document that it pads."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), np.diff(self.cu_seqlens))

    @property
    def max_seqlen(self) -> int:
        """Length of the longest padded document.  With the pack's length, RoPE would not restart in each document."""
        return int(np.diff(self.cu_seqlens).max())


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """The tokens of one pack that one context-parallel rank holds, in zigzag order; t = pack length / cp_size.

    Fields without shape [1, t] describe the whole pack, and are the same on every context-parallel rank.
    """

    cp_size: int  # number of ranks that share the pack
    tokens: "torch.Tensor"  # int64 [1, t]
    labels: "torch.Tensor"  # int64 [1, t]
    position_ids: "torch.Tensor"  # int64 [1, t]
    loss_weights: "torch.Tensor"  # float32 [1, t], above 0 for supervised labels
    second_labels: "torch.Tensor"  # int64 [1, t], the token after the label
    second_mask: "torch.Tensor"  # bool [1, t], whether multi-token prediction predicts the second label
    documents: "torch.Tensor"  # int32 [1, t], index of each token's document in the pack
    cu_seqlens: "torch.Tensor"  # int32 [num_documents + 1], padded boundaries, filler documents included
    max_seqlen: int  # length of the longest padded document
    lengths: np.ndarray  # int32 [num_documents], real lengths; 0 marks a filler document
    supervised: np.ndarray  # int32 [num_documents], number of supervised labels
    sources: np.ndarray  # int32 [num_documents], index of each document's source
    num_documents: int  # number of documents, without filler documents
    num_real_tokens: int  # number of tokens of samples
    num_aligned_tokens: int  # real tokens and the padding inside documents
    num_tokens: int  # number of supervised labels
    sample_ids: tuple[int, ...]

    @property
    def loss_mask(self) -> "torch.Tensor":
        """bool [1, t]: whether the label is supervised, that is, has a weight above 0."""
        return self.loss_weights > 0

    @property
    def is_padding(self) -> "torch.Tensor":
        """bool [1, t]: whether the token is padding, in a real or in a filler document."""
        import torch

        return self.position_ids >= torch.from_numpy(self.lengths)[self.documents]
