"""The rank that computes each token in a layer of linear attention, compared with counts by hand."""

import numpy as np
import pytest

from sft.layers.mixers.delta import HeadSizes
from sft.layers.mixers.recurrent import StateTraffic
from sft.layers.traffic import Passes
from sft.parallel.context_parallel import local_indices
from sft.parallel.fragments import FragmentPlan, boundaries, owners
from sft.parallel.taps import Taps

PACKS = ([64, 8, 16], [24, 0, 48, 24, 120], [48], [24] * 7, [240, 72, 0])
QWEN36_27B = HeadSizes(key_heads=16, value_heads=48, key_dim=128, value_dim=128)
ONCE = Passes(num=1, of_attention=1, width=2)
TINY = HeadSizes(key_heads=1, value_heads=2, key_dim=3, value_dim=5, width=4)


def fitted(lengths: list[int], cp_size: int) -> np.ndarray:
    return boundaries(np.array([length - length % (2 * cp_size) for length in lengths]))


@pytest.mark.parametrize("max_short", [0, 24, 1000])
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_every_token_is_computed_by_one_rank_and_in_the_order_of_its_document(cp_size: int, max_short: int) -> None:
    for lengths in PACKS:
        cu_seqlens = fitted(lengths, cp_size)
        local = [local_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)]
        plans = [FragmentPlan.of(cu_seqlens, max_short, cp_size, rank) for rank in range(cp_size)]
        all_computed = []
        for rank, plan in enumerate(plans):
            computed = local[rank]
            if plan.relayout is not None:
                parts = [
                    np.split(local[r][p.relayout.send], np.cumsum(p.relayout.num_sent)[:-1])[rank]
                    for r, p in enumerate(plans)
                    if p.relayout is not None
                ]
                assert [len(part) for part in parts] == plan.relayout.num_received
                computed = np.concatenate([computed[plan.relayout.kept], *parts])
                num_long = len(plan.relayout.kept)
                computed[num_long:] = computed[num_long:][plan.relayout.order]
            assert len(computed) == plan.boundaries[-1]
            for index, (start, stop) in enumerate(zip(plan.boundaries[:-1], plan.boundaries[1:])):
                fragment = computed[start:stop]
                assert (np.diff(fragment) == 1).all() and len(fragment)
                document = int(np.searchsorted(cu_seqlens, fragment[0], side="right")) - 1
                first, length = int(cu_seqlens[document]), int(np.diff(cu_seqlens)[document])
                if index < plan.num_linked:  # alternately the early and the late chunk of a long document
                    chunk = [rank, 2 * cp_size - 1 - rank][index % 2]
                    assert length > max_short and len(fragment) == length // (2 * cp_size)
                    assert fragment[0] == first + chunk * len(fragment)
                else:
                    assert length <= max_short and (fragment[0], len(fragment)) == (first, length)
            all_computed.append(computed)
        assert sorted(np.concatenate(all_computed).tolist()) == list(range(cu_seqlens[-1]))


def test_with_one_rank_every_document_is_a_fragment() -> None:
    plan = FragmentPlan.of(np.array([0, 3, 3, 8]), 1000, 1, 0)
    assert plan.boundaries.tolist() == [0, 3, 8] and plan.num_linked == 0 and plan.relayout is None


def test_short_documents_are_divided_by_tokens() -> None:
    assert owners(np.array([8, 16, 8, 4]), 2).tolist() == [1, 0, 1, 0]
    lengths = np.random.default_rng(3).integers(1, 500, 200)
    tokens = np.bincount(owners(lengths, 8), weights=lengths)
    assert tokens.max() <= 1.001 * tokens.mean()


def test_the_example_of_the_module() -> None:
    first, second = (FragmentPlan.of(np.array([0, 64, 72, 88]), 16, 2, rank) for rank in range(2))
    assert first.boundaries.tolist() == [0, 16, 32, 48] and second.boundaries.tolist() == [0, 16, 32, 40]
    assert first.relayout is not None and first.relayout.num_sent == [8, 4] and first.relayout.num_received == [8, 8]


def test_the_threshold_is_where_maps_are_fewer_bytes() -> None:
    """A map has 4 bytes x 2 heads x 3 x (3 + 10), a token 4 bytes x (2 x 3 + 2 x 11) + 8: 312 and 120 bytes."""
    assert (TINY.map_bytes, TINY.token_bytes) == (312, 120)
    assert TINY.max_short(1) == 0 and TINY.max_short(2) == 10 and TINY.max_short(5) == 25  # 10.4 and 26 tokens
    halo = 2 * 3 * (2 * 3 + 2 * 5) * 4  # for two chunks of cp 2, a rank needs 3 tokens of another rank
    forward = StateTraffic(heads=TINY, conv_kernel=4, passes=ONCE)
    # If a chunk has 2 tokens, one chunk needs 2 tokens instead of 3.
    assert forward.others(np.array([8, 16]), 2).tolist() == [4 * 120 + halo - 64, 2 * 312 + halo]
    assert forward.others(np.array([8, 16]), 1).tolist() == [0, 0]
    assert [QWEN36_27B.max_short(cp) for cp in (2, 4, 8, 16)] == [1141, 2283, 4567, 9135]


def test_bytes_of_the_page() -> None:
    """The table in context-parallel.md: MiB that a rank receives, for 64K tokens less than 5% of a gather."""
    mib = {}
    for length in (65536, 8192, 1024):
        lengths = np.full(65536 // length, length)
        forward = StateTraffic(heads=QWEN36_27B, conv_kernel=4, passes=ONCE)
        mib[length] = [round(forward.others(lengths, cp).sum() / cp / 2**20, 1) for cp in (2, 4, 8, 16)]
    assert mib[65536] == [9.1, 13.6, 15.9, 17.0]
    assert mib[8192] == [72.5, 108.7, 126.8, 121.9] and mib[1024] == [520.2, 393.0, 232.5, 128.1]
    gathered = [(1 - 1 / cp) * 65536 * 2 * (2 * 16 * 128 + 48 * 128) / 2**20 for cp in (2, 4, 8, 16)]
    assert gathered == [640, 960, 1120, 1200] and 13.6 < 0.015 * 960


@pytest.mark.parametrize("num_taps", [1, 2, 4])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_taps_read_the_tokens_before_an_edge(cp_size: int, num_taps: int) -> None:
    for lengths in ([12, 24], [6, 0, 6, 36], [60]):
        cu_seqlens = boundaries(np.array([length * cp_size // 3 * 2 for length in lengths]))
        local = [local_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)]
        starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))  # by position in the pack
        taps = [Taps.of(cu_seqlens, num_taps, cp_size, rank) for rank in range(cp_size)]
        for rank, (tap, held) in enumerate(zip(taps, local)):
            if tap.halo is not None:
                from_others = []
                for other, positions in enumerate(local):
                    halo = taps[other].halo
                    assert halo is not None
                    from_others.append(np.split(positions[halo.send], np.cumsum(halo.num_sent)[:-1])[rank])
                held = np.concatenate([held, *from_others])
            is_edge = np.isin(np.arange(len(local[rank])), tap.edges)
            assert len(np.unique(tap.edges)) == len(tap.edges) and len(tap.rows) == num_taps - 1
            for shift, (rows, sources) in enumerate(zip(tap.rows, tap.sources), start=1):
                assert (held[sources] == held[rows] - shift).all() and is_edge[rows].all()
                has_token = held[: len(is_edge)] - shift >= starts[held[: len(is_edge)]]
                assert sorted(rows.tolist()) == np.flatnonzero(is_edge & has_token).tolist()
                inner = np.flatnonzero(~is_edge)
                assert (held[inner - shift] == held[inner] - shift).all() and has_token[inner].all()
