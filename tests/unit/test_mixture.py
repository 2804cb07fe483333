"""Shares of tokens, and that the samples of a part of a round take turns."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.config import SourceConfig
from sft.data.packing.mixture import Mixture, wanted_tokens
from sft.errors import DataError


def source(**shares: float) -> SourceConfig:
    return SourceConfig(files=["a.jsonl"], **shares)


def mixture(sources: list[int], lengths: list[int], *configs: SourceConfig) -> Mixture | None:
    return Mixture.of({f"s{i}": config for i, config in enumerate(configs)}, np.array(sources), np.array(lengths))


@pytest.mark.parametrize(
    "weights, wanted",
    [
        ([0.5, 0.5], [300, 300]),
        ([0.6, 0.4], [300, 200]),
        ([6, 4], [300, 200]),
        ([0.9, 0.1], [900, 100]),
        ([3, 1], [300, 100]),
    ],
)
def test_wanted_tokens(weights: list[float], wanted: list[int]) -> None:
    """Of 300 and 100: nothing is left out, and no epoch is longer than that takes."""
    assert wanted_tokens([300, 100], weights) == wanted


def test_weights_and_epochs() -> None:
    sources, lengths = [0, 0, 1], [100, 200, 100]
    by_weight = mixture(sources, lengths, source(weight=0.6), source(weight=0.4))
    by_epochs = mixture(sources, lengths, source(epochs=1.0), source(epochs=2.5))
    assert by_weight and by_weight.wanted == (300, 200)
    assert by_epochs and by_epochs.wanted == (300, 250)
    assert mixture(sources, lengths, source(), source()) is None
    assert Mixture.of({}, np.array(sources), np.array(lengths)) is None


def test_a_source_without_samples_is_refused() -> None:
    with pytest.raises(DataError, match="data.train.s1 has no sample left, and its share cannot be had without."):
        mixture([0, 0], [5, 5], source(weight=1), source(weight=1))


def test_epochs_of_next_to_nothing_or_far_too_much_are_refused() -> None:
    with pytest.raises(DataError, match="asks for less than a sample: some epochs would have none.  Raise its epochs."):
        mixture([0, 0], [422, 27], source(epochs=0.2))
    for one, other in ((source(epochs=1e300), source(epochs=1)), (source(weight=1), source(weight=1e-9))):
        with pytest.raises(DataError, match="over 1,000 times what the files hold"):
            mixture([0, 1], [50, 50], one, other)


def test_samples_in_numbers() -> None:
    """Four samples of 10 tokens, 25 wanted each epoch of 40: two or three at a time, all five times in eight epochs."""
    made = Mixture(sources=np.zeros(4, dtype=int), wanted=(25,))
    epochs = [made.samples(np.full(4, 10), seed=1, epoch=epoch).tolist() for epoch in range(8)]
    assert [len(ids) for ids in epochs] == [3, 2, 3, 2, 3, 2, 3, 2]
    assert Counter(i for ids in epochs for i in ids) == {0: 5, 1: 5, 2: 5, 3: 5}
    whole = Mixture(sources=np.zeros(4, dtype=int), wanted=(80,))
    assert whole.samples(np.full(4, 10), seed=1, epoch=3).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


CORPUS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 500)), min_size=1, max_size=60)
SHARES = st.lists(st.floats(0.05, 20), min_size=3, max_size=3)


@settings(max_examples=200, deadline=None)
@given(CORPUS, SHARES, st.integers(0, 10**6), st.integers(0, 5))
def test_shares_are_exact_to_a_sample(
    corpus: list[tuple[int, int]], weights: list[float], epoch: int, seed: int
) -> None:
    """Of every source, in any epoch; and every sample is seen, one source exactly once."""
    corpus = [*corpus, (0, 7), (1, 7), (2, 7)]
    sources, lengths = (np.array(column) for column in zip(*corpus))
    tokens = [int(lengths[sources == s].sum()) for s in range(3)]
    wanted = wanted_tokens(tokens, weights)
    made = Mixture(sources=sources, wanted=tuple(wanted)).samples(lengths, seed=seed, epoch=epoch)
    assert set(made.tolist()) == set(range(len(corpus)))
    for s in range(3):
        own = made[sources[made] == s]
        assert abs(int(lengths[own].sum()) - wanted[s]) < lengths[sources == s].max()
        assert wanted[s] / sum(wanted) == pytest.approx(weights[s] / sum(weights), abs=2 / sum(wanted))
    seen = Counter(made.tolist())
    assert any(all(seen[i] == 1 for i in np.flatnonzero(sources == s)) for s in range(3))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.floats(0.01, 3), st.integers(0, 10**6))
def test_samples_take_turns(lengths: list[int], epochs: float, first: int) -> None:
    """Over successive epochs no sample is ahead of another by more than one."""
    of = np.array(lengths)
    made = Mixture(sources=np.zeros(len(of), dtype=int), wanted=(round(epochs * int(of.sum())),))
    seen = np.zeros(len(of), dtype=int)
    for epoch in range(first, first + 12):
        seen += np.bincount(made.samples(of, seed=3, epoch=epoch), minlength=len(of))
        assert seen.max() - seen.min() <= 1
