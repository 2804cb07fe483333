"""Places short documents in bins with unequal work, so that the work becomes even, for `cp_ranks.py` and `cp_rows.py`.

Documents are placed costliest first.  Each goes to the bin with the least work among the bins with room (LPT, Graham
1969).  A batch may have 70,000 short documents, and a heap takes microseconds for each.  So numpy places many documents
at once (a round) where it can.  In a round, the least loaded bin gets a document, and so does each bin whose work is
less than the work of the least loaded bin with its document.  None of these bins would get a second document before
all have one, so a round places documents as the heap does.
"""

import heapq

import numpy as np

from sft.data.packing.cp_cost import Documents

ROUND = 64  # a round of at least this many bins is faster than the heap
BY_HEAP = 2048  # number of documents that the heap places before a round is tried again, and at the end


def fill(
    documents: Documents, numbers: np.ndarray, load: np.ndarray, left: np.ndarray, levels: np.ndarray, extra: int
) -> np.ndarray:
    """Places documents in bins.  Returns int64 [n]: the bin of each, or -1 if no bin has room.  Updates load and left.

    times 5 4 3 3, loads 0 2, room for all -> bins 0 1 0 1, loads 8 9

    numbers  int64 [n]: numbers of the documents, the costliest first
    load     int64 [bins]: work of each bin so far, in ns
    left     int64 [bins]: units that still fit into each bin
    levels   int64 [bins]: index in documents.sizes of the size of each bin's group
    extra    units that the bin with the most room gets in addition if no bin has room for a document; 0: the document
             gets no bin
    """
    bins = np.full(len(numbers), -1, dtype=np.int64)
    units, times = documents.units[numbers], documents.times[:, numbers]
    most = np.maximum.accumulate(units[::-1])[::-1]  # a costlier document with a tree may have fewer units
    placed = 0
    while placed < len(numbers):
        chosen = _round(load, left, int(most[placed]), times[levels, placed])
        number = min(len(chosen), len(numbers) - placed - BY_HEAP)
        if number >= ROUND:
            chosen, now = chosen[:number], slice(placed, placed + number)
            bins[now] = chosen
            load[chosen] += times[levels[chosen], np.arange(placed, placed + number)]
            left[chosen] -= units[now]
        else:
            number = min(BY_HEAP, len(numbers) - placed)
            now = slice(placed, placed + number)
            bins[now] = _by_heap(units[now], times[:, now], load, left, levels, extra)
        placed += number
    return bins


def _round(load: np.ndarray, left: np.ndarray, units: int, times: np.ndarray) -> np.ndarray:
    """The bins that get a document in a round, the least loaded first.

    units  the most units of a document of the round
    times  [bins]: the time that the next document takes in each bin

    load 0 1 4 9, times 5 5 5 5, room for all -> 0 1 2
    """
    roomy = np.flatnonzero(left >= units)
    if len(roomy) == 0:
        return roomy
    ordered = roomy[np.argsort(load[roomy], kind="stable")]
    return ordered[: int(np.searchsorted(load[ordered], load[ordered[0]] + times[ordered[0]]))]


def _by_heap(
    units: np.ndarray, times: np.ndarray, load: np.ndarray, left: np.ndarray, levels: np.ndarray, extra: int
) -> list[int]:
    loads, free, level = load.tolist(), left.tolist(), levels.tolist()
    first = int(units[0])
    is_roomy = left >= first
    roomy, others = np.flatnonzero(is_roomy), np.flatnonzero(~is_roomy)
    least = list(zip(load[roomy].tolist(), roomy.tolist()))
    full = list(zip((-left[others]).tolist(), others.tolist()))  # bins that had no room
    heapq.heapify(least)
    heapq.heapify(full)
    bins = []
    for size, time in zip(units.tolist(), times.T.tolist()):
        while full and -full[0][0] >= size:
            k = heapq.heappop(full)[1]
            heapq.heappush(least, (loads[k], k))
        while least and free[least[0][1]] < size:
            k = heapq.heappop(least)[1]
            heapq.heappush(full, (-free[k], k))
        if not least:
            if not extra:
                bins.append(-1)
                continue
            k = heapq.heappop(full)[1]
            free[k] += extra
            heapq.heappush(least, (loads[k], k))
        k = least[0][1]
        loads[k] += time[level[k]]
        free[k] -= size
        heapq.heapreplace(least, (loads[k], k))
        bins.append(k)
    changed = sorted(set(bins) - {-1})
    load[changed], left[changed] = [loads[k] for k in changed], [free[k] for k in changed]
    return bins
