"""The sizes of samples with trees: padding of each document, and attention at the depth of each."""

import numpy as np
import pytest

from sft.data.packing.balance import costs
from sft.data.packing.plan import plan_epoch
from sft.layers.flops import AttentionCost
from sft.parallel.shapes import Shapes, attention_cost, longest, padded

# Sample 0 has a document of 33 tokens and a branch of 7 after its first 20; sample 1 one document of 10 tokens.
SHAPES = Shapes(np.array([0, 2, 3]), np.array([33, 7, 10]), np.array([0, 20, 0]))


def test_written_out() -> None:
    assert len(SHAPES) == 2 and np.asarray(SHAPES).tolist() == [40, 10]
    assert (longest(SHAPES), longest(np.array([4, 9, 2]))) == (33, 9)
    assert longest(Shapes(np.array([0, 2]), np.array([33, 7]), np.array([0, 30]))) == 37
    assert padded(SHAPES, 32).tolist() == [96, 32]
    assert padded(np.array([33, 7]), 32).tolist() == [64, 32]
    # Without a window a token costs in proportion to its position: 33^2 + 27^2 - 20^2 = 1418, and 10^2.
    assert attention_cost(SHAPES, AttentionCost(crossover=10)) == pytest.approx([141.8, 10.0], rel=1e-12)
    assert costs(SHAPES, doc_multiple=32, attention=AttentionCost(crossover=10)).tolist() == [96 + 142, 32 + 10]
    assert np.asarray(SHAPES[[1, 0, 1]]).tolist() == [10, 40, 10]
    assert padded(SHAPES[np.array([], dtype=np.int64)], 32).tolist() == []


def test_a_branch_costs_what_its_tokens_cost_at_their_positions() -> None:
    """With a window of 16, a token at position p attends to min(p + 1, 16) tokens; 1/2 a token is the diagonal."""
    attention = AttentionCost(window=16, window_crossover=1)
    keys = [min(p, 16) + min(p + 1, 16) for p in range(60)]  # twice the mean number of keys from p to p + 1
    assert attention(np.array([7]), np.array([20]))[0] == pytest.approx(sum(keys[20:27]), rel=1e-12)
    assert attention(np.array([12]), np.array([9]))[0] == pytest.approx(sum(keys[9:21]), rel=1e-12)
    assert attention(np.array([60]), np.array([0]))[0] == attention(np.array([60]))[0]


def test_a_plan_pads_each_document() -> None:
    """40 tokens in one document would take 64; the tree takes 96, so it and 64 tokens do not share a pack of 128."""
    shapes = Shapes(np.array([0, 2, 3, 4]), np.array([33, 7, 64, 32]), np.array([0, 20, 0, 0]))
    plan = plan_epoch(shapes, capacity=128, doc_multiple=32, seed=0, epoch=0, shuffle=False)
    assert [plan.pack(0), plan.pack(1)] == [(0, 2), (1,)]
    assert plan.fill == pytest.approx(192 / 256) and plan.alignment_waste == pytest.approx(1 - 136 / 192)
