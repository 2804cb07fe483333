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

from sft.parallel.branches import Branches

if TYPE_CHECKING:
    import torch  # takes a second, which errors about data need not wait for


@dataclass(frozen=True, eq=False)
class Tree:
    """Several texts, such as the renderings of a chat for each of its turns, whose common beginnings are stored once.

    The documents of the tree are stored one after the other, a parent before its branches.  A text consists of the
    documents from the trunk to the document in which it ends, each up to the fork of the next one.

    starts        int64 [documents + 1], boundaries of the documents in the sample's tokens
    branches      the parents of the documents
    ends          int64 [texts, 2], the document in which each text ends, and the number of that document's tokens that
                  the text contains
    spans         int64 [spans, 3]: text, start, stop.  The text supervises tokens[start:stop] of the sample
    span_weights  float32 [spans], above 0, weight of the span's tokens
    repeated      bool [spans]: an earlier sample of the same row supervises the span's tokens, because the tree of the
                  row was too large for a pack; None: no span
    """

    starts: np.ndarray
    branches: Branches
    ends: np.ndarray
    spans: np.ndarray
    span_weights: np.ndarray
    repeated: np.ndarray | None = None

    @property
    def num_rendered(self) -> int:
        """The number of tokens of all texts, if each is counted by itself."""
        return int((self.branches.depths[self.ends[:, 0]] + self.ends[:, 1]).sum())


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One tokenised row, or one window of it.

    tokens   int32 [n]
    weights  float32 [n], above 0 for supervised tokens.  With a tree, the weight that the first text that supervises a
             token gives to it; the tree has the weights of all texts
    source   index of the sample's source in data.train, or of its data file
    tree     None: the tokens are one text
    teacher  a teacher's distributions [m] (`data/teacher/distributions.py`), one for each supervised token except the
             first token, in order; None: the sample has none
    """

    sample_id: int
    tokens: np.ndarray
    weights: np.ndarray
    source: int = 0
    tree: Tree | None = None
    teacher: np.ndarray | None = None

    @property
    def labels(self) -> np.ndarray:
        """int64 [m]: the indices of the supervised tokens without the first token, which is never a label."""
        return np.flatnonzero(self.weights[1:]) + 1

    @property
    def num_supervised(self) -> int:
        """The number of supervised tokens without the first token, which is never a label."""
        return int(np.count_nonzero(self.weights[1:]))


@dataclass(frozen=True, eq=False)
class BranchTargets:
    """Further targets of tokens before a branch: `Pack.labels` holds one target of such a token, and these are the
    first tokens of its other branches.

    rows     int64 [m], index of the token before the branch
    labels   int64 [m], the branch's first token
    weights  float32 [m], above 0, weight of the label in the loss
    counts   int32 [m], number of texts that supervise the label
    """

    rows: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    counts: np.ndarray


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

    Each document of a `Tree` is a document of the pack.  The label of a token before a branch is the next token of its
    document if that is supervised, else the first token of a branch if that is supervised.

    The first four arrays have shape [t], where t counts padded tokens: int32, int32, float32, int32.
    cu_seqlens  int32 [num_documents + 1], padded boundaries
    lengths     int32 [num_documents], real lengths; 0 marks a filler document
    sources     int32 [num_documents], index of each document's source; 0 for a filler document
    sample_ids  the samples, in order; each has one document, or those of its tree

    These are None in a pack without trees:
    branches       the parents of the documents
    firsts         int64 [documents], index of the first document of each document's sample
    texts          int64 [texts, 2], the document in which each text ends, and the number of its tokens in the text
    label_counts   int32 [t], number of texts that supervise the label
    further        further targets of tokens before a branch; rows are indices in the pack
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_weights: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    lengths: np.ndarray
    sources: np.ndarray
    sample_ids: tuple[int, ...]
    branches: Branches | None = None
    firsts: np.ndarray | None = None
    texts: np.ndarray | None = None
    label_counts: np.ndarray | None = None
    further: BranchTargets | None = None

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
        """Length of the longest padded document, with the tokens before a branch.

        Attention kernels get this length and not the pack's length, because positions restart in each document.
        """
        depths = 0 if self.branches is None else self.branches.depths
        return int((np.diff(self.cu_seqlens) + depths).max())


@dataclass(frozen=True, eq=False)
class TeacherTargets:
    """A teacher's distribution of the token after each of t tokens: its k most probable outcomes, for distillation.

        k = 2; the second token has no teacher
        ids       [[7, 2], [-1, -1], [4, -1]]
        logprobs  [[-0.1, -2.5], [0, 0], [0, 0]]

    ids       int32 [t, k], the outcomes by falling log-probability, different ids in a row.  -1 fills rows with fewer
              than k outcomes; a row of -1 has no teacher
    logprobs  float32 [t, k], log-probabilities of the outcomes at temperature 1, at most 0; not read where the id is -1
    """

    ids: "torch.Tensor"
    logprobs: "torch.Tensor"

    @property
    def has_teacher(self) -> "torch.Tensor":
        """bool [t]: whether the teacher's distribution of the token is known."""
        return self.ids[:, 0] >= 0

    def __getitem__(self, rows: "torch.Tensor | slice") -> "TeacherTargets":
        """The targets of the tokens `rows`, an index of the first dimension."""
        return TeacherTargets(ids=self.ids[rows], logprobs=self.logprobs[rows])


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
    max_seqlen: int  # length of the longest padded document, with the tokens before a branch
    lengths: np.ndarray  # int32 [num_documents], real lengths; 0 marks a filler document
    supervised: np.ndarray  # int32 [num_documents], supervised labels; those of a tree count at its first document
    sources: np.ndarray  # int32 [num_documents], index of each document's source
    num_documents: int  # number of samples: documents and trees, without filler documents
    num_real_tokens: int  # number of tokens of samples
    num_aligned_tokens: int  # real tokens and the padding inside documents
    num_tokens: int  # number of supervised labels
    sample_ids: tuple[int, ...]
    # None in a pack without trees.  `branches`, `firsts` and `texts` describe the whole pack, `label_counts` and
    # `further` this rank's tokens.
    branches: Branches | None = None
    firsts: np.ndarray | None = None
    texts: np.ndarray | None = None
    label_counts: "torch.Tensor | None" = None  # int32 [1, t]
    further: BranchTargets | None = None
    teacher: TeacherTargets | None = None  # of this rank's t tokens; None: no token has a teacher

    @property
    def loss_mask(self) -> "torch.Tensor":
        """bool [1, t]: whether the label is supervised, that is, has a weight above 0."""
        return self.loss_weights > 0

    @property
    def samples_of_documents(self) -> np.ndarray:
        """int64 [documents]: the index in `sample_ids` of each document's sample; above all of these for filler."""
        firsts = np.arange(len(self.lengths)) if self.firsts is None else self.firsts
        return np.unique(firsts, return_inverse=True)[1]

    @property
    def target_rows(self) -> np.ndarray:
        """int64 [n + m]: the index on this rank of each target's token: of the n supervised labels, then of the m
        further targets."""
        further = [] if self.further is None else [self.further.rows]
        return np.concatenate([np.flatnonzero(self.loss_weights.numpy()), *further])

    @property
    def target_counts(self) -> np.ndarray:
        """int64 [n + m]: number of texts that supervise each target of `target_rows`; 1 without trees."""
        rows = np.flatnonzero(self.loss_weights.numpy())
        if self.label_counts is None or self.further is None:
            return np.ones(len(rows), dtype=np.int64)
        return np.concatenate([self.label_counts.numpy().ravel()[rows], self.further.counts]).astype(np.int64)

    def denominator(self, kind: str) -> float:
        """The contribution of this rank's targets to the denominator of the objective.

        kind: `loss.denominator`, "weights" for the sum of their weights, "tokens" for their number
        """
        if kind == "weights":
            import torch

            further = 0.0 if self.further is None else self.further.weights.sum(dtype=np.float64)
            return float(self.loss_weights.sum(dtype=torch.float64) + further)
        return float(self.target_counts.sum())

    @property
    def num_rendered_tokens(self) -> int:
        """The number of tokens of all texts of the pack, if each is counted by itself."""
        if self.branches is None or self.texts is None:
            return self.num_real_tokens
        return int((self.branches.depths[self.texts[:, 0]] + self.texts[:, 1]).sum())

    @property
    def is_padding(self) -> "torch.Tensor":
        """bool [1, t]: whether the token is padding, in a real or in a filler document."""
        import torch

        ends = self.lengths if self.branches is None else self.branches.depths + self.lengths
        return self.position_ids >= torch.from_numpy(ends)[self.documents]
