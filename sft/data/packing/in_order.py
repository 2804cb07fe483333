"""Plans packs for a pass over all samples in their order, so that each global batch has consecutive samples."""

import numpy as np

from sft.data.packing.plan import PackingPlan, plan_of
from sft.parallel.shapes import SampleSizes, padded


def plan_in_order(lengths: SampleSizes, *, capacity: int, doc_multiple: int, global_batch_size: int) -> PackingPlan:
    """The plan of such a pass.  Every global batch has `global_batch_size` packs, some of which may be empty.

    A sample goes into the fullest pack of the current global batch that has room for it; if none has, the next global
    batch begins.

        lengths [40, 70, 60, 10], capacity 128, doc_multiple 32, global_batch_size 1 (padded lengths: 64 96 64 32)
        -> packs (0), (1), (2, 3)
    """
    left = [capacity] * global_batch_size
    pack_of, first = [], 0
    for size in padded(lengths, doc_multiple).tolist():
        fitting = [(free, pack) for pack, free in enumerate(left) if free >= size]
        if not fitting:
            first, left = first + global_batch_size, [capacity] * global_batch_size
            fitting = [(capacity, 0)]
        free, pack = min(fitting)
        left[pack] = free - size
        pack_of.append(first + pack)
    order = np.argsort(pack_of, kind="stable")
    counts = np.bincount(pack_of, minlength=first + global_batch_size)
    return plan_of(order, counts, lengths, capacity, doc_multiple)
