"""Plans that place every sample once within capacity, and packs whose labels never cross a document."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.batch import Pack, Sample
from sft.data.align import aligned
from sft.data.pack import Plan, _mix, add_filler, filler_pack, make_pack, pad_to, plan_epoch

LENGTHS = st.lists(st.integers(1, 256), min_size=1, max_size=200).map(np.array)


def sample(tokens: list[int], mask: list[int] | None = None, sample_id: int = 0) -> Sample:
    weights = np.array(mask if mask is not None else [1] * len(tokens), dtype=np.float32)
    return Sample(sample_id=sample_id, tokens=np.array(tokens, dtype=np.int32), weights=weights)


def plan(lengths: list[int] | np.ndarray, *, shuffle: bool = False, epoch: int = 0, capacity: int = 128) -> Plan:
    return plan_epoch(np.array(lengths), capacity=capacity, doc_multiple=32, seed=1234, epoch=epoch, shuffle=shuffle)


def packs(plan: Plan) -> list[tuple[int, ...]]:
    return [plan.pack(index) for index in range(len(plan))]


def test_aligned() -> None:
    assert [aligned(n, 32) for n in (1, 31, 32, 33, 64)] == [32, 32, 32, 64, 64]
    assert aligned(np.array([1, 32, 33]), 32).tolist() == [32, 32, 64]


def test_plan_in_numbers() -> None:
    made = plan([40, 70, 20, 60, 10])
    assert packs(made) == [(0, 3), (1, 2), (4,)]
    assert made.fill == 288 / 384
    assert made.alignment_waste == 1 - 200 / 288


def test_capacity_is_counted_in_padded_lengths() -> None:
    """P07: 992 documents of 33 tokens are 32,736 tokens, but 63,488 once padded."""
    made = plan_epoch(np.full(992, 33), capacity=32768, doc_multiple=64, seed=0, epoch=0, shuffle=False)
    assert [len(pack) for pack in packs(made)] == [512, 480]


def test_at_most_64_packs_are_open() -> None:
    """200 packs of 96 leave room for a 32 each, but only 64 of them are still open when those come."""
    assert len(plan([96] * 200 + [32] * 200)) == 200 + (200 - 64) // 4


def test_the_shuffle_is_pinned() -> None:
    """Runs resume by number: this order may never change, whatever numpy or Python release."""
    order = plan([128] * 8, shuffle=True).samples.tolist()
    assert order == [3, 6, 7, 2, 1, 5, 0, 4]
    assert plan([128] * 8, shuffle=True, epoch=1).samples.tolist() == [1, 0, 4, 5, 2, 7, 6, 3]


def test_the_hash_is_splitmix64() -> None:
    """Published first outputs for the seeds 0 and 1234567."""
    assert _mix(np.array([0, 1234567], dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF, 6457827717110365317]


def test_orders_are_even() -> None:
    """Each sample comes first in its turn: 4,000 epochs of 8 samples, expected 500 each."""
    firsts = [plan([128] * 8, shuffle=True, epoch=epoch).samples[0] for epoch in range(4000)]
    assert all(400 < count < 600 for count in np.bincount(firsts, minlength=8))


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(0, 3), st.sampled_from([1, 8, 32]), st.integers(256, 600), st.booleans())
def test_every_sample_once_within_capacity(
    lengths: np.ndarray, epoch: int, doc_multiple: int, capacity: int, shuffle: bool
) -> None:
    arguments = dict(capacity=capacity, doc_multiple=doc_multiple, seed=7, shuffle=shuffle)
    made = plan_epoch(lengths, epoch=epoch, **arguments)
    assert sorted(made.samples.tolist()) == list(range(len(lengths)))
    padded = [sum(-(-lengths[i] // doc_multiple) * doc_multiple for i in pack) for pack in packs(made)]
    assert max(padded) <= capacity and min(padded) > 0
    assert made.fill == pytest.approx(sum(padded) / (len(made) * capacity))
    assert 0 <= made.alignment_waste < 1
    assert made.digest == plan_epoch(lengths, epoch=epoch, **arguments).digest


def test_best_fit_fills_where_order_does_not() -> None:
    """Lengths like those of chats (log-normal, median 400); packing them in order would fill 86%."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1.2, 20_000).astype(int) + 1, 8192)
    made = plan_epoch(lengths, capacity=8192, doc_multiple=1, seed=0, epoch=0, shuffle=True)
    assert made.fill > 0.995


def test_packs_keep_the_shuffled_order() -> None:
    """A pack begins with a sample that had no room elsewhere: first samples come in the shuffle's order."""
    lengths = np.random.default_rng(0).integers(1, 1000, 5000)
    made = plan_epoch(lengths, capacity=1024, doc_multiple=32, seed=0, epoch=0, shuffle=True)
    rank = np.empty(5000, dtype=int)
    rank[plan_epoch(np.full(5000, 1024), capacity=1024, doc_multiple=32, seed=0, epoch=0, shuffle=True).samples] = (
        np.arange(5000)
    )
    firsts = [rank[pack[0]] for pack in packs(made)]
    assert firsts == sorted(firsts)


def test_processes_agree() -> None:
    """The plan needs no communication: another process, with other hash seeds, computes the same."""
    program = (
        "import numpy as np; from sft.data.pack import plan_epoch;"
        "lengths = np.arange(1, 2000) * 7919 % 500 + 1;"
        "print(plan_epoch(lengths, capacity=1024, doc_multiple=32, seed=3, epoch=2, shuffle=True).digest)"
    )
    root = Path(__file__).parents[2]
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True,
        env={"PYTHONHASHSEED": "77"},
    )  # fmt: skip
    lengths = np.arange(1, 2000) * 7919 % 500 + 1
    here = plan_epoch(lengths, capacity=1024, doc_multiple=32, seed=3, epoch=2, shuffle=True)
    assert answer.stdout.strip() == here.digest


def check(pack: Pack, **expected: list[int]) -> None:
    for name, values in expected.items():
        assert getattr(pack, name).tolist() == values, name


def test_pack_in_numbers() -> None:
    """The example of `sft.batch.Pack`."""
    made = make_pack([sample([5, 6, 7], [0, 1, 1], 4), sample([8, 9], [0, 0], 2)], doc_multiple=4, pad_id=0)
    check(
        made,
        tokens=[5, 6, 7, 0, 8, 9, 0, 0],
        labels=[6, 7, 0, 0, 9, 0, 0, 0],
        loss_mask=[1, 1, 0, 0, 0, 0, 0, 0],
        position_ids=[0, 1, 2, 3, 0, 1, 2, 3],
        cu_seqlens=[0, 4, 8],
        lengths=[3, 2],
    )
    assert made.sample_ids == (4, 2) and made.max_seqlen == 4
    assert made.loss_mask.dtype == np.bool_
    for array in (made.tokens, made.labels, made.position_ids, made.cu_seqlens, made.lengths):
        assert array.dtype == np.int32


def test_labels_do_not_cross_documents() -> None:
    """P01: everything supervised, position 0 included; no document is long enough to need padding."""
    made = make_pack([sample([1, 2, 3, 4]), sample([5, 6, 7, 8])], doc_multiple=4, pad_id=99)
    check(made, labels=[2, 3, 4, 99, 6, 7, 8, 99], loss_mask=[1, 1, 1, 0, 1, 1, 1, 0])
    other = make_pack([sample([1, 2, 3, 4]), sample([9, 9, 9, 9])], doc_multiple=4, pad_id=99)
    assert made.labels[:4].tolist() == other.labels[:4].tolist()


def test_the_mask_does_not_wrap() -> None:
    """P02: a mask that begins with 1 gives nothing to the end of its own or any row."""
    made = make_pack([sample([1, 2, 3, 4], [1, 0, 0, 0])], doc_multiple=4, pad_id=0)
    check(made, loss_mask=[0, 0, 0, 0])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=8),
    st.sampled_from([2, 4, 32]),
)
def test_supervised_labels_are_all_but_first_tokens(masks: list[list[bool]], doc_multiple: int) -> None:
    """P01, P02, P05, P09, P10: any lengths, 1 token included, any masks, pad id without influence."""
    samples = [sample([100 * i + k for k in range(len(m))], m, i) for i, m in enumerate(masks)]
    zero, one = (make_pack(samples, doc_multiple=doc_multiple, pad_id=pad_id) for pad_id in (7000, 7001))
    assert zero.loss_mask.sum() == sum(sum(mask[1:]) for mask in masks) == sum(s.num_supervised for s in samples)
    assert (zero.labels[zero.loss_mask] == one.labels[one.loss_mask]).all()
    assert (zero.labels[zero.loss_mask] == zero.tokens[np.flatnonzero(zero.loss_mask) + 1]).all()
    assert not (zero.labels[zero.loss_mask] >= 7000).any()
    assert (np.diff(zero.cu_seqlens) > 0).all() and not (zero.cu_seqlens % doc_multiple).any()
    starts = zero.cu_seqlens[:-1]
    assert (zero.position_ids[starts] == 0).all() and zero.position_ids.max() == zero.max_seqlen - 1


def test_padding_is_a_valid_id_that_nothing_learns_from() -> None:
    """P05: the last real token's label is padding, and is not supervised."""
    made = make_pack([sample([5, 6, 7])], doc_multiple=8, pad_id=3)
    check(
        made,
        tokens=[5, 6, 7, 3, 3, 3, 3, 3],
        labels=[6, 7, 3, 3, 3, 3, 3, 3],
        loss_mask=[1, 1, 0, 0, 0, 0, 0, 0],
    )


def test_a_sample_without_supervision() -> None:
    """P96: nothing supervised means nothing, not everything."""
    made = make_pack([sample([5, 6, 7, 8], [0, 0, 0, 0]), sample([1, 2])], doc_multiple=4, pad_id=0)
    check(made, loss_mask=[0, 0, 0, 0, 1, 0, 0, 0])


def test_one_token_documents() -> None:
    """P09"""
    made = make_pack([sample([5]), sample([6])], doc_multiple=4, pad_id=0)
    check(made, tokens=[5, 0, 0, 0, 6, 0, 0, 0], loss_mask=[0] * 8, lengths=[1, 1], cu_seqlens=[0, 4, 8])


def test_filler() -> None:
    pack = make_pack([sample([5, 6, 7], sample_id=9)], doc_multiple=4, pad_id=0)
    made = add_filler(pack, multiple=12, doc_multiple=4, pad_id=0)
    check(
        made,
        tokens=[5, 6, 7, 0] + [0] * 8,
        labels=[6, 7, 0, 0] + [0] * 8,
        loss_mask=[1, 1, 0, 0] + [0] * 8,
        position_ids=[0, 1, 2, 3] * 3,
        cu_seqlens=[0, 4, 8, 12],
        lengths=[3, 0, 0],
    )
    assert made.sample_ids == (9,) and made.max_seqlen == 4


@pytest.mark.parametrize(("length", "multiple", "expected"), [(32, 1, 32), (64, 64, 64), (96, 64, 128), (32, 48, 96)])
def test_filler_is_added_only_where_needed(length: int, multiple: int, expected: int) -> None:
    """P10: an exact multiple gets no filler and no empty document."""
    pack = make_pack([sample([1] * length)], doc_multiple=32, pad_id=0)
    made = add_filler(pack, multiple=multiple, doc_multiple=32, pad_id=0)
    assert len(made.tokens) == expected == made.cu_seqlens[-1]
    assert (np.diff(made.cu_seqlens) > 0).all()
    assert np.diff(made.cu_seqlens)[1:].tolist() == [32] * ((expected - length) // 32)


def test_pad_to() -> None:
    pack = pad_to(make_pack([sample([1] * 33)], doc_multiple=32, pad_id=0), length=160, doc_multiple=32, pad_id=0)
    check(pack, cu_seqlens=[0, 64, 96, 128, 160], lengths=[33, 0, 0, 0])
    assert pad_to(pack, length=160, doc_multiple=32, pad_id=0) is pack


def test_filler_pack() -> None:
    made = filler_pack(doc_multiple=4, pad_id=3)
    check(made, tokens=[3] * 4, labels=[3] * 4, loss_mask=[0] * 4, position_ids=[0, 1, 2, 3], cu_seqlens=[0, 4])
    check(made, lengths=[0])
    assert made.sample_ids == () and made.max_seqlen == 4
