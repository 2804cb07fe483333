"""Plans of batches with trees: a tree may take less time than a shorter document, and more tokens in a pack."""

from typing import Any

import numpy as np
import pytest

from sft.data.inspect.forecast import bounds
from sft.data.packing import dynamic_cp
from sft.data.packing.balance import assign, costs
from sft.data.packing.cp_cost import CpCost
from sft.layers.flops import AttentionCost
from sft.layers.traffic import HaloTraffic
from sft.parallel.shapes import Shapes, padded

# Sample 0: a document of 8 tokens and a branch of 8 after its first token; sample 1: a document of 15 tokens, which has
# fewer tokens and takes longer.
PAIR = Shapes(np.array([0, 2, 3]), np.array([8, 8, 15]), np.array([0, 1, 0]))


def mixed(seed: int, count: int) -> Shapes:
    """Trees of 2 to 12 documents, and every second sample one document; at most 512 padded tokens each."""
    rng = np.random.default_rng(seed)
    lengths, depths, counts = list[int](), list[int](), list[int]()
    for number in range(count):
        size = int(rng.integers(1, 13)) if number % 2 else 1
        own = rng.integers(1, 512 // size // 8 * 8 + 1, size=size).tolist()
        lengths, depths = [*lengths, *own], [*depths, 0, *rng.integers(1, own[0] + 1, size=size - 1).tolist()]
        counts.append(size)
    return Shapes(np.cumsum([0, *counts]), np.array(lengths), np.array(depths))


def cost(wait_ranks: int) -> CpCost:
    return CpCost(attention=AttentionCost(crossover=64.0), token_ns=1.0, wait_ranks=wait_ranks, doc_multiple=8)


def test_a_tree_that_is_cheaper_than_a_shorter_document() -> None:
    own = CpCost(attention=AttentionCost(crossover=1.0), token_ns=1.0, wait_ranks=2, doc_multiple=1)
    grid = dynamic_cp.assign([0, 1], PAIR, dp=1, cp=2, rank_tokens=8, cost=own)
    assert sorted(sample for row in grid[:1] for slot in row for sample in slot.samples) == [0, 1]


@pytest.mark.parametrize("wait_ranks", [1, 8])
@pytest.mark.parametrize("seed", range(6))
def test_every_sample_has_a_pack_with_room(seed: int, wait_ranks: int) -> None:
    shapes, rank_tokens = mixed(seed, 60), 256
    grid = dynamic_cp.assign(list(range(60)), shapes, dp=2, cp=4, rank_tokens=rank_tokens, cost=cost(wait_ranks))
    packed = [
        (slot.cp_size, slot.samples)
        for rank, row in enumerate(grid)
        for slot in row
        if slot.samples and rank % slot.cp_size == 0
    ]
    assert sorted(sample for _, samples in packed for sample in samples) == list(range(60))
    for cp_size, samples in packed:
        assert padded(shapes[list(samples)], 8).sum() <= cp_size * rank_tokens


@pytest.mark.parametrize("meets", [False, True])
def test_ranks_with_trees_are_balanced(meets: bool) -> None:
    shapes = mixed(7, 40)
    packs = [tuple(range(first, first + 2)) for first in range(0, 40, 2)]
    options = dict(dp=4, seq_length=1024, doc_multiple=8, attention=AttentionCost(crossover=64.0))
    slots = assign(packs, shapes, meets=meets, **options)  # type: ignore[arg-type]
    assert sorted(sample for rank in slots for pack in rank for sample in pack) == list(range(40))
    assert all(padded(shapes[list(pack)], 8).sum() <= 1024 for rank in slots for pack in rank if pack)


def test_the_limit_of_rows_takes_the_costliest_samples_not_the_longest() -> None:
    """Documents of 90 and 70 tokens, and trees of 80 and 60 whose attention costs little: no two share a pack of 100.

    With the documents in one row and the trees in the other one, the rows take as long as 90 and 80.
    """
    lengths, depths = [90, *[8] * 10, 70, *[6] * 10], [0, 0, *[1] * 9, 0, 0, *[1] * 9]
    samples = Shapes(np.array([0, 1, 11, 12, 22]), np.array(lengths), np.array(depths))
    sizes: Any = {"dp": 2, "num_microbatches": 2, "seq_length": 100, "doc_multiple": 1}
    work = costs(samples, doc_multiple=1, attention=AttentionCost(crossover=10))
    assert (work[[0, 2]] > 4 * work[[1, 3]]).all()
    found = bounds(samples, attention=AttentionCost(crossover=10), **sizes)
    assert found.microbatch == pytest.approx(work.sum() / (2 * (work[0] + work[1])), rel=1e-12)


def test_each_branch_has_a_halo_over_cp() -> None:
    """Window 11, on two ranks: a document of 64 tokens has chunks of 16, which need 0, 10, 10 and 10 tokens before
    them, of which a late one has those of an early one on its own rank.  A branch needs 10 more before its first chunk.
    """
    cost = CpCost(others=((1.0, HaloTraffic(token_bytes=4, window=11)),), token_ns=0.0, intra_gb_s=1.0)
    tree = Shapes(np.array([0, 3]), np.array([64, 64, 64]), np.array([0, 32, 32]))
    assert cost.times(tree, 2).tolist() == [4 * (20 + 30 + 30) / 2]
    assert cost.times(np.array([64, 64]), 2).tolist() == [4 * 20 / 2] * 2
