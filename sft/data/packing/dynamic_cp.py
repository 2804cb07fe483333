"""Decides for each pack of a global batch how many context-parallel ranks compute it (its CP size), and which ranks.

Also decides which samples share a pack, and in which microbatch each pack runs.  `plan.py` decides which samples a
global batch has; this module does not change that.

The dp x cp grid has dp rows of cp ranks.  A group of s ranks is s consecutive ranks of a row, and begins at a multiple
of s.  So groups nest: a small group lies within one group of each larger size.

    cp 4, dp 1    microbatch 0   a a a a      a: a document that needs four ranks
                  microbatch 1   b b c d      b: a document that needs two ranks; c, d: packs of short documents
                  microbatch 2   e f g -      -: a pack of filler

Two methods place the documents.  In both, a pack takes a predicted time (`cp_cost.py`).

    groups  every rank runs the packs of its large groups first.  Then the ranks of a group have run the same packs
            before, so none waits for another, and the step takes as long as the rank with the most work
            (`cp_ranks.py`).
    rows    all packs of a microbatch take about the same time (`cp_rows.py`).

With pipelines, experts or shards, ranks wait for each other after every microbatch.  Then, and for batches with many
documents, only rows are planned.

Times are integers and position breaks ties, but some decisions depend on float64, which may be rounded differently on
another processor.  So `pipeline.check_agreement` compares the grids of all processes before a step.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter

import numpy as np

from sft.data.packing.cp_cost import CpCost, Documents
from sft.data.packing.cp_grid import FILLER, Grid, Slot, makespan_ns
from sft.data.packing.cp_packs import PackRule
from sft.data.packing.cp_ranks import BETTER, packs_of_groups
from sft.data.packing.cp_rows import FEW_BYTES, RULES, packs_of_rows
from sft.parallel.cp_group import cp_sizes
from sft.parallel.shapes import SampleSizes, padded

# A batch with more documents is planned by rows only, because so many short documents make rows even.
MANY = 4000
NEAR = 1.02  # a plan by groups that takes at most NEAR times the bound is kept; otherwise a plan by rows is tried, too


def assign(
    samples: Sequence[int] | np.ndarray,
    lengths: SampleSizes,
    *,
    dp: int,
    cp: int,
    rank_tokens: int,
    cost: CpCost,
    microbatch_multiple: int = 1,
) -> Grid:
    """Assigns the samples of a global batch to packs, groups of ranks and microbatches.  Returns the grid.

    lengths 9 4 2 2, dp 1, cp 2, rank_tokens 5, doc_multiple 1, a token 1 ns
    -> [[Slot(2, (0,)), Slot(1, (1,))], [Slot(2, (0,)), Slot(1, (2, 3))]]

    samples              sample ids
    lengths              sizes of all samples of the corpus, by sample id
    rank_tokens          padded tokens that a rank holds at most: a group of s ranks takes packs of s * rank_tokens
    microbatch_multiple  divides the number of microbatches, which is the same for all ranks
    """
    assert rank_tokens % cost.doc_multiple == 0, f"rank_tokens {rank_tokens} is not a multiple of {cost.doc_multiple}"
    documents = Documents.of(samples, lengths, cp_sizes(cp), rank_tokens=rank_tokens, cost=cost)
    arguments = documents, dp * cp, microbatch_multiple
    if cost.wait_ranks > 1 or len(documents.ids) > MANY:
        return _of_rows(*arguments, *((cost.domain(dp * cp), RULES) if cost.wait_ranks > 1 else (cp, FEW_BYTES)))
    by_groups = _of_groups(*arguments)
    time = makespan_ns(by_groups, lengths, cost)
    if time <= documents.bound_ns(dp * cp) * NEAR:
        return by_groups
    by_rows = _of_rows(*arguments, cp, FEW_BYTES)
    return by_rows if makespan_ns(by_rows, lengths, cost) < time * (1 - BETTER) else by_groups


def _of_groups(documents: Documents, num_ranks: int, multiple: int) -> Grid:
    grid: Grid = [[] for _ in range(num_ranks)]
    ids = documents.ids.tolist()
    for cp_size, blocks in packs_of_groups(documents, num_ranks, multiple):
        for block, packs in enumerate(blocks):
            slots = [_slot(ids, cp_size, pack) for pack in packs]
            for rank in range(block * cp_size, (block + 1) * cp_size):
                grid[rank] += slots
    return _completed(grid, multiple)


def _of_rows(documents: Documents, num_ranks: int, multiple: int, wait_ranks: int, rules: Sequence[PackRule]) -> Grid:
    grid: Grid = [[] for _ in range(num_ranks)]
    ids = documents.ids.tolist()
    placed = packs_of_rows(documents, num_ranks, multiple, wait_ranks, rules)
    for cp_size, first, microbatch, pack in sorted(placed, key=lambda pack: pack.microbatch):
        slot = _slot(ids, cp_size, pack)
        for slots in grid[first : first + cp_size]:
            slots += [FILLER] * (microbatch - len(slots)) + [slot]
    return _completed(grid, multiple)


def _slot(ids: list[int], cp_size: int, pack: Sequence[int]) -> Slot:
    return Slot(cp_size, itemgetter(*pack)(ids) if len(pack) > 1 else tuple([ids[document] for document in pack]))


def _completed(grid: Grid, multiple: int) -> Grid:
    """The grid with packs of filler, so that all ranks have the same number of packs, a multiple of `multiple`."""
    num_microbatches = max(1, *map(len, grid))
    num_microbatches += -num_microbatches % multiple
    return [slots + [FILLER] * (num_microbatches - len(slots)) for slots in grid]


def unless_longer(
    grid: Grid,
    samples: Sequence[int] | np.ndarray,
    lengths: SampleSizes,
    fixed_cp: Callable[[], Grid],
    *,
    cp: int,
    rank_tokens: int,
    cost: CpCost,
) -> Grid:
    """Returns `grid`, or the grid of a fixed cp if `grid` takes more than 1% (BETTER) longer than that grid.

    A slightly longer `grid` is kept, because it sends fewer bytes.  `fixed_cp` makes the grid of a fixed cp, which is
    slow.  So it is called only if `grid` takes longer than a lower bound of the step with a fixed cp: the time of all
    documents on cp ranks each, shared evenly by all ranks, in as few microbatches as their tokens need.

    a microbatch takes 10 ns, tokens take no time; `grid` has 3 microbatches, the grid of a fixed cp has 2
    -> the grid of a fixed cp
    """
    time = makespan_ns(grid, lengths, cost)
    sizes = lengths[np.asarray(samples)]
    num_microbatches = -(-int(padded(sizes, cost.doc_multiple).sum()) // (len(grid) * rank_tokens))
    least = int(cost.times(sizes, cp).sum()) * cp // len(grid) + round(num_microbatches * cost.microbatch_ns)
    if time <= least:
        return grid
    of_fixed = fixed_cp()
    return grid if time <= makespan_ns(of_fixed, lengths, cost) * (1 + BETTER) else of_fixed
