"""Computes a lower bound of the time of a step with dynamic CP if ranks wait for each other after each microbatch."""

import numpy as np

from sft.data.packing.cp_cost import Documents


def waiting_bound_ns(documents: Documents, num_ranks: int) -> float:
    """A lower bound of the time of a step in ns, if all ranks wait for each other after every microbatch.

    A block is as many consecutive ranks as the largest group; a microbatch has num_ranks / block blocks.  A block
    holds at most one of the documents that need all its ranks, and beside it only documents that fit into its
    remaining room.  This limits the work of a block, and also that of the k longest microbatches, for each k.  They
    take at least as long as the longest documents that need whole blocks, in order of length.  The ranks share all
    other work evenly.  The bound is the largest time over k.
    """
    units, work, last = documents.units, documents.work(documents.least), len(documents.sizes) - 1
    if len(units) == 0:
        return documents.microbatch_ns
    block = documents.sizes[last] * documents.limit
    blocks = num_ranks // documents.sizes[last]
    longest = -np.sort(-documents.times[last][documents.least == last])[::blocks]
    longest = longest if len(longest) else documents.times.min(axis=0)[:1]
    count = np.arange(len(longest) + 1)
    # The most work per unit among the documents that have at most this many units.
    density = np.maximum.accumulate((work / units)[::-1])
    fitting = np.searchsorted(units[::-1], np.minimum(block - units, units), side="right")
    beside = np.where(fitting > 0, density[np.maximum(fitting, 1) - 1], 0.0) * (block - units)
    of_blocks = np.maximum.accumulate((work + beside)[::-1])[::-1]
    held = np.concatenate([[0.0], np.cumsum(of_blocks)])[np.minimum(count * blocks, len(units))]
    order = np.argsort(-work / units, kind="stable")
    tokens, costliest = (np.concatenate([[0], np.cumsum(of[order])]) for of in (units, work))
    held = np.minimum(held, np.interp(count * num_ranks * documents.limit, tokens, costliest))
    times = np.concatenate([[0], np.cumsum(longest)]) + (costliest[-1] - held) / num_ranks
    least = -(-int(tokens[-1]) // (num_ranks * documents.limit))
    return float(times.max()) + least * documents.microbatch_ns
