"""The calls of a library's flash kernel that compute one microbatch: the rows and the lengths of their sequences.

flash_kernel.py makes the calls.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.mcore.device import send
from sft.parallel.branches import Branches
from sft.parallel.context_parallel import runs
from sft.parallel.length_classes import length_classes
from sft.parallel.rectangles import rectangles


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

    @property
    def boundaries(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k


def parent_calls(
    branches: Branches, query_starts: np.ndarray, key_starts: np.ndarray, starts_all_blocks: bool, device: Any
) -> list[Call]:
    """The calls in which branches attend to all keys before their forks.

    query_starts       int64 [documents + 1], boundaries of the documents among all queries
    key_starts         int64 [documents], index of each parent's first key among all keys
    starts_all_blocks  whether rectangles of one call must have similar lengths (`Operators`)
    """
    counts, calls = np.diff(query_starts), list[Call]()
    for call in rectangles(branches):
        documents = [np.array(rectangle.branches) for rectangle in call]
        num_queries = np.array([counts[own].sum() for own in documents])
        num_keys = np.array([rectangle.stop - rectangle.start for rectangle in call])
        first = np.array([key_starts[rectangle.parent] + rectangle.start for rectangle in call])
        classes = length_classes(num_queries, num_keys) if starts_all_blocks else [np.arange(len(call))]
        for sequences in classes:
            own = np.concatenate([documents[sequence] for sequence in sequences])
            rows, keys = runs(query_starts[own], counts[own]), runs(first[sequences], num_keys[sequences])
            calls.append(
                Call(
                    queries=send(torch.from_numpy(rows), device),
                    keys=send(torch.from_numpy(keys), device),
                    cu_seqlens_q=_boundaries(num_queries[sequences], device),
                    cu_seqlens_k=_boundaries(num_keys[sequences], device),
                    max_seqlen_q=int(num_queries[sequences].max()),
                    max_seqlen_k=int(num_keys[sequences].max()),
                    is_causal=False,
                )
            )
    return calls


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
