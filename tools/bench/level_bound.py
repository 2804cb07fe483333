"""The bound of a step with dynamic CP whose ranks all wait for each other after every microbatch."""

import numpy as np

from sft.data.packing.cp_cost import CpCost, Documents


def level_bound(documents: Documents, num_ranks: int, cost: CpCost) -> float:
    """Nanoseconds of a step whose ranks all wait after every microbatch, which no plan goes below.

    Of documents that need all cp ranks, num_ranks / cp fit in a microbatch, which takes as long as the longest of them.
    The k longest such microbatches hold at most the costliest tokens that fit, and all other work follows."""
    sizes, index = np.array(documents.sizes), documents.least
    work = documents.work(index)
    order = np.argsort(-work / documents.units, kind="stable")
    tokens, held = (np.concatenate([[0], np.cumsum(of[order])]) for of in (documents.units, work))
    longest = -np.sort(-documents.times[-1][index == len(sizes) - 1])[:: num_ranks // sizes[-1]]
    least = -(-int(tokens[-1]) // (num_ranks * documents.limit))
    most = np.interp(np.arange(len(longest) + 1) * num_ranks * documents.limit, tokens, held)
    times = np.concatenate([[0], np.cumsum(longest)]) + (held[-1] - most) / num_ranks
    return float(times.max()) + least * cost.microbatch_ns
