"""Describes one call of a library's flash kernel: the rows and the lengths of its sequences.

flash_kernel.py makes the causal calls of a microbatch.  parent_keys.py makes the calls without a mask, in which
branches attend to their parents.
"""

from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor

from sft.mcore.device import send
from sft.parallel.context_parallel import runs

Rows = Union[slice, Tensor]  # a slice, or int64 indices


@dataclass(frozen=True, kw_only=True)
class Call:
    """The sequences of one call of the operators.

    queries, keys  the rows of the sequences among all queries and among all keys
    cu_seqlens_q   int32 [sequences + 1], boundaries of the sequences' queries among the rows of the call
    cu_seqlens_k   int32 [sequences + 1], boundaries of the sequences' keys
    """

    queries: Rows
    keys: Rows
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @staticmethod
    def of(
        num_queries: np.ndarray, num_keys: np.ndarray, sequences: np.ndarray, key_order: np.ndarray, device: Any
    ) -> "Call":
        """The call of some of the sequences of a microbatch.

        num_queries, num_keys  int64 [n], numbers of queries and keys of all n sequences
        sequences              int64, indices of the sequences of this call
        key_order              int64 [n], the indices of all sequences in the order of their keys
        """
        return Call(
            queries=_rows(num_queries, np.arange(len(num_queries)), sequences, device),
            keys=_rows(num_keys, key_order, sequences, device),
            cu_seqlens_q=boundaries(num_queries[sequences], device),
            cu_seqlens_k=boundaries(num_keys[sequences], device),
            max_seqlen_q=int(num_queries[sequences].max()),
            max_seqlen_k=int(num_keys[sequences].max()),
        )

    @property
    def boundaries(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k


def _rows(lengths: np.ndarray, order: np.ndarray, sequences: np.ndarray, device: torch.device) -> Rows:
    """The rows of `sequences`.  lengths: numbers of rows of all sequences; order: all sequences in the order of rows

    lengths 2, 8, 3, order 0 1 2, sequences 1 2 -> slice(2, 13); sequences 0 2 -> 0 1 10 11 12
    """
    starts = np.empty(len(lengths), dtype=np.int64)
    starts[order] = np.cumsum(lengths[order]) - lengths[order]
    return rows_of_runs(starts[sequences], lengths[sequences], device)


def rows_of_runs(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> Rows:
    """The rows of runs: a slice if all runs are consecutive, else indices.  Indexing with a slice copies nothing."""
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    if (starts[1:] == (starts + lengths)[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1])) if len(starts) else slice(0, 0)
    return send(torch.from_numpy(runs(starts, lengths)), device)


def boundaries(lengths: np.ndarray, device: torch.device) -> Tensor:
    """The boundaries of consecutive sequences, on the device: lengths 2, 8 -> int32 [0, 2, 10]."""
    return send(torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)), device)
