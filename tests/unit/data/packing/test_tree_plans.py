"""Plans of batches with trees: a tree may take less time than a shorter document, and more tokens in a pack."""

import numpy as np
import pytest

from sft.data.packing import dynamic_cp
from sft.data.packing.balance import assign
from sft.data.packing.cp_cost import CpCost
from sft.layers.flops import AttentionCost
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
