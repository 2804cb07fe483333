"""The time of a step with megatron-core's scheduler of dynamic CP, by our cost model."""

import numpy as np

from sft.data.packing.cp_cost import CpCost


def core_ns(lengths: np.ndarray, ranks: int, rank_tokens: int, cost: CpCost) -> float:
    """Time of a step by megatron-core's scheduler: a rank runs one document after the other, and all ranks wait at the
    end of each of the scheduler's groups of documents."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler  # imports torch

    class Group:
        def size(self) -> int:
            return ranks

    scheduler = BalancedCPScheduler(rank_tokens, Group())
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    total = 0.0
    for group in groups:
        times = np.zeros(ranks)
        size_of: dict[int, int] = {}
        for ids in group:
            for i in ids:
                size_of[i] = size_of.get(i, 0) + 1
        of_document = {i: cost.times(lengths[[i]], size)[0] + cost.microbatch_ns for i, size in size_of.items()}
        for rank, ids in enumerate(group):
            times[rank] = sum(of_document[i] for i in ids)
        total += times.max()
    return total
