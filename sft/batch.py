"""The types that data and model share: sample, pack and microbatch.

    Sample      one tokenised conversation                               (numpy, no padding)
    Pack        documents laid end to end, each padded to doc_multiple   (numpy, every rank the same)
    Microbatch  the part of a pack that one context-parallel rank holds  (torch, what the model sees)

Labels are shifted once, when a Pack is made and before any slicing (sft/data/packing/pack.py), so that no
context-parallel rank ever needs its neighbour's token.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One conversation.

    tokens   int32 [n]
    weights  float32 [n], above 0 for tokens to be learnt: what the assistant wrote, its end-of-turn token included
    source   index of its source of data.train, or of its data file
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
    """Documents laid end to end, each padded to `doc_multiple`; labels already shifted, per document.

        documents [5, 6, 7] and [8, 9], doc_multiple 4, the first supervised from token 6 on, the second nowhere
        tokens       5 6 7 0  8 9 0 0
        labels       6 7 0 0  9 0 0 0
        loss_weights 1 1 0 0  0 0 0 0
        position_ids 0 1 2 3  0 1 2 3
        cu_seqlens   0 4 8
        lengths      3 2

    The first four arrays are [t] over the padded tokens: int32, int32, float32, int32.
    cu_seqlens  int32 [num_documents + 1], padded boundaries
    lengths     int32 [num_documents], real lengths; 0 marks a filler document
    sources     int32 [num_documents], which source; 0 for filler
    sample_ids  which sample each real document is, in order
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
        """bool [t]: supervised, that is, of a weight above 0."""
        return self.loss_weights > 0

    @property
    def documents(self) -> np.ndarray:
        """int32 [t]: which document each token belongs to, its padding included."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), np.diff(self.cu_seqlens))

    @property
    def max_seqlen(self) -> int:
        """Longest padded document (not the pack's length: that would move RoPE to other positions)."""
        return int(np.diff(self.cu_seqlens).max())


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """The tokens of one pack that one context-parallel rank holds, in zigzag order; t = pack length / cp.

    Fields without shape [1, t] describe the whole pack, and are the same on every context-parallel rank.
    """

    tokens: torch.Tensor  # int64 [1, t]
    labels: torch.Tensor  # int64 [1, t]
    position_ids: torch.Tensor  # int64 [1, t]
    loss_weights: torch.Tensor  # float32 [1, t], above 0 where supervised
    documents: torch.Tensor  # int32 [1, t], which document of the pack each token belongs to
    cu_seqlens: torch.Tensor  # int32 [num_documents + 1], filler included
    max_seqlen: int  # longest padded document
    lengths: np.ndarray  # int32 [num_documents], real lengths; 0: filler
    supervised: np.ndarray  # int32 [num_documents], supervised labels
    sources: np.ndarray  # int32 [num_documents]
    num_documents: int  # real documents
    num_real_tokens: int  # tokens of samples
    num_aligned_tokens: int  # with padding to doc_multiple
    num_tokens: int  # supervised labels
    sample_ids: tuple[int, ...]

    @property
    def loss_mask(self) -> torch.Tensor:
        """bool [1, t]: supervised, that is, of a weight above 0."""
        return self.loss_weights > 0

    @property
    def is_padding(self) -> torch.Tensor:
        """bool [1, t]: whether the token is padding, inside a document or as filler."""
        return self.position_ids >= torch.from_numpy(self.lengths)[self.documents]
