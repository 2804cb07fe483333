"""The calls of a library's flash kernel that compute one microbatch: the rows and the lengths of their sequences.

flash_kernel.py makes the calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.mcore.device import send
from sft.parallel.context_parallel import runs
from sft.parallel.rectangles import Rectangle


@dataclass(frozen=True, kw_only=True)
class Call:
    """The sequences of one call of the operators.

    queries, keys  the rows of the sequences among all queries and among all keys: a slice, or int64 indices
    cu_seqlens_q   int32 [sequences + 1], boundaries of the sequences' queries among the rows of the call
    cu_seqlens_k   int32 [sequences + 1], boundaries of the sequences' keys
    is_causal      whether the last query of a sequence attends to its last key, the query before it to one key less,
                   and so on; False: all queries attend to all keys
    """

    queries: slice | Tensor
    keys: slice | Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    is_causal: bool = True

    @staticmethod
    def of(
        num_queries: np.ndarray, num_keys: np.ndarray, sequences: np.ndarray, key_order: np.ndarray, device: Any
    ) -> "Call":
        """sequences: indices; key_order: all sequences in the order of their keys"""
        return Call(
            queries=_rows(num_queries, np.arange(len(num_queries)), sequences, device),
            keys=_rows(num_keys, key_order, sequences, device),
            cu_seqlens_q=_boundaries(num_queries[sequences], device),
            cu_seqlens_k=_boundaries(num_keys[sequences], device),
            max_seqlen_q=int(num_queries[sequences].max()),
            max_seqlen_k=int(num_keys[sequences].max()),
        )

    @staticmethod
    def of_rectangles(
        rectangles: Sequence[Rectangle], query_starts: np.ndarray, key_starts: np.ndarray, device: Any
    ) -> "Call":
        """Attention of branches to their parents.

        query_starts: int64 [documents + 1], boundaries of the documents among all queries
        key_starts: int64 [documents], index of each parent's first key among all keys
        """
        documents = [np.array(rectangle.branches) for rectangle in rectangles]
        rows = [runs(query_starts[own], np.diff(query_starts)[own]) for own in documents]
        num_queries = np.array([len(own) for own in rows])
        num_keys = np.array([rectangle.stop - rectangle.start for rectangle in rectangles])
        first = np.array([key_starts[rectangle.parent] + rectangle.start for rectangle in rectangles])
        return Call(
            queries=send(torch.from_numpy(np.concatenate(rows)), device),
            keys=send(torch.from_numpy(runs(first, num_keys)), device),
            cu_seqlens_q=_boundaries(num_queries, device),
            cu_seqlens_k=_boundaries(num_keys, device),
            max_seqlen_q=int(num_queries.max()),
            max_seqlen_k=int(num_keys.max()),
            is_causal=False,
        )

    @property
    def boundaries(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k


def _rows(lengths: np.ndarray, order: np.ndarray, sequences: np.ndarray, device: torch.device) -> slice | Tensor:
    """The rows of `sequences`: a slice if they are consecutive, else indices.  order: all sequences in row order

    lengths 2, 8, 3, order 0 1 2, sequences 1 2 -> slice(2, 13); sequences 0 2 -> 0 1 10 11 12
    """
    starts = np.empty(len(lengths), dtype=np.int64)
    starts[order] = np.cumsum(lengths[order]) - lengths[order]
    own = starts[sequences], lengths[sequences]
    if (own[0][1:] == (own[0] + own[1])[:-1]).all():
        return slice(int(own[0][0]), int(own[0][-1] + own[1][-1]))
    return send(torch.from_numpy(runs(*own)), device)


def _boundaries(lengths: np.ndarray, device: torch.device) -> Tensor:
    """Lengths 2, 8 -> int32 [0, 2, 10]."""
    return send(torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)), device)
