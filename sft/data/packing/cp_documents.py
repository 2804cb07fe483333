"""The documents of a global batch and what they cost on a context-parallel group of each size, for `dynamic_cp`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sft.data.packing.cp_cost import CpCost
from sft.parallel.alignment import aligned


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents in order of falling length, and numbered in this order.

    ids         int64 [n]: their samples
    sizes       sizes of groups, rising
    units       int64 [n]: padded tokens, in units of doc_multiple
    limit       units that a rank may hold in a microbatch; a group of s ranks holds s times as many
    times       int64 [sizes, n]: nanoseconds on each rank of a group of each size
    least       int64 [n]: index in `sizes` of the smallest group that holds the document
    """

    ids: np.ndarray
    sizes: tuple[int, ...]
    units: np.ndarray
    limit: int
    times: np.ndarray
    least: np.ndarray

    @staticmethod
    def of(
        samples: Sequence[int],
        lengths: np.ndarray,
        sizes: tuple[int, ...],
        *,
        rank_tokens: int,
        doc_multiple: int,
        cost: CpCost,
    ) -> "Documents":
        """lengths 40 and 90, rank_tokens 64, doc_multiple 8, sizes 1 2 -> units 12 and 5, limit 8, least 1 and 0"""
        ids = np.asarray(samples, dtype=np.int64)
        ids = ids[np.argsort(-lengths[ids], kind="stable")]
        real, limit = lengths[ids], rank_tokens // doc_multiple
        units = aligned(real, doc_multiple) // doc_multiple
        least = np.searchsorted(np.array(sizes) * limit, units)
        assert len(ids) == 0 or least[0] < len(sizes), "no group holds the longest document"
        times = np.stack([cost.times(real, doc_multiple, size) for size in sizes])
        return Documents(ids=ids, sizes=sizes, units=units, limit=limit, times=times, least=least)

    def work(self, index: np.ndarray) -> np.ndarray:
        """int64 [n]: nanoseconds of all ranks together, if document i runs on a group of sizes[index[i]] ranks."""
        return self.times[index, np.arange(len(index))] * np.array(self.sizes)[index]

    def bound_ns(self, num_ranks: int, microbatch_ns: float) -> int:
        """Nanoseconds of a step that no assignment goes below: the work of all documents, each on the smallest group
        that holds it, shared evenly by all ranks; or the longest document on the largest group.  Either runs at least
        one microbatch, and as many as the tokens need."""
        if len(self.ids) == 0:
            return round(microbatch_ns)
        num_microbatches = -(-int(self.units.sum()) // (num_ranks * self.limit))
        work = -(-int(self.work(self.least).sum()) // num_ranks)
        return max(work, int(self.times[-1].max())) + round(num_microbatches * microbatch_ns)
