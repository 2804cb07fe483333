"""Packs whose labels never cross a document."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.batch import Pack
from sft.data.packing.pack import local_part, make_pack
from sft.parallel.alignment import aligned
from tests.builders import sample


def test_aligned() -> None:
    assert [aligned(n, 32) for n in (1, 31, 32, 33, 64)] == [32, 32, 32, 64, 64]
    assert aligned(np.array([1, 32, 33]), 32).tolist() == [32, 32, 64]


def check(pack: Pack, **expected: list[int]) -> None:
    for name, values in expected.items():
        assert getattr(pack, name).tolist() == values, name


def test_pack_in_numbers() -> None:
    """The example of `sft.batch.Pack`."""
    made = make_pack(
        [sample([5, 6, 7], [0, 1, 1], sample_id=4), sample([8, 9], [0, 0], sample_id=2)], doc_multiple=4, pad_id=0
    )
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


def test_what_is_padding() -> None:
    """Of documents of 3 and 4 tokens in 4 each, and a filler document."""
    pack = make_pack(
        [sample([5, 6, 7], source=2), sample([1, 2, 3, 4], source=1)], doc_multiple=4, pad_id=0, pack_multiple=12
    )
    part = local_part(pack, np.arange(12), doc_multiple=4)
    assert part.is_padding.int().tolist() == [[0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1]]
    assert part.sources.tolist() == [2, 1, 0]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=8),
    st.sampled_from([2, 4, 32]),
)
def test_supervised_labels_are_all_but_first_tokens(masks: list[list[bool]], doc_multiple: int) -> None:
    """P01, P02, P05, P09, P10: any lengths, 1 token included, any masks, pad id without influence."""
    samples = [sample([100 * i + k for k in range(len(m))], m, sample_id=i) for i, m in enumerate(masks)]
    zero, one = (make_pack(samples, doc_multiple=doc_multiple, pad_id=pad_id) for pad_id in (7000, 7001))
    assert zero.loss_mask.sum() == sum(sum(mask[1:]) for mask in masks) == sum(s.num_supervised for s in samples)
    assert (zero.labels[zero.loss_mask] == one.labels[one.loss_mask]).all()
    assert (zero.labels[zero.loss_mask] == zero.tokens[np.flatnonzero(zero.loss_mask) + 1]).all()
    assert not (zero.labels[zero.loss_mask] >= 7000).any()
    assert (np.diff(zero.cu_seqlens) > 0).all() and not (zero.cu_seqlens % doc_multiple).any()
    starts = zero.cu_seqlens[:-1]
    assert (zero.position_ids[starts] == 0).all() and zero.position_ids.max() == zero.max_seqlen - 1


def test_one_token_documents() -> None:
    """P09"""
    made = make_pack([sample([5]), sample([6])], doc_multiple=4, pad_id=0)
    check(made, tokens=[5, 0, 0, 0, 6, 0, 0, 0], loss_mask=[0] * 8, lengths=[1, 1], cu_seqlens=[0, 4, 8])


def test_filler() -> None:
    made = make_pack([sample([5, 6, 7], sample_id=9)], doc_multiple=4, pad_id=0, pack_multiple=12)
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
    made = make_pack([sample([1] * length)], doc_multiple=32, pad_id=0, pack_multiple=multiple)
    assert len(made.tokens) == expected == made.cu_seqlens[-1]
    assert (np.diff(made.cu_seqlens) > 0).all()
    assert np.diff(made.cu_seqlens)[1:].tolist() == [32] * ((expected - length) // 32)


def test_filler_up_to_a_length() -> None:
    pack = make_pack([sample([1] * 33)], doc_multiple=32, pad_id=0, pad_to_length=160)
    check(pack, cu_seqlens=[0, 64, 96, 128, 160], lengths=[33, 0, 0, 0], sources=[0, 0, 0, 0])
    pack = make_pack([sample([1] * 33)], doc_multiple=32, pad_id=0, pad_to_length=64)
    check(pack, cu_seqlens=[0, 64], lengths=[33])


def test_a_pack_without_samples_is_filler() -> None:
    made = make_pack([], doc_multiple=4, pad_id=3)
    check(made, tokens=[3] * 4, labels=[3] * 4, loss_mask=[0] * 4, position_ids=[0, 1, 2, 3], cu_seqlens=[0, 4])
    check(made, lengths=[0])
    assert made.sample_ids == () and made.max_seqlen == 4
    check(make_pack([], doc_multiple=4, pad_id=3, pack_multiple=8), cu_seqlens=[0, 4, 8], lengths=[0, 0])
