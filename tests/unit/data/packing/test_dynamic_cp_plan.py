"""A CP size for each pack: every sample once, within memory, in nested groups; times and bytes by hand."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sft.data.packing import balance
from sft.data.packing.cp_cost import CpCost, Documents
from sft.data.packing.cp_grid import Grid, Slot, fixed, predict
from sft.data.packing.cp_packs import PackRule, packs_of_long
from sft.data.packing.cp_rows import _even, _rows_of
from sft.data.packing.dynamic_cp import _of_groups, assign, unless_longer
from sft.layers.flops import AttentionCost
from sft.layers.traffic import HaloTraffic
from sft.parallel.alignment import aligned
from sft.parallel.cp_group import cp_sizes
from tests.builders import LLAMA_8B, layout_config
from tools.bench.waiting_bound import waiting_bound_ns

TOKEN = CpCost(token_ns=1.0)  # 1 ns per token, no other cost
NEAR_BEST = 1.03  # the plan is a heuristic; the worst of these steps takes 1.017 times as long as the best possible


def made(lengths: list[int], cost: CpCost = TOKEN, **sizes: Any) -> Grid:
    """Plans all of `lengths` on one row of two ranks with room for 5 tokens each, unless `sizes` says otherwise."""
    sizes = {"dp": 1, "cp": 2, "rank_tokens": 5, **sizes}
    return assign(range(len(lengths)), np.array(lengths), cost=cost, **sizes)


def documents_of(lengths: list[int], cp: int, rank_tokens: int, cost: CpCost = TOKEN) -> Documents:
    return Documents.of(range(len(lengths)), np.array(lengths), cp_sizes(cp), rank_tokens=rank_tokens, cost=cost)


def test_a_long_document_takes_both_ranks_and_short_documents_one() -> None:
    grid = made([9, 4, 2, 2])
    assert grid == [[Slot(2, (0,)), Slot(1, (1,))], [Slot(2, (0,)), Slot(1, (2, 3))]]
    assert grid[0][0] is grid[1][0]


def test_ranks_of_a_group_share_its_work() -> None:
    """The example of `cp_ranks`: the document of 8 on all ranks, those of 8 and 6 on two each, and those of 3 3 1 1 on
    one.  If the plan by groups took longer, `assign` would return the plan by rows."""
    grid = [
        [Slot(4, (0,)), Slot(2, (1,)), Slot(1, (5,))],
        [Slot(4, (0,)), Slot(2, (1,)), Slot(1, (6,))],
        [Slot(4, (0,)), Slot(2, (2,)), Slot(1, (3,))],
        [Slot(4, (0,)), Slot(2, (2,)), Slot(1, (4,))],
    ]
    lengths = [32, 16, 12, 3, 3, 1, 1]
    assert _of_groups(documents_of(lengths, 4, 8), 4, 1) == grid
    assert made(lengths, cp=4, rank_tokens=8) == grid


def test_a_document_joins_a_pack_only_if_it_is_in_time() -> None:
    """A row of two ranks, each with room for 10 tokens and 8 ns.  Beside 6 and 5 tokens, the ranks have time for 2 and
    3 more: the document of 2 joins the pack with more time, and that of 4 begins the next row."""
    documents = documents_of([6, 5, 4, 2], 2, 10)
    packs = packs_of_long(documents, np.arange(4), 2, 8.0, PackRule(1.0, 1.0, 2, 0.0, False))
    assert [pack.documents for pack in packs] == [[1, 3], [0], [2]] and {pack.level for pack in packs} == {0}


def test_packs_of_equal_time_share_a_row() -> None:
    """Packs of 9 and 5 on one and two ranks, then 4 and 3 on one each; rows of two ranks."""
    rows, free = _rows_of(np.array([2, 1, 1, 1]), np.array([5, 9, 4, 3]), 2)
    assert rows.tolist() == [1, 0, 0, 2] and free == [0, 0, 1]


def best_possible(lengths: list[int], rank_tokens: int) -> int:
    """The shortest step of two ranks that wait for each other, of all grids with any number of microbatches.

    Tries all partitions of the documents into packs, both sizes of groups, and all pairs of packs of one rank.  A
    token takes 1 ns on one rank, and the square of the length / 4 is added."""
    times = [n + n * n / 4 for n in lengths]

    def partitions(rest: list[int]) -> Iterator[list[list[int]]]:
        if not rest:
            yield []
            return
        for others in range(1 << (len(rest) - 1)):
            chosen = [rest[0]] + [i for bit, i in enumerate(rest[1:]) if others >> bit & 1]
            for packs in partitions([i for i in rest if i not in chosen]):
                yield [chosen, *packs]

    def shortest(packs: list[list[int]], alone: list[float]) -> float:
        """alone: times of the packs of one rank; the longest two share a microbatch, and so on"""
        if not packs:
            return sum(sorted(alone, reverse=True)[::2])
        time, tokens = sum(times[i] for i in packs[0]), sum(lengths[i] for i in packs[0])
        both = time / 2 + shortest(packs[1:], alone) if tokens <= 2 * rank_tokens else math.inf
        return min(both, shortest(packs[1:], [*alone, time])) if tokens <= rank_tokens else both

    return round(min(shortest(packs, []) for packs in partitions(list(range(len(lengths))))))


@pytest.mark.parametrize("seed", range(12))
def test_near_the_best_possible_grid_and_above_the_bound(seed: int) -> None:
    """Six documents on two ranks that wait for each other, against all grids."""
    random = np.random.default_rng(seed)
    lengths = sorted(random.integers(2, 40, 6).tolist(), reverse=True)
    cost = CpCost(token_ns=1.0, attention=AttentionCost(4.0), wait_ranks=2)
    best, of = best_possible(lengths, 20), np.array(lengths)
    planned = predict(made(lengths, cost, rank_tokens=20), of, cost).makespan_ns
    bound = waiting_bound_ns(documents_of(lengths, 2, 20, cost), 2)
    rounding = len(lengths)  # each document rounds its time to 1 ns
    assert bound - rounding <= best <= planned + rounding
    assert planned <= NEAR_BEST * best


def test_no_samples_are_one_pack_of_filler_on_every_rank() -> None:
    assert made([]) == [[Slot(1, ())]] * 2
    assert made([], microbatch_multiple=3) == [[Slot(1, ())] * 3] * 2


def test_fixed_cp_stays_where_the_grid_would_be_slower() -> None:
    """Documents of 4, 4, 4 and 2 tokens on two ranks of 5 tokens: with fixed cp, two packs of 10 take 7 ns; two packs
    of 4 on each rank take 8 ns.  Both have two microbatches; a grid whose third microbatch takes 10 ns is worse."""
    lengths, calls = np.array([4, 4, 4, 2]), []
    even = [[Slot(2, (0, 1)), Slot(2, (2, 3))]] * 2
    alone = [[Slot(1, (0,)), Slot(1, (1,))], [Slot(1, (2,)), Slot(1, (3,))]]
    more = [[*slots, Slot(1, ())] for slots in alone]

    def kept(grid: Grid, cost: CpCost) -> Grid:
        def fixed_cp() -> Grid:
            calls.append(grid)
            return even

        return unless_longer(grid, [0, 1, 2, 3], lengths, fixed_cp, cp=2, rank_tokens=5, cost=cost)

    slow = replace(TOKEN, microbatch_ns=10.0)
    assert kept(alone, TOKEN) is even and kept(more, slow) is even and len(calls) == 2
    sent = replace(TOKEN, kv_bytes=3.0, inter_gb_s=1.0, node_ranks=1)  # 8 ns, and 7 + 10.5 ns with fixed cp
    assert kept(alone, sent) is alone and len(calls) == 2
    within = replace(TOKEN, microbatch_ns=100.0)  # 208 and 207 ns: nearly equal, so the plan with fewer bytes is taken
    assert kept(alone, within) is alone and len(calls) == 3
    # 14 tokens need two microbatches on ranks of 5 tokens, so fixed CP takes 7 and 2 x 1,000 ns at least.
    long = replace(sent, microbatch_ns=1000.0)
    assert kept(alone, long) is alone and len(calls) == 3


def test_a_document_longer_than_the_step_runs_on_more_ranks_than_hold_it() -> None:
    """A document of 100 tokens and three of 1 token; a rank has room for 100: on one rank, the long document would take
    twice the mean."""
    slow = CpCost(token_ns=1000.0)
    grid = made([100, 1, 1, 1], slow, rank_tokens=100)
    assert grid[0][0] == Slot(2, (0,))
    assert predict(grid, np.array([100, 1, 1, 1]), slow).makespan_ns == 52_000


def check(grid: Grid, samples: list[int], lengths: np.ndarray, dp: int, cp: int, capacity: int, multiple: int) -> None:
    """Checks that every sample occurs once; that groups are aligned inside a row, and their ranks share a slot; and
    that no capacity is exceeded."""
    assert len(grid) == dp * cp and len({len(slots) for slots in grid}) == 1
    counted: list[int] = []
    for row in zip(*grid, strict=True):
        for rank, slot in enumerate(row):
            assert slot.cp_size in cp_sizes(cp) and (slot.samples or slot.cp_size == 1)
            first = rank - rank % cp + rank % cp // slot.cp_size * slot.cp_size
            assert all(other is slot for other in row[first : first + slot.cp_size]) or not slot.samples
            if rank == first:
                counted += slot.samples
                assert aligned(lengths[list(slot.samples)], multiple).sum() <= slot.cp_size * capacity
    assert sorted(counted) == sorted(samples)


@pytest.mark.parametrize("seed", range(40))
def test_any_batch(seed: int) -> None:
    random = np.random.default_rng(seed)
    cp, dp = int(random.choice([1, 2, 4, 6, 8, 12])), int(random.choice([1, 2, 3, 8]))
    multiple = int(random.choice([1, 8])) * 2 * cp
    capacity = multiple * int(random.integers(1, 40))
    num = int(random.integers(0, 200))
    lengths = np.clip(random.lognormal(math.log(capacity), 1.0, num), 1, cp * capacity).astype(np.int64)
    samples = random.permutation(num).tolist()
    cost = CpCost(
        doc_multiple=multiple, attention=AttentionCost(float(random.choice([10.0, 1e3, 1e9]))),
        token_ns=100.0, microbatch_ns=float(random.choice([0, 1e4])), kv_bytes=float(random.choice([0, 1e3])),
    )  # fmt: skip
    number = int(random.choice([1, 1, 4]))
    cost = replace(cost, wait_ranks=int(random.choice([1, cp, 2 * cp, dp * cp])))
    sizes: Any = {"dp": dp, "cp": cp, "rank_tokens": capacity, "microbatch_multiple": number}
    grid = assign(samples, lengths, cost=cost, **sizes)
    check(grid, samples, lengths, dp, cp, capacity, multiple)
    assert len(grid[0]) % number == 0
    assert grid == assign(samples, lengths, cost=cost, **sizes)
    documents = Documents.of(samples, lengths, cp_sizes(cp), rank_tokens=capacity, cost=cost)
    assert predict(grid, lengths, cost).makespan_ns >= documents.bound_ns(dp * cp)


def test_no_rank_waits_for_its_group() -> None:
    """Large groups come first: the step takes as long as the rank with the most work."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(math.log(900), 1.2, 400), 1, 16_384).astype(np.int64)
    cost = CpCost(doc_multiple=32, attention=AttentionCost(4000.0), token_ns=10.0, kv_bytes=10.0, microbatch_ns=1e4)
    grid = assign(range(400), lengths, dp=4, cp=8, rank_tokens=2048, cost=cost)
    busy = [sum(int(cost.times(lengths[list(samples)], size).sum()) + 10_000 for size, samples in r) for r in grid]
    assert predict(grid, lengths, cost).makespan_ns == max(busy)
    assert max(busy) <= 1.02 * sum(busy) / len(busy)


def test_ranks_that_wait_for_each_other_have_even_microbatches() -> None:
    """18 beside 8 and 8, and 14 beside 10, on four ranks; and chats on 4 x 8 ranks that all wait for each other."""
    cost = CpCost(token_ns=1000.0, microbatch_ns=4000.0, wait_ranks=4)
    grid = made([18, 14, 10, 8, 8], cost, cp=4, rank_tokens=10)
    a, b, c = Slot(2, (0,)), Slot(2, (1,)), Slot(2, (2,))
    assert grid == [[a, c], [a, c], [Slot(1, (3,)), b], [Slot(1, (4,)), b]]
    assert predict(grid, np.array([18, 14, 10, 8, 8]), cost).makespan_ns == 9000 + 7000 + 2 * 4000
    lengths = np.clip(np.random.default_rng(0).lognormal(math.log(600), 1.1, 1500), 1, 16_384).astype(np.int64)
    cost = CpCost(doc_multiple=32, attention=AttentionCost(57_000.0), token_ns=100.0, kv_bytes=1000.0)
    measured = {}
    for wait_ranks in (1, 32):
        waiting = replace(cost, wait_ranks=wait_ranks)
        grid = assign(range(1500), lengths, dp=4, cp=8, rank_tokens=4096, cost=waiting)
        measured[wait_ranks] = predict(grid, lengths, waiting)
    assert measured[1].per_step > 0.98 > measured[1].per_microbatch + 0.05
    assert measured[32].per_step == pytest.approx(measured[32].per_microbatch)
    assert measured[32].per_step > measured[1].per_microbatch


def test_even_times_beside_long_packs() -> None:
    longest = np.array([[9, 0, 1], [0, 0, 0], [4, 8, 2]])
    assert _even(longest, 15.0).tolist() == [[9, 3, 3], [5, 5, 5], [4, 8, 3]]


def test_time_of_a_document_by_hand() -> None:
    """Documents of 1000 and 4000 tokens, whose squares cost as much as 1000 and 16,000 tokens, at 10 ns per token.
    Each token has 40 bytes, of which each of two ranks receives half: at 2 bytes per ns, 10 and 40 us, of which
    attention hides 10 and 160 us."""
    lengths = np.array([1000, 4000])
    cost = CpCost(
        doc_multiple=8, attention=AttentionCost(1000.0), token_ns=10.0, kv_bytes=40.0, node_ranks=2, intra_gb_s=2.0,
        inter_gb_s=1.0,
    )  # fmt: skip
    assert cost.times(lengths, 1).tolist() == [20_000, 200_000]
    assert cost.times(lengths, 2).tolist() == [(20_000 + 20_000 - 10_000) // 2, 100_000]
    assert cost.times(lengths, 4).tolist() == [(20_000 + 120_000 - 10_000) // 4, (200_000 + 480_000 - 160_000) // 4]
    assert cost.num_bytes(lengths, 8, 4).tolist() == [120_000, 480_000]
    assert cost.num_bytes(lengths, 8, 1).tolist() == [0, 0]
    assert cost.times(np.array([1001]), 1).tolist() == [round((1008 + 1001 * 1.001) * 10)]


def test_costs_of_a_recipe() -> None:
    """Llama 8B on tp 2 and cp 8, two nodes: a rank has 4 key heads of width 128, sent twice in bf16 and once in
    fp32."""
    cost = CpCost.of(layout_config(model=LLAMA_8B, parallel={"tp": 2, "cp": 8}))
    assert cost.attention == AttentionCost.of(layout_config(model=LLAMA_8B).model) and cost.wait_ranks == 1
    assert cost.kv_bytes == 32 * 2 * 4 * 128 * (2 * 2 + 4) and cost.others == ()
    assert cost.token_ns == pytest.approx(6 * 6_979_321_856 * 1e9 / (2 * 989e12 * 0.35))
    assert [cost.gb_s(size) for size in (2, 4, 8)] == [300.0, 300.0, 40.0]
    for sharded, waiting in (({"shard": "weights"}, 48), ({"shard": "gradients", "shard_size": 16}, 16)):
        assert CpCost.of(layout_config(model=LLAMA_8B, parallel={"cp": 8, **sharded})).domain(48) == waiting
    experts = {**LLAMA_8B, "moe": {"num_experts": 8, "top_k": 2}}
    parallel = {"cp": 8, "ep": 8, "shard": "weights", "shard_size": 8}
    assert CpCost.of(layout_config(model=experts, parallel=parallel)).domain(64) == 64  # copies of an expert: 8 apart
    full = {"train": {"num_steps": 1, "global_batch_size": 16, "recompute": "full"}}
    again = CpCost.of(layout_config(model=LLAMA_8B, parallel={"cp": 8, "pp": 2}, **full))
    assert again.kv_bytes == 16 * 2 * 8 * 128 * (3 * 2 + 4) and again.wait_ranks == 8
    assert again.token_ns == pytest.approx(6 * 6_979_321_856 * (4 / 3) * 1e9 / (2 * 989e12 * 0.35))
    assert again.microbatch_ns == cost.microbatch_ns / 2 == 8e6  # 0.5 ms for each of 16 layers
    halves = {"without_mlp": [1, 2], "without_mixer": [3]}
    assert CpCost.of(layout_config(model={**LLAMA_8B, "halves": halves})).microbatch_ns == 15.25e6  # 30.5 layers
    windows = CpCost.of(layout_config(model={**LLAMA_8B, "sliding_window": 64, "sliding_window_layers": [1, 2, 3]}))
    assert windows.kv_bytes == 29 * 2 * 8 * 128 * 8
    assert windows.others == ((3.0, HaloTraffic(token_bytes=2 * 8 * 128 * 8, window=64)),)


def test_prediction_by_hand() -> None:
    """Ranks 0 and 1 compute 8 tokens together in 4 ns; before, rank 1 computes 3 tokens alone, and rank 0 waits 2 ns
    for it."""
    a, b, c = Slot(1, (0,)), Slot(1, (1,)), Slot(2, (2,))
    prediction = predict([[a, c], [b, c]], np.array([1, 3, 8]), TOKEN)
    assert (prediction.makespan_ns, prediction.num_microbatches, prediction.num_bytes) == (7, 2, 0)
    assert prediction.per_step == prediction.per_microbatch == 6 / 7
    assert prediction.share_of_packs == {1: 2 / 3, 2: 1 / 3} and prediction.share_of_tokens == {1: 4 / 12, 2: 8 / 12}
    rows: Grid = [[Slot(1, (0,)), Slot(1, (1,))], [Slot(1, (1,)), Slot(1, (0,))]]
    of_rows = [predict(rows, np.array([1, 3]), replace(TOKEN, wait_ranks=number)) for number in (1, 2)]
    assert [row.makespan_ns for row in of_rows] == [4, 6] and of_rows[0].per_microbatch == 4 / 6


def test_fixed_cp_is_the_assignment_of_ranks() -> None:
    slots = balance.assign(
        [(0,), (1, 2)], np.array([8, 4, 4]), dp=2, seq_length=8, doc_multiple=1, attention=AttentionCost()
    )
    assert fixed(slots, 2) == [[Slot(2, (0,))], [Slot(2, (0,))], [Slot(2, (1, 2))], [Slot(2, (1, 2))]]


def test_the_bound() -> None:
    """Documents of 10 + 2 + 2 and of 9 + 8 + 9 tokens on two ranks; the latter in two microbatches of 3 ns each."""
    assert documents_of([10, 2, 2], 2, 10).bound_ns(2) == 7
    assert documents_of([9, 8, 9], 2, 10).bound_ns(2) == 13
    slow = replace(TOKEN, microbatch_ns=3.0)
    assert documents_of([9, 8, 9], 2, 10, slow).bound_ns(2) == 13 + 6
    assert documents_of([20, 1], 2, 10, replace(TOKEN, attention=AttentionCost(1.0))).bound_ns(8) == 420 // 2
    assert documents_of([], 2, 10, slow).bound_ns(2) == 3
