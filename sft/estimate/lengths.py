"""The distribution of document lengths, from which time and memory of attention are predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sft.errors import ConfigError
from sft.layers.flops import AttentionCost
from sft.layers.rank_share import RankShare
from sft.layers.tree_share import TreeDocuments, TreeShare
from sft.parallel.length_classes import BLOCK, may_pay
from sft.parallel.shapes import SampleSizes, Shapes, attention_cost

MAX_BINS = 64  # most bins of a corpus' lengths; a bin has the root mean square of the lengths of its documents


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths.

    tokens  lengths of documents, float64 [n]
    shares  share of the documents with each length, float64 [n]; their sum is 1
    trees   the trees of the corpus, divided by its number of tokens
    """

    tokens: np.ndarray
    shares: np.ndarray
    trees: TreeShare = field(default_factory=TreeShare)

    @staticmethod
    def all_of(length: int) -> "Lengths":
        """The distribution in which all documents have this length."""
        return Lengths(np.array([float(length)]), np.ones(1))

    @staticmethod
    def of_corpus(samples: SampleSizes) -> "Lengths":
        """The distribution of a corpus.  Raises ConfigError if no document has tokens.

        A tree counts as several documents of one length, with the same sum of tokens and the same cost of attention as
        the tree.  The estimate of memory reads the real documents of trees from `trees`.

        a document of 6 tokens, and a branch of 4 after its first 4 -> 10 / 8.4 documents of 8.4 tokens: attention costs
        6^2 + 8^2 - 4^2 = 84 = (10 / 8.4) x 8.4^2

        If there are more than MAX_BINS different lengths, they are put into at most MAX_BINS bins, whose edges form a
        geometric series.
        """
        tokens = np.asarray(samples).astype(np.float64)
        is_used = tokens > 0
        tokens, squares = tokens[is_used], attention_cost(samples, AttentionCost(crossover=1.0))[is_used]
        if len(tokens) == 0:
            raise ConfigError("no document has tokens, so there is no distribution of lengths.")
        values, number = np.unique(squares / tokens, return_inverse=True)
        counts = np.bincount(number, tokens**2 / squares)
        if len(values) > MAX_BINS:
            edges = np.geomspace(values[0], values[-1], MAX_BINS + 1)[1:-1]
            bins = np.digitize(values, edges)
            totals = np.bincount(bins, counts, MAX_BINS)
            squares = np.bincount(bins, counts * values**2, MAX_BINS)
            used = totals > 0
            values, counts = np.sqrt(squares[used] / totals[used]), totals[used]
        return Lengths(values, counts / counts.sum(), _trees(samples).times(1 / float(tokens.sum())))

    @staticmethod
    def read(text: str) -> "Lengths":
        """The distribution that a text describes.  Raises ConfigError if it describes none.

        "128:0.2,4096:0.5" -> lengths 128 and 4096, shares 2/7 and 5/7
        """
        try:
            pairs = [part.split(":") for part in text.split(",")]
            tokens, weights = np.array([[float(length), float(share)] for length, share in pairs]).T
        except ValueError:
            tokens, weights = np.zeros(1), np.zeros(1)
        if not ((tokens >= 1).all() and (weights >= 0).all() and weights.sum() > 0):
            raise ConfigError(
                f"lengths {text} cannot be read.  Write LENGTH:SHARE,LENGTH:SHARE, such as 128:0.2,4096:0.5."
            )
        return Lengths(tokens, weights / weights.sum())

    def of_pack(self, seq_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths, and the average number of documents of each length in a full pack: two arrays float64 [n].

        A document that is longer than seq_length counts as seq_length tokens.
        lengths [2, 6], shares [1/2, 1/2], packs of 8 -> [2, 6], [1, 1]
        """
        tokens = np.minimum(self.tokens, seq_length)
        return tokens, self.shares * seq_length / float(self.shares @ tokens)

    def of_rank(self, rank: RankShare, seq_length: int, sizes: Sequence[int] | None = None) -> RankShare:
        """`rank` with the documents and the trees of an average pack.

        A document on s of the cp ranks is on a given rank with probability s / cp: as two chunks, or whole if s is 1.

        sizes: the CP size of each length of `of_pack`; None: rank.cp
        lengths 2 and 6, packs of 8, cp 2, sizes 1 and 2 -> 0.5 + 2 sequences on the rank, 1.25 documents
        """
        tokens, counts = self.of_pack(seq_length)
        size = np.full(len(tokens), rank.cp) if sizes is None else np.array(sizes)
        counts = counts * size / rank.cp
        chunk, split = np.where(size > 1, tokens / (2 * size), tokens), size > 1
        # (keys, queries) of the late chunk or of a whole document, then of the early chunk.
        pairs = np.concatenate([np.stack([tokens, chunk], axis=1), np.stack([chunk, chunk], axis=1)[split]])
        number = np.concatenate([counts, counts[split]])
        is_uneven = may_pay(np.ceil(pairs / BLOCK), number, seq_length / rank.cp)
        trees = self.trees.times(seq_length)
        documents = float(number.sum()) / (2 if rank.cp > 1 else 1) + trees.branches
        return replace(rank, documents=max(1.0, documents), is_uneven=is_uneven, trees=trees)


def _trees(samples: SampleSizes) -> TreeShare:
    """All trees of a corpus.  Documents of 2^i .. 2^(i + 1) - 1 tokens are a group.

    Branches of one sample with the same depth count as if they had the same parent and fork.
    """
    if not isinstance(samples, Shapes):
        return TreeShare()
    counts = np.diff(samples.starts)
    of_sample = np.repeat(np.arange(len(counts)), counts)
    is_branch, is_used = samples.depths > 0, (samples.lengths > 0) & (counts > 1)[of_sample]
    forks = np.unique(np.stack([of_sample, samples.depths])[:, is_branch], axis=1)
    size = np.log2(np.maximum(samples.lengths, 1)).astype(int)
    groups = [
        TreeDocuments(float(chosen.sum()), float(samples.lengths[chosen].mean()), float(samples.depths[chosen].mean()))
        for kind in (is_branch, ~is_branch)
        for exponent in np.unique(size[kind & is_used])
        for chosen in [kind & is_used & (size == exponent)]
    ]
    keys = np.maximum.reduceat(samples.depths, samples.starts[:-1]).sum() if len(counts) else 0
    return TreeShare(tuple(groups), float(forks.shape[1]), float(keys))
