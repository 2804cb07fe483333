"""The sizes of samples that plans read: tokens, padded tokens, and the cost of attention.

Most corpora have samples of one document, and plans read an array of lengths.  A sample that is a tree has several
documents.  Each document is padded by itself, and the tokens of a branch also attend to the tokens before the branch.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Union

import numpy as np

from sft.layers.flops import AttentionCost
from sft.parallel.alignment import aligned
from sft.parallel.branches import Branches
from sft.parallel.context_parallel import runs


@dataclass(frozen=True, eq=False)
class Shapes:
    """Samples whose documents may be branches.  np.asarray(shapes): the number of tokens of each sample, int64 [n].

    starts   int64 [n + 1], index of each sample's first document
    lengths  int64 [documents], number of tokens
    depths   int64 [documents], number of tokens before the document (`Branches.depths`)
    """

    starts: np.ndarray
    lengths: np.ndarray
    depths: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.sums(self.lengths).astype(dtype or np.int64)

    def __getitem__(self, samples: Any) -> "Shapes":
        """The samples of these indices, in this order."""
        numbers = np.asarray(samples, dtype=np.int64)
        first, counts = self.starts[numbers], self.starts[numbers + 1] - self.starts[numbers]
        documents = runs(first, counts)
        return Shapes(np.concatenate([[0], np.cumsum(counts)]), self.lengths[documents], self.depths[documents])

    @cached_property
    def branches(self) -> Branches:
        """Branches of all documents.  A branch gets the first document of its sample as parent, and its depth as fork.

        So depths are correct, and parents of branches of branches are not.
        """
        first = np.repeat(self.starts[:-1], np.diff(self.starts))
        return Branches(np.where(self.depths > 0, first, -1), np.asarray(self.depths, dtype=np.int64))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over the documents of each sample.  values: [documents]"""
        return np.add.reduceat(values, self.starts[:-1]) if len(self) else values[:0]


SampleSizes = Union[np.ndarray, Shapes]  # an array: the lengths of samples of one document each, int64 [n]


def longest(samples: SampleSizes) -> int:
    """The number of tokens of the longest text.  A trunk of 33 tokens and a branch of 7 with depth 20 -> 33"""
    if isinstance(samples, Shapes):
        return int((samples.lengths + samples.depths).max())
    return int(np.asarray(samples).max())


def padded(samples: SampleSizes, doc_multiple: int) -> np.ndarray:
    """int64 [n]: number of tokens of each sample in a pack, with the padding of its documents.

    two samples of 33 and 7 tokens, doc_multiple 32 -> 64, 32        one tree with documents of 33 and 7 tokens -> 96
    """
    if isinstance(samples, Shapes):
        return samples.sums(aligned(samples.lengths, doc_multiple))
    return aligned(np.asarray(samples, dtype=np.int64), doc_multiple)


def attention_cost(samples: SampleSizes, attention: AttentionCost) -> np.ndarray:
    """float64 [n]: the cost of attention over each sample, in tokens (`AttentionCost`)."""
    if isinstance(samples, Shapes):
        return samples.sums(attention(samples.lengths, samples.depths))
    return attention(np.asarray(samples, dtype=np.int64))
