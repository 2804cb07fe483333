"""Levels the packs of a global batch, for ranks that wait for each other in every microbatch.

A row is the packs of one microbatch on all ranks, and takes as long as its costliest pack.  Packs are sorted by cost,
so that packs of about equal cost share a row, which is the best order of given packs.  Then the sequences of a row's
costliest pack and of another pack are distributed anew, while this lowers the sum of the rows' largest costs.
"""

import numpy as np

from sft.data.packing.pair_split import PairSplitter

LEVEL = 0.002  # a row is level if its largest cost exceeds its mean by at most this share
MAX_SPLITS, NUM_PARTNERS = 400, 6  # limits of the time: all splits, and packs with which a costliest pack is split


def level(packs: list[list[int]], costs: np.ndarray, splitter: PairSplitter, dp: int) -> list[list[int]]:
    """Exchanges sequences between packs, to lower the sum over rows of the largest cost of a pack.  Returns the packs.

    packs: the sequences of each pack; costs: int64 [n], cost of each sequence

    Costs 5 3 1 1, packs (0,) (1, 2) (3,) () of costs 5 4 1 0, dp 2 -> the same packs: 5 + 1 cannot be lowered
    """
    packs = list(packs)
    cost = np.array([int(costs[pack].sum()) for pack in packs])
    leveled, budget = set[int](), splitter.num_splits + MAX_SPLITS
    while splitter.num_splits < budget and len(leveled) < len(packs) // dp:
        order = np.argsort(-cost, kind="stable")
        rows = cost[order].reshape(-1, dp)
        means = rows.mean(axis=1)
        excess = rows[:, 0] - means
        excess[list(leveled)] = -1
        row = int(excess.argmax())
        changed = None
        if excess[row] > means[row] * LEVEL:
            changed = _changed(packs, costs, cost, splitter, order.reshape(-1, dp), int(means[row]), row)
        if changed is None:
            leveled.add(row)
        else:
            leveled.clear()
            for pack, sequences in changed.items():
                packs[pack], cost[pack] = sequences, costs[sequences].sum()
    return packs


def _changed(
    packs: list[list[int]],
    costs: np.ndarray,
    cost: np.ndarray,
    splitter: PairSplitter,
    order: np.ndarray,
    mean: int,
    row: int,
) -> dict[int, list[int]] | None:
    """New sequences for two packs, by pack, which lower the sum of the rows' largest costs; None if no change does.

    One is the costliest pack of `row`; the other is one of the cheapest and middle packs of all rows, tried in the
    order of their distance from the row's mean cost `mean`.
    cost: cost of each pack; order: numbers of packs [rows, dp], falling in cost
    """
    dp, first = order.shape[1], int(order[row, 0])
    before = cost[order[:, 0]].sum()
    partners = [pack for pack in order[:, sorted({dp - 1, dp // 2})].ravel().tolist() if cost[pack] < cost[first]]
    for other in sorted(partners, key=lambda pack: (abs(int(cost[pack]) - mean), pack))[:NUM_PARTNERS]:
        split = splitter.split(packs[first], packs[other], max(mean, int(cost[first] + cost[other]) // 2))
        if split:
            after = cost.copy()
            after[[first, other]] = [costs[part].sum() for part in split]
            if -np.sort(-after)[::dp].sum() < before:
                return {first: split[0], other: split[1]}
    return None
