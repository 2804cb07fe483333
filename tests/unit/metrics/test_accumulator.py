"""Totals in one process: each number is computed by hand."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sft.batch import Sample
from sft.data.packing.pack import Collator, local_part
from sft.layers.flops import AttentionCost, TrainFlops
from sft.metrics.accumulator import Accumulator, SupervisedTokens, TaughtTokens
from sft.metrics.totals import Peak, Totals, quantity
from sft.parallel.cp_bytes import CpBytes
from sft.parallel.cp_group import CpGroup
from tests.builders import answer


@pytest.fixture(scope="module")
def accumulator() -> Iterator[Accumulator]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield Accumulator(
        position_edges=(2, 4), sources=("a", "b"), cp_sizes=(1, 2), flops=TrainFlops(1.0, 0.0, AttentionCost(1.0)),
        cp_bytes=CpBytes(kv_bytes=2.0), reports=True, cp_group=lambda size: CpGroup(size, 0, group),
        device=torch.device("cpu"),
    )  # fmt: skip
    dist.destroy_process_group()


def measured(accumulator: Accumulator, packs: list[tuple[list[Sample], list[float]]], cp_size: int = 1) -> Totals:
    """The totals of packs of samples with the given -log p of their supervised tokens."""
    microbatches, tokens = [], []
    for samples, nll in packs:
        pack = Collator(doc_multiple=8, pad_id=0, pack_multiple=32).pack(samples)
        microbatches.append(local_part(pack, np.arange(len(pack.tokens)), cp_size=cp_size, doc_multiple=8))
        tokens.append(
            SupervisedTokens(
                objective=sum(nll),
                denominator=len(nll),
                nll=np.array(nll),
                entropy=None,
                correct=np.array(nll) == 0,  # 1 if the label was certain
                num_rows=int(microbatches[-1].loss_mask.sum()),
                buckets=accumulator.buckets(microbatches[-1]),
            )
        )
    return accumulator.totals(microbatches, tokens, {"data_wait_s": 0.5})


def test_written_out(accumulator: Accumulator) -> None:
    """Lengths 5 and 3 in one pack, and 4 in another; 3 and 1, and 2 supervised labels."""
    found = measured(
        accumulator, [([answer(5, 3), answer(3, 1, source=1)], [1.0, 2.0, 3.0, 0.5]), ([answer(4, 2)], [1.0, 0.0])]
    )
    assert (found.num_tokens, found.num_real_tokens, found.num_documents) == (6, 12, 3)
    # documents are padded to 8 each, packs to 32
    assert (found.num_aligned_tokens, found.num_padded_tokens) == (24, 64)
    assert found.attention_flops == 25 + 9 + 16
    assert found.objective == found.nll == 7.5 and found.denominator == 6.0
    assert found.num_correct == 1
    # Tokens that predict a supervised label: positions 1, 2, 3 in the first document, 1 in the second, 1, 2 in the
    # third.
    assert found.nll_by_position == {"0-2": 1.0 + 0.5 + 1.0, "2-4": 2.0 + 3.0 + 0.0, "4+": 0.0}
    assert found.num_tokens_by_position == {"0-2": 3, "2-4": 3, "4+": 0}
    assert found.nll_by_source == {"a": 7.0, "b": 0.5} and found.num_tokens_by_source == {"a": 5, "b": 1}
    # Means 2, 0.5 and 0.5: e^2 = 7.389056, e^0.5 = 1.648721.
    assert (found.sequence_nll, found.num_sequences) == (3.0, 3)
    assert found.perplexity == pytest.approx(7.389056 + 2 * 1.648721)
    assert (found.perplexity_min, found.perplexity_max) == pytest.approx((1.648721, 7.389056))
    assert found.data_wait_s == Peak(value=0.5, rank=0)
    assert found.work_imbalance == 1.0
    assert (found.num_slots, found.num_packs_by_cp_size) == (2, {"1": 2, "2": 0})
    assert found.num_aligned_by_cp_size == {"1": 24, "2": 0}


def test_a_teacher_counts_its_tokens_by_source(accumulator: Accumulator) -> None:
    """Three supervised tokens of source a and one of b; the second one has no teacher."""
    pack = Collator(doc_multiple=8, pad_id=0, pack_multiple=32).pack([answer(5, 3), answer(3, 1, source=1)])
    part = local_part(pack, np.arange(len(pack.tokens)), cp_size=1, doc_multiple=8)
    tokens = SupervisedTokens(
        objective=7.0,
        denominator=4,
        nll=np.array([1.0, 2.0, 3.0, 0.5]),
        entropy=None,
        correct=np.zeros(4),
        num_rows=4,
        buckets=accumulator.buckets(part),
        teacher=TaughtTokens(
            divergence=np.array([0.5, 0.0, 0.25, 2.0]),
            agrees=np.array([1.0, 0.0, 1.0, 0.0]),
            covered=np.array([0.5, 0.0, 0.75, 1.0]),
            is_taught=np.array([True, False, True, True]),
        ),
    )
    found = accumulator.totals([part], [tokens])
    assert (found.num_taught, found.divergence, found.num_agreeing, found.covered) == (3, 2.75, 2, 2.25)
    assert found.num_taught_by_source == {"a": 2, "b": 1} and found.divergence_by_source == {"a": 0.75, "b": 2.0}
    without = accumulator.totals([part], [replace(tokens, teacher=None)])
    assert (without.num_taught, without.divergence_by_source) == (0, {"a": 0.0, "b": 0.0})


def test_packs_are_counted_by_cp_size(accumulator: Accumulator) -> None:
    """A pack with two documents on two ranks, and a pack of filler on two ranks: four slots."""
    found = measured(accumulator, [([answer(5, 3), answer(9, 1)], [1.0, 2.0, 3.0, 0.5]), ([], [])], cp_size=2)
    assert (found.num_slots, found.num_packs_by_cp_size) == (4, {"1": 0, "2": 1})
    assert found.num_aligned_by_cp_size == {"1": 0, "2": 8 + 16}
    assert (found + found).num_aligned_by_cp_size == {"1": 0, "2": 48}


def test_bytes_over_cp_by_hand(accumulator: Accumulator) -> None:
    """24 tokens in two documents and 8 of filler on two ranks, 2 bytes per token; with fixed cp, filler does not count.
    A pack on one rank sends nothing, but with fixed cp it would."""
    samples = ([answer(5, 3), answer(9, 1)], [1.0, 2.0, 3.0, 0.5])
    of_two, of_one = measured(accumulator, [samples], cp_size=2), measured(accumulator, [samples])
    assert (of_two.cp_bytes, of_two.cp_bytes_fixed) == (2 * 32, 2 * 24)
    assert (of_one.cp_bytes, of_one.cp_bytes_fixed) == (0, 2 * 24)


def test_a_document_without_supervision_is_counted_but_has_no_perplexity(accumulator: Accumulator) -> None:
    found = measured(accumulator, [([answer(5, 0), answer(4, 1)], [1.0]), ([], [])])
    assert (found.num_documents, found.num_real_tokens, found.num_sequences) == (2, 9, 1)
    assert found.perplexity_min == found.perplexity_max == pytest.approx(2.718282)
    nothing = measured(accumulator, [([], [])])
    assert (nothing.num_tokens, nothing.num_documents, nothing.num_padded_tokens) == (0, 0, 32)
    assert nothing.num_sequences == 0 and nothing.perplexity_min == np.inf and nothing.perplexity_max == -np.inf


def test_batches_add_up(accumulator: Accumulator) -> None:
    one, two = ([answer(5, 3)], [1.0, 2.0, 3.0]), ([answer(4, 2, source=1)], [1.0, 0.0])
    apart, together = measured(accumulator, [one]) + measured(accumulator, [two]), measured(accumulator, [one, two])
    for name, value in vars(together).items():
        if name != "work_imbalance":
            assert getattr(apart, name) == value, name


def test_forty_million_tokens_are_counted_exactly(accumulator: Accumulator) -> None:
    """fp32 cannot count beyond 2**24 = 16,777,216."""
    parts = [measured(accumulator, [([answer(5, 3)], [1.0, 2.0, 3.0])])]
    for _ in range(24):
        parts.append(parts[-1] + parts[-1])
    total = parts[-1] + parts[-2]
    assert total.num_tokens == 3 * (2**24 + 2**23) == 75_497_472
    one_more = total + parts[0]
    assert one_more.num_tokens == 75_497_475 and one_more.num_tokens_by_position["0-2"] == 2**24 + 2**23 + 1


@dataclass(frozen=True, kw_only=True)
class WithLongest(Totals):
    """Totals with one more quantity: the longest document of any rank."""

    longest: Peak = quantity("Max", lambda peaks: peaks.get("longest", 0.0))


def test_a_new_maximum_is_not_added(accumulator: Accumulator) -> None:
    """The kind of a quantity decides how two batches are merged, wherever the field stands in the class."""
    both = vars(measured(accumulator, [([answer(5, 3)], [1.0, 2.0, 3.0])]))
    first = WithLongest(**both, longest=Peak(value=5.0, rank=0))
    second = WithLongest(**both, longest=Peak(value=9.0, rank=3))
    assert (first + second).longest == (second + first).longest == Peak(value=9.0, rank=3)


def test_names_of_buckets(accumulator: Accumulator) -> None:
    edges = (1000, 4096, 1 << 20)
    assert replace(accumulator, position_edges=edges).names("position") == ("0-1000", "1000-4K", "4K-1M", "1M+")
    assert replace(accumulator, position_edges=()).names("position") == ("0+",)


def test_squares_of_long_documents_are_counted_exactly() -> None:
    """In 32 bits, the square of 65,536 is 0."""
    flops = TrainFlops(1.0, 0.0, AttentionCost(1.0))
    assert flops.attention(np.array([65_536, 3], dtype=np.int32)) == 2**32 + 9
