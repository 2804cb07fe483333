"""Sequences of a global batch over ranks: none is lost, no rank exceeds its capacity, and work is as even as
possible."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.data.inspect.forecast import bounds
from sft.data.packing import balance
from sft.data.packing.balance import Slots, assign, costs, efficiency
from sft.data.packing.plan import plan_epoch
from sft.layers.flops import AttentionCost
from sft.parallel.alignment import aligned

# Rows of packs by seed, rounded down; with ranks in balance instead, 0.81 0.82 0.90 0.90.
LEAST_LEVEL = (0.90, 0.86, 0.92, 0.91)


def made(
    packs: list[tuple[int, ...]], lengths: list[int], dp: int, *, seq_length: int, attention: AttentionCost
) -> Slots:
    of = np.array(lengths)
    return assign(packs, of, dp=dp, seq_length=seq_length, doc_multiple=1, attention=attention)


def level(work: np.ndarray, slots: Slots) -> tuple[float, float]:
    return efficiency(np.array([[work[list(ids)].sum() for ids in rank] for rank in slots]))


def test_costs() -> None:
    work = costs(np.array([1000, 4000]), doc_multiple=32, attention=AttentionCost(1000.0))
    assert work.tolist() == [1024 + 1000, 4000 + 16000]
    assert costs(np.array([5, 32]), doc_multiple=32, attention=AttentionCost(float("inf"))).tolist() == [32, 32]
    assert costs(np.array([2**20]), doc_multiple=32, attention=AttentionCost(1.0)).tolist() == [2**20 + 2**40]


def test_efficiency() -> None:
    assert efficiency(np.array([[6, 2], [3, 3]])) == (7 / 8, 7 / 9)
    assert efficiency(np.array([[6, 2], [6, 2]])) == (1.0, 1.0)


def test_packs_are_dealt_out() -> None:
    """Costs 8 7 4 1: the two largest go to one rank each, and the next two in reverse order."""
    slots = made([(0,), (1,), (2,), (3,)], [8, 7, 4, 1], 2, seq_length=8, attention=AttentionCost(float("inf")))
    assert slots == [[(0,), (3,)], [(1,), (2,)]]


def test_long_for_short() -> None:
    """Two full packs of 8 with crossover 1: sums of squares 16 + 16 and 8; after an exchange of 4 for 1 1 1 1, 20 and
    20."""
    slots = made([(0, 1), tuple(range(2, 10))], [4, 4, *[1] * 8], 2, seq_length=8, attention=AttentionCost(1.0))
    work = [sum(4 + 16 if i < 2 else 1 + 1 for i in pack) for rank in slots for pack in rank]
    assert work == [28, 28]
    assert [sorted(i < 2 for i in pack) for rank in slots for pack in rank] == [[False] * 4 + [True]] * 2


def test_ranks_that_meet_have_equal_packs_in_each_microbatch() -> None:
    """Costs 12 9 4 1 on two ranks: ranks balance as 12 + 1 and 9 + 4.  Those that meet take 12 + 4 at least."""
    packs: list[tuple[int, ...]] = [(0,), (3,), (1,), (2,)]
    of = np.array([12, 9, 4, 1])
    slots = assign(packs, of, dp=2, seq_length=12, doc_multiple=1, attention=AttentionCost(float("inf")), meets=True)
    assert slots == [[(0,), (3,)], [(1,), (2,)]]
    # Two sequences of 2 and two of 1: a pack of 2 + 1 in both, instead of 2 + 2 and 1 + 1.
    of = np.array([2, 2, 1, 1])
    slots = assign([(0, 1), (2, 3)], of, dp=2, seq_length=4, doc_multiple=1, attention=AttentionCost(1.0), meets=True)
    assert [sorted(of[list(pack)]) for rank in slots for pack in rank] == [[1, 2]] * 2


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_level_where_ranks_meet(seed: int) -> None:
    """Packs of lognormal lengths on 4 ranks with 4 microbatches each: no sequence is lost, and rows are more even."""
    lengths = np.minimum(np.random.RandomState(seed).lognormal(7.0, 1.0, 400).astype(np.int64) + 1, 8192)
    attention = AttentionCost(1000.0)
    plan = plan_epoch(lengths, capacity=8192, doc_multiple=1, seed=0, epoch=0, shuffle=True)
    packs, work = plan.batch(0, 16), costs(lengths, doc_multiple=1, attention=attention)
    of = {
        meets: assign(packs, lengths, dp=4, seq_length=8192, doc_multiple=1, attention=attention, meets=meets)
        for meets in (False, True)
    }
    assert sorted(i for pack in packs for i in pack) == sorted(i for rank in of[True] for pack in rank for i in pack)
    assert max(lengths[list(pack)].sum() for rank in of[True] for pack in rank) <= 8192
    assert level(work, of[True])[1] >= level(work, of[False])[1]
    assert level(work, of[True])[1] > LEAST_LEVEL[seed]


def test_empty_packs_take_sequences() -> None:
    slots = made([(0, 1, 2, 3), (), (), ()], [4, 4, 4, 4], 4, seq_length=16, attention=AttentionCost(1.0))
    assert sorted(ids for rank in slots for ids in rank) == [(0,), (1,), (2,), (3,)]


def test_one_rank_no_sample_and_a_sample_that_comes_twice() -> None:
    assert made([(3, 1), (0,)], [1, 2, 3, 4], 1, seq_length=8, attention=AttentionCost(1.0)) == [[(3, 1), (0,)]]
    assert made([(), ()], [1], 2, seq_length=8, attention=AttentionCost(1.0)) == [[()], [()]]
    slots = made([(0, 0), (1, 1)], [4, 4], 2, seq_length=8, attention=AttentionCost(1.0))
    assert sorted(i for rank in slots for ids in rank for i in ids) == [0, 0, 1, 1]


LENGTHS = st.lists(st.integers(1, 256), min_size=1, max_size=150)


@settings(max_examples=150, deadline=None)
@given(
    LENGTHS, st.sampled_from([1, 8, 32]), st.sampled_from([(2, 1), (2, 4), (4, 2), (8, 1), (3, 3)]), st.integers(1, 500)
)
def test_any_batch(lengths: list[int], multiple: int, shape: tuple[int, int], crossover: int) -> None:
    """No sequence is lost or doubled, no capacity is exceeded, all ranks have equally many slots, and results stay
    within the bounds."""
    dp, num_microbatches = shape
    of = np.array(lengths)
    plan = plan_epoch(of, capacity=256, doc_multiple=multiple, seed=0, epoch=0, shuffle=True)
    work = costs(of, doc_multiple=multiple, attention=AttentionCost(crossover))
    for index in range(plan.num_batches(dp * num_microbatches)):
        packs = plan.batch(index, dp * num_microbatches)
        slots = assign(packs, of, dp=dp, seq_length=256, doc_multiple=multiple, attention=AttentionCost(crossover))
        assert [len(rank) for rank in slots] == [num_microbatches] * dp
        assert sorted(i for rank in slots for ids in rank for i in ids) == sorted(i for pack in packs for i in pack)
        assert all(aligned(of[list(ids)], multiple).sum() <= 256 for rank in slots for ids in rank)
        after = level(work, slots)
        assert after[0] >= level(work, [packs[rank::dp] for rank in range(dp)])[0]
        ids = [i for pack in packs for i in pack]
        sizes = dict(dp=dp, num_microbatches=num_microbatches, seq_length=256, doc_multiple=multiple)
        limit = bounds(of[ids], attention=AttentionCost(crossover), **sizes)
        assert after[0] <= limit.full + 1e-9 <= limit.longest + 2e-9
        assert after[1] <= limit.microbatch + 1e-9


def test_bounds_in_numbers() -> None:
    """Two ranks with one pack of 12 each; sequences 8 2 2 4 2 2 cost 72 6 6 20 6 6 with crossover 1, together 116.

    The longest sequence alone costs 72.  The other rank has room for 12 of 20 tokens, so 8 remain: just the longest
    sequence."""
    sizes = {"dp": 2, "num_microbatches": 1, "doc_multiple": 1, "attention": AttentionCost(1.0)}
    limit = bounds(np.array([8, 2, 2, 4, 2, 2]), seq_length=12, **sizes)
    assert limit.longest == limit.full == 116 / (2 * 72)
    # Full packs of 10: the rank with the longest sequence must take 2 more tokens; the cheapest way is one sequence of
    # 2.
    limit = bounds(np.array([8, 2, 2, 4, 2, 2]), seq_length=10, **sizes)
    assert limit.longest == 116 / (2 * 72) and limit.full == 116 / (2 * (72 + 2 + 4))


def test_the_bound_of_microbatches_in_numbers() -> None:
    """Two ranks with two packs of 10 each: sequences of 8 and 6 neither fit into one pack nor take equally long.

    Costs 72 42 72 42: the first row of packs has both 8s, and its maximum is 72; that of the second is 42, so the bound
    is reached. With one 8 less, the rows cost at least 72 and 42, and all sequences 156: 156 / (2 * 114).
    """

    sizes = {"dp": 2, "num_microbatches": 2, "seq_length": 10, "doc_multiple": 1, "attention": AttentionCost(1.0)}
    assert bounds(np.array([8, 6, 8, 6]), **sizes).microbatch == 1.0
    assert bounds(np.array([8, 6, 6]), **sizes).microbatch == pytest.approx(156 / (2 * (72 + 42)))


def random_lengths(count: int, median: int, sigma: float, longest: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(np.log(median), sigma, count).astype(int), 1, longest)


@pytest.mark.parametrize(
    "of, seq_length, packs, dp, share",
    [
        # Sequences of 16K tokens and more, five to a pack
        (random_lengths(1000, 16384, 0.9, 131072), 131072, 32, 8, 0.99),
        # Chats: exchanges between packs would end at 94% of the bound.  So sequences are dealt out; the plan leaves
        # enough room for that.
        (random_lengths(20_000, 600, 1.1, 32768), 32768, 128, 32, 0.98),
    ],
)
def test_level_on_chats_over_many_ranks(of: np.ndarray, seq_length: int, packs: int, dp: int, share: float) -> None:
    plan = plan_epoch(of, capacity=seq_length, doc_multiple=32, seed=0, epoch=0, shuffle=True)
    attention = AttentionCost(53248.0)
    work = costs(of, doc_multiple=32, attention=attention)
    for index in range(4):
        batch = plan.batch(index, packs)
        slots = assign(batch, of, dp=dp, seq_length=seq_length, doc_multiple=32, attention=attention)
        assert level(work, slots)[0] >= share


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 sequences in 256 packs: some hundred splits each for ranks, for ranks again, and for rows."""
    count = 0
    split = balance._Batch._split

    def counted(self: Any, *arguments: int) -> Any:
        nonlocal count
        count += 1
        return split(self, *arguments)

    monkeypatch.setattr(balance._Batch, "_split", counted)
    of = random_lengths(12_000, 600, 1.1, 32768)
    plan = plan_epoch(of, capacity=32768, doc_multiple=32, seed=0, epoch=0, shuffle=True)
    assign(plan.batch(0, 256), of, dp=32, seq_length=32768, doc_multiple=32, attention=AttentionCost(15400.0))
    # In each, the last exchange may try all partners and pairs.
    assert 0 < count <= 3 * balance.MAX_SPLITS + 3 * balance.NUM_PARTNERS * balance.NUM_PAIRS
