"""Packs and microbatches: labels never cross a document, every sample occurs once per epoch, on every layout alike."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.batch import Microbatch
from sft.data.cache.corpus import Corpus
from sft.data.cache.row_report import LINE, count_rows
from sft.data.cache.store import Store
from sft.data.loader import Loader, make_loader
from sft.data.packing.pack import Collator
from sft.data.packing.plan import EpochPlans
from sft.errors import ConfigError
from sft.layers.flops import AttentionCost
from sft.parallel.layout import Layout
from tests.builders import LLAMA_8B, layout_config, sample
from tests.unit.fixtures.calls import calls
from tests.unit.fixtures.folder import config

PAD = 258


def corpus_of(lengths: list[int]) -> Corpus:
    """A corpus whose sample i holds tokens i*1000, i*1000 + 1, ...; the second half of a sample is supervised."""
    table = np.array([(i + 1, 1, 1, n, n - max(1, n // 2), n, n, 0) for i, n in enumerate(lengths)], dtype=LINE)
    tokens = np.concatenate([np.arange(n) + 1000 * i for i, n in enumerate(lengths)]).astype(np.int32)
    mask = np.concatenate([np.arange(n) >= max(1, n // 2) for n in lengths]).astype(np.uint8)
    weights = np.array([0, 1], dtype=np.float32)
    store = Store(tokens=tokens, mask=mask, rows=table, weights=weights, row_report=count_rows(table), digest="0")
    return Corpus([Path("a.jsonl")], [store])


def layout(*, dp: int = 1, cp: int = 1, global_batch_size: int = 4, pack_multiple: int = 1) -> Layout:
    return Layout(
        world_size=dp * cp, tp=1, cp=cp, pp=1, dp=dp, virtual_stages=1, sequence_parallel=False,
        global_batch_size=global_batch_size, num_microbatches=global_batch_size // dp,
        doc_multiple=8, pack_multiple=pack_multiple,
    )  # fmt: skip


def loader(corpus: Corpus, sizes: Layout, *, dp_rank: int = 0, cp_rank: int = 0, **overrides: Any) -> Loader:
    data = config(**{"seq_length": 64, "doc_multiple": 8, **overrides})
    collator = Collator(
        doc_multiple=8, pack_multiple=sizes.pack_multiple, pad_id=PAD, cp_size=sizes.cp, cp_rank=cp_rank,
        pad_to_length=data.seq_length if data.pad_to_seq_length else 0,
    )  # fmt: skip
    plans = EpochPlans(corpus.lengths, data, seed=5, global_batch_size=sizes.global_batch_size)
    return Loader(
        corpus, plans, {sizes.cp: collator}, sizes, seq_length=data.seq_length, dp_rank=dp_rank,
        attention=AttentionCost(16.0),
    )  # fmt: skip


def counts(part: Microbatch) -> tuple[int, ...]:
    return part.num_documents, part.num_real_tokens, part.num_aligned_tokens, part.num_tokens


def test_microbatch_in_numbers() -> None:
    """Samples of 3 and 5 tokens, multiple of 8, cp 2: rank 0 holds chunks 0 and 3 of each document."""
    corpus, sizes = corpus_of([3, 5]), layout(cp=2, global_batch_size=1, pack_multiple=24)
    [first], [second] = (loader(corpus, sizes, cp_rank=rank, shuffle=False).microbatches(0) for rank in (0, 1))
    assert first.tokens.tolist() == [[0, 1, PAD, PAD, 1000, 1001, PAD, PAD, PAD, PAD, PAD, PAD]]
    assert second.tokens.tolist() == [[2, PAD, PAD, PAD, 1002, 1003, 1004, PAD, PAD, PAD, PAD, PAD]]
    assert first.labels.tolist() == [[1, 2, PAD, PAD, 1001, 1002, PAD, PAD, PAD, PAD, PAD, PAD]]
    assert second.labels.tolist() == [[PAD, PAD, PAD, PAD, 1003, 1004, PAD, PAD, PAD, PAD, PAD, PAD]]
    assert first.loss_mask.int().tolist() == [[1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]]
    assert second.loss_mask.int().tolist() == [[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]]
    assert first.position_ids.tolist() == [[0, 1, 6, 7] * 3]
    assert second.position_ids.tolist() == [[2, 3, 4, 5] * 3]
    for part in (first, second):
        assert part.tokens.dtype == part.labels.dtype == part.position_ids.dtype == torch.int64
        assert part.loss_mask.dtype == torch.bool and part.cu_seqlens.dtype == torch.int32
        assert part.cu_seqlens.tolist() == [0, 8, 16, 24] and part.max_seqlen == 8
        assert counts(part) == (2, 8, 16, 5) and part.sample_ids == (0, 1)


def test_a_short_last_batch_is_filled_up() -> None:
    """5 packs in batches of 4 over 2 ranks: 3 slots of the second step have filler, 2 of them on rank 1."""
    corpus, sizes = corpus_of([64] * 5), layout(dp=2)
    ranks = [loader(corpus, sizes, dp_rank=rank, shuffle=False) for rank in (0, 1)]
    assert ranks[0].plans.steps_per_epoch(0) == 2
    ids = [[[m.sample_ids for m in rank.microbatches(step)] for rank in ranks] for step in (0, 1)]
    assert ids == [[[(0,), (2,)], [(1,), (3,)]], [[(4,), ()], [(), ()]]]
    [_, filler] = ranks[0].microbatches(1)
    assert counts(filler) == (0, 0, 0, 0)
    assert filler.tokens.tolist() == [[PAD] * 8] and not filler.loss_mask.any()


def test_an_endless_run_is_not_planned_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 packs are 3 steps, so 99,999,999 steps are 33,333,333 epochs."""
    planned = []
    original = EpochPlans._make
    monkeypatch.setattr(EpochPlans, "_make", lambda self, *given: planned.append(given[0]) or original(self, *given))
    plans = loader(corpus_of([64] * 10), layout()).plans
    plans.check_length(99_999_999)
    assert planned == []
    with pytest.raises(ConfigError, match="the run has 100,001 epochs with 1,000,010 samples; at most 100,000 epochs"):
        plans.total_steps(100_001)
    assert planned == [0]


def test_an_epoch_is_planned_once_and_located_without_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = loader(corpus_of([64] * 10), layout()).plans
    assert plans.locate(3000) == (1000, 0)
    monkeypatch.setattr(EpochPlans, "plan", lambda self, epoch: pytest.fail(f"epoch {epoch} is planned again"))
    assert [plans.locate(step) for step in (0, 1499, 1500, 3002)] == [(0, 0), (499, 2), (500, 0), (1000, 2)]
    assert calls(lambda: plans.locate(3000)) < 10


def test_steps_and_epochs() -> None:
    corpus = corpus_of([64] * 10)
    made = loader(corpus, layout())
    assert [made.plans.locate(step) for step in (0, 2, 3, 5, 6)] == [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0)]
    assert made.plans.total_steps(3) == 9
    assert made.plans.global_batch(0) != made.plans.global_batch(3)
    assert loader(corpus, layout(), shuffle=False).plans.global_batch(3) == [(0,), (1,), (2,), (3,)]


def test_a_step_is_found_without_the_steps_before_it() -> None:
    """A checkpoint holds only the number of the step: a new loader gives for step 7 what a used loader gives."""
    corpus = corpus_of([20, 40, 64, 8, 30, 33] * 5)
    used, fresh = loader(corpus, layout()), loader(corpus, layout())
    for step in range(7):
        used.microbatches(step)
    for step in (7, 0):
        for first, second in zip(used.microbatches(step), fresh.microbatches(step), strict=True):
            assert first.sample_ids == second.sample_ids
            assert torch.equal(first.tokens, second.tokens) and torch.equal(first.labels, second.labels)


def test_pad_to_seq_length_gives_one_shape() -> None:
    corpus = corpus_of([20, 64, 5, 5, 1])
    made = loader(corpus, layout(), pad_to_seq_length=True)
    parts = [part for step in range(made.plans.steps_per_epoch(0)) for part in made.microbatches(step)]
    assert {part.tokens.shape for part in parts} == {(1, 64)}
    assert sum(part.num_documents for part in parts) == 5
    assert sum(part.num_tokens for part in parts) == corpus.num_supervised.sum()
    assert sum(part.num_real_tokens for part in parts) == corpus.lengths.sum() == 95
    assert [part.max_seqlen for part in parts if not part.sample_ids] == [64] * (len(parts) - len(made.plans.plan(0)))


COLUMNS = ("documents", "tokens", "labels", "loss_weights", "position_ids")
LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 1), st.sampled_from([1, 16, 24]))
def test_every_sample_once_and_the_same_steps_on_every_layout(
    lengths: list[int], epoch: int, pack_multiple: int
) -> None:
    """However samples are packed; no pack exceeds seq_length."""
    corpus = corpus_of(lengths)
    first = sum(loader(corpus, layout()).plans.steps_per_epoch(e) for e in range(epoch))
    steps = range(first, first + loader(corpus, layout()).plans.steps_per_epoch(epoch))
    seen = {}
    for dp, cp in [(1, 1), (4, 1), (1, 4), (2, 2)]:
        sizes = layout(dp=dp, cp=cp, pack_multiple=pack_multiple)
        batches = []
        for step in steps:
            parts = [
                [loader(corpus, sizes, dp_rank=r, cp_rank=c).microbatches(step) for c in range(cp)] for r in range(dp)
            ]
            assert {len(rank) for row in parts for rank in row} == {4 // dp}
            batches.append(batch_facts(parts, pack_multiple))
        seen[dp, cp] = batches
    assert all(batches == seen[1, 1] for batches in seen.values())
    counted = Counter(i for batch in seen[1, 1] for i, *_ in batch)
    assert counted == Counter(range(len(lengths)))


def batch_facts(parts: list[list[list[Microbatch]]], pack_multiple: int) -> list[tuple[Any, ...]]:
    """For each sample, sorted: id, counts, and (token, label, supervised, position) over all cp ranks."""
    facts = []
    for row in parts:
        for shares in zip(*row, strict=True):
            one = shares[0]
            assert one.cu_seqlens[-1] % pack_multiple == 0 and one.num_aligned_tokens <= 64
            assert {share.tokens.shape[1] * len(row) for share in shares} == {int(one.cu_seqlens[-1])}
            assert (one.num_documents, one.num_real_tokens) == (len(one.sample_ids), int(one.lengths.sum()))
            columns = [torch.cat([getattr(share, name)[0] for share in shares]) for name in COLUMNS]
            for place, sample_id in enumerate(one.sample_ids):
                own = columns[0] == place
                rows = sorted(zip(*(column[own].tolist() for column in columns[1:]), strict=True))
                facts.append((sample_id, int(one.lengths[place]), int(one.supervised[place]), rows))
    return sorted(facts)


@pytest.mark.parametrize("dp", [1, 2])
def test_evaluation_sees_every_pack_once_in_order(dp: int) -> None:
    corpus = corpus_of([64] * 6)
    ranks = [list(loader(corpus, layout(dp=dp), dp_rank=rank).eval_batches()) for rank in range(dp)]
    assert all(len(batch) == 4 // dp for rank in ranks for batch in rank)
    order = [ranks[pack % dp][batch][pack // dp].sample_ids for batch in range(2) for pack in range(4)]
    assert order == [(0,), (1,), (2,), (3,), (4,), (5,), (), ()]


def test_what_is_padding() -> None:
    """The example of `sft.batch.Pack`, and a filler document."""
    samples = [sample([5, 6, 7], [0, 1, 1], sample_id=4, source=2), sample([8, 9], [0, 0], sample_id=2, source=1)]
    collator = Collator(doc_multiple=4, pad_id=0, pack_multiple=12)
    pack = collator.pack(samples)
    assert pack.tokens.tolist() == [5, 6, 7, 0, 8, 9, 0, 0, 0, 0, 0, 0]
    assert pack.labels.tolist() == [6, 7, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]
    assert pack.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert pack.position_ids.tolist() == [0, 1, 2, 3] * 3
    assert pack.cu_seqlens.tolist() == [0, 4, 8, 12] and pack.lengths.tolist() == [3, 2, 0]
    assert pack.sample_ids == (4, 2) and pack.max_seqlen == 4 and pack.loss_mask.dtype == np.bool_
    for array in (pack.tokens, pack.labels, pack.position_ids, pack.cu_seqlens, pack.lengths):
        assert array.dtype == np.int32
    part = collator.microbatch(samples)
    assert part.is_padding.int().tolist() == [[0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1, 1]]
    assert part.sources.tolist() == [2, 1, 0]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=8), st.sampled_from([2, 4, 32]))
def test_supervised_labels_are_all_but_first_tokens(masks: list[list[bool]], doc_multiple: int) -> None:
    """P01, P02, P05, P09, P10: any lengths, also 1 token, any masks; the pad id has no effect."""
    samples = [sample([100 * i + k for k in range(len(m))], m, sample_id=i) for i, m in enumerate(masks)]
    zero, one = (Collator(doc_multiple=doc_multiple, pad_id=pad_id).pack(samples) for pad_id in (7000, 7001))
    assert zero.loss_mask.sum() == sum(sum(mask[1:]) for mask in masks) == sum(s.num_supervised for s in samples)
    assert (zero.labels[zero.loss_mask] == one.labels[one.loss_mask]).all()
    assert (zero.labels[zero.loss_mask] == zero.tokens[np.flatnonzero(zero.loss_mask) + 1]).all()
    assert not (zero.labels[zero.loss_mask] >= 7000).any()
    assert (np.diff(zero.cu_seqlens) > 0).all() and not (zero.cu_seqlens % doc_multiple).any()
    starts = zero.cu_seqlens[:-1]
    assert (zero.position_ids[starts] == 0).all() and zero.position_ids.max() == zero.max_seqlen - 1


@pytest.mark.parametrize(
    "real, doc_multiple, pack_multiple, pad_to, fillers",
    [
        (32, 32, 1, 0, []),  # P10: an exact multiple gets no filler and no empty document
        (64, 32, 64, 0, []),
        (96, 32, 64, 0, [32]),
        (32, 32, 48, 0, [64]),
        (33, 32, 1, 160, [96]),
        (0, 4, 8, 0, [8]),  # a pack without samples
        (33, 32, 1024, 0, [960]),  # for FP8 or sequence parallelism: one document, not 30
        # 65,472 tokens: as one document, its attention would cost as much as that of real documents
        (33, 32, 1, 65_536, [4_096] * 15 + [4_032]),
        (0, 32, 1, 8_192, [4_096, 4_096]),
        (33, 96, 1, 9_600, [4_032, 4_032, 1_440]),  # each a multiple of 96, for cp 16
        (33, 8_192, 1, 24_576, [8_192, 8_192]),
    ],
)
def test_fillers_are_few(real: int, doc_multiple: int, pack_multiple: int, pad_to: int, fillers: list[int]) -> None:
    """Kernels take time for each document.  A filler has at most 4,096 tokens, and no filler counts as a document."""
    samples = [sample([1] * real)] if real else []
    collator = Collator(doc_multiple=doc_multiple, pad_id=3, pack_multiple=pack_multiple, pad_to_length=pad_to)
    pack, part = collator.pack(samples), collator.microbatch(samples)
    aligned_real = -(-real // doc_multiple) * doc_multiple
    assert np.diff(pack.cu_seqlens).tolist() == [aligned_real] * len(samples) + fillers
    assert pack.lengths.tolist() == [real] * len(samples) + [0] * len(fillers)
    assert (part.num_documents, part.num_real_tokens, part.num_aligned_tokens) == (len(samples), real, aligned_real)
    assert len(pack.tokens) == aligned_real + sum(fillers) and len(pack.sample_ids) == len(samples)
    filler = slice(aligned_real, None)
    assert not pack.loss_mask[filler].any() and (pack.tokens[filler] == 3).all() and (pack.labels[filler] == 3).all()
    assert pack.max_seqlen == max([aligned_real, *fillers])


def test_the_plan_of_a_recipe_knows_its_windows() -> None:
    """Llama-8B with full attention, and with windows of 1,024 in all layers."""
    full, windows = (
        make_loader(
            layout_config(model={**LLAMA_8B, **window}, data={"seq_length": 4096}, train={"global_batch_size": 4}),
            layout(global_batch_size=4),
            corpus_of([2048, 1024]),
            pad_id=PAD,
        ).attention(np.array([1024, 2048]))
        for window in ({}, {"sliding_window": 1024})
    )
    assert full.tolist() == pytest.approx([1024**2 / 53_248, 2048**2 / 53_248])
    assert windows.tolist() == pytest.approx([1024**2 / 53_248, 1024 * (2 * 2048 - 1024) / 53_248])


def test_a_pack_is_padded_by_its_cp_size() -> None:
    """doc_multiple 32, tp 2 with sequence parallelism, FP8 with multiples of 16 tokens per rank: packs are multiples of
    32 x cp."""
    config = layout_config(
        model=LLAMA_8B,
        data={"seq_length": 1024},
        train={"global_batch_size": 1},
        parallel={"tp": 2, "cp": 4, "dynamic_cp": True},
        run={"fp8": "delayed", "device": "cuda"},
    )
    corpus = corpus_of([130])
    made = make_loader(config, Layout.resolve(config, 8), corpus, pad_id=PAD, cp_rank=3)
    packs = [made.microbatch([corpus.sample(0)], cp_size) for cp_size in (1, 2, 4)]
    assert [(mb.cp_size, int(mb.cu_seqlens[-1]), mb.tokens.shape[1]) for mb in packs] == [
        (1, 160, 160),
        (2, 192, 96),
        (4, 256, 64),
    ]
