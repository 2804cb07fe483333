"""Typed sums in one process: what each number is, written out."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sft.batch import Sample
from sft.data.collate import local_part
from sft.data.packing.pack import add_filler, filler_pack, make_pack
from sft.metrics.accumulator import Accumulator, Place, Ratio, Schema, Totals

SCHEMA = Schema(position_edges=(2, 4), sources=("a", "b"))


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield Place(tells_tokens=True, tells_packs=True, cp=group, device=torch.device("cpu"))
    dist.destroy_process_group()


def sample(length: int, supervised: int, source: int = 0) -> Sample:
    mask = np.arange(length) >= length - supervised
    return Sample(sample_id=0, tokens=np.ones(length, dtype=np.int32), weights=mask.astype(np.float32), source=source)


def seen(place: Place, packs: list[tuple[list[Sample], list[float]]]) -> Totals:
    """Packs of samples, and -log p of their supervised tokens."""
    microbatches = []
    for samples, _ in packs:
        pack = make_pack(samples, doc_multiple=8, pad_id=0) if samples else filler_pack(doc_multiple=8, pad_id=0)
        pack = add_filler(pack, multiple=32, doc_multiple=8, pad_id=0)
        microbatches.append(local_part(pack, np.arange(len(pack.tokens)), doc_multiple=8))
    tally = Accumulator(SCHEMA, (1.0, 1.0))
    tally.packs(microbatches)
    for index, (_, nll) in enumerate(packs):
        tally.tokens(
            microbatches,
            index,
            objective=sum(nll),
            denominator=len(nll),
            logprob=-np.array(nll, dtype=np.float32),
            entropy=None,
            correct=np.array(nll) == 0,  # 1 where the label was certain
        )
    return tally.reduce(place, {"data_wait_s": 0.5})


def test_written_out(place: Place) -> None:
    """Lengths 5 and 3 in one pack, 4 in another; labels 3 and 1, and 2."""
    found = seen(place, [([sample(5, 3), sample(3, 1, source=1)], [1.0, 2.0, 3.0, 0.5]), ([sample(4, 2)], [1.0, 0.0])])
    assert (found.num_tokens, found.num_real_tokens, found.num_documents) == (6, 12, 3)
    assert (found.num_aligned_tokens, found.num_padded_tokens) == (24, 64)  # 8 each; packs of 32
    assert found.sum_of_squares == 25 + 9 + 16
    assert found.loss == found.nll == 7.5 and found.denominator == 6.0
    assert found.num_correct == 1
    # Predicting tokens: places 1, 2, 3 of the first, 1 of the second, 1, 2 of the third.
    assert found.by_position == (
        Ratio(total=1.0 + 0.5 + 1.0, count=3),
        Ratio(total=2.0 + 3.0 + 0.0, count=3),
        Ratio(total=0.0, count=0),
    )
    assert found.by_source == (Ratio(total=7.0, count=5), Ratio(total=0.5, count=1))
    # Means 2, 0.5 and 0.5: e^2 = 7.389056, e^0.5 = 1.648721.
    assert found.sequence_nll == Ratio(total=3.0, count=3)
    assert found.perplexity.total == pytest.approx(7.389056 + 2 * 1.648721)
    assert (found.perplexity_min, found.perplexity_max) == pytest.approx((1.648721, 7.389056))
    assert found.peaks["data_wait_s"].value == 0.5
    assert found.work_imbalance == 1.0


def test_a_document_without_supervision_is_counted_but_has_no_perplexity(place: Place) -> None:
    found = seen(place, [([sample(5, 0), sample(4, 1)], [1.0]), ([], [])])
    assert (found.num_documents, found.num_real_tokens, found.perplexity.count) == (2, 9, 1)
    assert found.perplexity_min == found.perplexity_max == pytest.approx(2.718282)


def test_nothing_at_all(place: Place) -> None:
    found = seen(place, [([], [])])
    assert (found.num_tokens, found.num_documents, found.num_padded_tokens) == (0, 0, 32)
    assert found.perplexity.value is None and found.by_position[0].value is None
    assert found.perplexity_min == np.inf and found.perplexity_max == 0.0


def test_batches_add_up(place: Place) -> None:
    one, two = ([sample(5, 3)], [1.0, 2.0, 3.0]), ([sample(4, 2, source=1)], [1.0, 0.0])
    apart, together = seen(place, [one]) + seen(place, [two]), seen(place, [one, two])
    for name, value in vars(together).items():
        if name not in ("peaks", "work_imbalance"):
            assert getattr(apart, name) == value, name


def test_forty_million_tokens_are_counted_exactly(place: Place) -> None:
    """fp32 stops counting at 2**24 = 16,777,216."""
    parts = [seen(place, [([sample(5, 3)], [1.0, 2.0, 3.0])])]
    for _ in range(24):
        parts.append(parts[-1] + parts[-1])
    total = parts[-1] + parts[-2]
    assert total.num_tokens == 3 * (2**24 + 2**23) == 75_497_472
    one_more = total + parts[0]
    assert one_more.num_tokens == 75_497_475 and one_more.by_position[0].count == 2**24 + 2**23 + 1


def test_bytes_sent(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three buckets and two sources, to the world; over cp comes a float64 for each document."""
    sent = []
    gather = dist.all_gather_into_tensor
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda out, mine: (sent.append(mine.nbytes), gather(out, mine)))
    seen(place, [([sample(5, 3)], [1.0, 2.0, 3.0])])
    assert sent == [Accumulator.bytes_sent(3, 2, 0)]
    assert Accumulator.bytes_sent(3, 2, 1000) == sent[0] + 8000
    assert Accumulator.bytes_sent(4, 100, 7000) < 64 << 10


@pytest.mark.parametrize(
    "edges, names",
    [
        ((4096, 16384, 65536), ("0-4K", "4K-16K", "16K-64K", "64K+")),
        ((1000, 1 << 20), ("0-1000", "1000-1M", "1M+")),
        ((), ("0+",)),
    ],
)
def test_names_of_buckets(edges: tuple[int, ...], names: tuple[str, ...]) -> None:
    assert Schema(position_edges=edges, sources=()).positions == names
