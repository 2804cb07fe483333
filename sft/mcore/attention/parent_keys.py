"""Adds the keys before a branch to the attention of the branch, by further calls of a library's flash kernel.

A branch (sft/parallel/branches.py) attends to its own document in a causal call (flash_kernel.py), and to the tokens
of its ancestors in calls without a mask (sft/parallel/rectangles.py).  Two results for the same queries are merged
exactly, by their log-sum-exps:

    lse = logaddexp(lse1, lse2)    out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)

Backward gives `out` and `lse` of all keys to each call, and adds the gradients.  Sums are in fp32, and only for the
rows that several calls compute: the queries of branches, and the keys of parents up to their last fork.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.mcore.attention.flash_call import Call, Rows, boundaries, rows_of_runs
from sft.parallel.branches import Branches
from sft.parallel.length_classes import length_classes
from sft.parallel.rectangles import rectangles


@dataclass(frozen=True, kw_only=True)
class ParentKeys:
    """The calls in which branches attend to their ancestors.

    calls    the calls; their rows are indices into `queries` and `keys`
    queries  the rows of branches among all queries
    keys     the rows of keys before forks among all keys
    is_copy  whether these keys are copies that only these calls use, and no causal call
    """

    calls: Sequence[Call]
    queries: Rows = field(default_factory=lambda: slice(0, 0))
    keys: Rows = field(default_factory=lambda: slice(0, 0))
    is_copy: bool = False

    @staticmethod
    def of(
        branches: Branches,
        query_starts: np.ndarray,
        key_starts: np.ndarray,
        *,
        is_copy: bool,
        starts_all_blocks: bool,
        device: torch.device,
    ) -> "ParentKeys":
        """The calls of a pack on one rank.

        query_starts       int64 [documents + 1], boundaries of the documents among all queries
        key_starts         int64 [documents], index of each document's first key among all keys
        starts_all_blocks  whether rectangles of one call must have similar lengths (`Operators`)
        """
        is_branch = branches.parents >= 0
        num_queries, num_keys = np.diff(query_starts) * is_branch, last_forks(branches)
        first_query, first_key = (np.cumsum(counts) - counts for counts in (num_queries, num_keys))
        calls = list[Call]()
        for call in rectangles(branches):
            documents = [np.array(rectangle.branches) for rectangle in call]
            counts = np.array([num_queries[own].sum() for own in documents])
            lengths = np.array([rectangle.stop - rectangle.start for rectangle in call])
            first = np.array([first_key[rectangle.parent] + rectangle.start for rectangle in call])
            classes = length_classes(counts, lengths) if starts_all_blocks else [np.arange(len(call))]
            for sequences in classes:
                own = np.concatenate([documents[sequence] for sequence in sequences])
                calls.append(
                    Call(
                        queries=rows_of_runs(first_query[own], num_queries[own], device),
                        keys=rows_of_runs(first[sequences], lengths[sequences], device),
                        cu_seqlens_q=boundaries(counts[sequences], device),
                        cu_seqlens_k=boundaries(lengths[sequences], device),
                        max_seqlen_q=int(counts[sequences].max()),
                        max_seqlen_k=int(lengths[sequences].max()),
                    )
                )
        return ParentKeys(
            calls=calls,
            queries=rows_of_runs(query_starts[:-1], num_queries, device),
            keys=rows_of_runs(key_starts, num_keys, device),
            is_copy=is_copy,
        )

    def add(self, forward: Callable[..., Any], inputs: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
        """Add the keys before branches to the softmax of the branches, in `out` [t, heads, d] and `lse` [heads, t].

        forward: the operator, with all other arguments; inputs: query, keys and values
        """
        query, keys, values = (x[rows] for x, rows in zip(inputs, (self.queries, self.keys, self.keys)))
        total, sums = out[self.queries].to(lse.dtype, copy=True), lse[:, self.queries].clone()
        for call in self.calls:
            q, k = call.queries, call.keys
            _merge(total, sums, q, *forward(query[q], keys[k], values[k], *call.boundaries, causal=False))
        out[self.queries], lse[:, self.queries] = total.to(out.dtype), sums

    def add_gradients(
        self, backward: Callable[..., Any], inputs: Sequence[Tensor], gradients: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        """Add the gradients of all calls to `gradients`: those of query, keys and values.

        backward: the operator, with all other arguments
        inputs: grad, query, keys, values, out and log-sum-exp; dtype: the dtype in which gradients are summed
        """
        grad, query, keys, values, out, lse = inputs
        of_queries, (keys, values) = [x[self.queries] for x in (grad, query, out)], (
            x[self.keys] for x in (keys, values)
        )
        sums, rows = lse[:, self.queries], (self.queries, self.keys, self.keys)
        is_new = False, self.is_copy, self.is_copy
        totals = [
            torch.zeros_like(x[own], dtype=dtype) if new else x[own].to(dtype, copy=True)
            for x, own, new in zip(gradients, rows, is_new)
        ]
        for call in self.calls:
            q, k = call.queries, call.keys
            own_grad, own_query, own_out = (x[q] for x in of_queries)
            tensors = own_grad, own_query, keys[k], values[k], own_out, sums[:, q].contiguous()
            for total, own, part in zip(totals, (q, k, k), backward(*tensors, *call.boundaries, causal=False)):
                if isinstance(own, slice):
                    total[own].add_(part)
                else:  # no row occurs twice in a call
                    total.index_add_(0, own, part.to(dtype))
        for x, own, total in zip(gradients, rows, totals):
            x[own] = total.to(x.dtype)


def _merge(total: Tensor, sums: Tensor, rows: Rows, part: Tensor, part_sums: Tensor) -> None:
    """Add a call's result for these rows to outputs [t, heads, d] and log-sum-exps [heads, t]."""
    before = sums[:, rows]
    after = torch.logaddexp(before, part_sums)
    own, other = (torch.exp(x - after).t()[:, :, None] for x in (before, part_sums))  # [n, heads, 1]
    merged = total[rows].mul_(own).addcmul_(part, other)
    if not isinstance(rows, slice):
        total.index_copy_(0, rows, merged)
    sums[:, rows] = after


def last_forks(branches: Branches) -> np.ndarray:
    """The number of tokens of each document to which branches attend: int64 [documents]."""
    last = np.zeros(len(branches), dtype=np.int64)
    is_branch = branches.parents >= 0
    np.maximum.at(last, branches.parents[is_branch], branches.forks[is_branch])
    return last
