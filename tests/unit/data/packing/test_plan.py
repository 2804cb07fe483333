"""Plans: every sample fits, every process makes the same plan, sources have their shares, and a plan is written to
files."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.config import SourceConfig
from sft.data.packing.mixture import Mixture, wanted_tokens
from sft.data.packing.plan import VERSION, PackingPlan, plan_epoch
from sft.data.packing.plan_files import compare_plans, read_plans, write_plans
from sft.data.packing.shuffle import mix
from sft.errors import ConfigError, DataError

LENGTHS = st.lists(st.integers(1, 256), min_size=1, max_size=200).map(np.array)


def plan(lengths: list[int] | np.ndarray, *, shuffle: bool = False, epoch: int = 0, capacity: int = 128) -> PackingPlan:
    return plan_epoch(np.array(lengths), capacity=capacity, doc_multiple=32, seed=1234, epoch=epoch, shuffle=shuffle)


def packs(plan: PackingPlan) -> list[tuple[int, ...]]:
    return [plan.pack(index) for index in range(len(plan))]


def test_plan_in_numbers() -> None:
    made = plan([40, 70, 20, 60, 10])
    assert packs(made) == [(0, 3), (1, 2), (4,)]
    assert made.fill == 288 / 384
    assert made.alignment_waste == 1 - 200 / 288


def test_packs_of_many_short_samples_leave_a_200th_free() -> None:
    """A pack has 400 units of 32 tokens, of which 2 stay free while another pack has room: the 60 samples of one unit
    go into the second pack, although the first has room for two of them."""
    units = [398, 300, *[1] * 60]
    assert packs(plan([32 * n for n in units], capacity=12_800)) == [(0,), tuple(range(1, 62))]
    # long samples: no unit stays free
    assert packs(plan([32 * n for n in [398, 400, 2]], capacity=12_800)) == [(0, 2), (1,)]


def test_at_most_64_packs_are_open() -> None:
    """After 200 packs of 96 tokens, each has room for one sample of 32, but only 64 of them are still open."""
    assert len(plan([96] * 200 + [32] * 200)) == 200 + (200 - 64) // 4


def test_the_shuffle_is_pinned() -> None:
    """Runs resume by the number of a sample, so this order may never change, whatever the release of numpy or
    Python."""
    order = plan([128] * 8, shuffle=True).samples.tolist()
    assert order == [3, 6, 7, 2, 1, 5, 0, 4]
    assert plan([128] * 8, shuffle=True, epoch=1).samples.tolist() == [1, 0, 4, 5, 2, 7, 6, 3]
    # splitmix64: the published first outputs for seeds 0 and 1234567
    assert mix(np.array([0, 1234567], dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF, 6457827717110365317]


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
    assert packs(made) == packs(plan_epoch(lengths, epoch=epoch, **arguments))


def test_best_fit_fills_where_order_does_not() -> None:
    """Lengths like those of chats (log-normal, median 400); packing them in order would fill 86% of each pack."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1.2, 20_000).astype(int) + 1, 8192)
    made = plan_epoch(lengths, capacity=8192, doc_multiple=1, seed=0, epoch=0, shuffle=True)
    assert made.fill > 0.995


def test_the_plan_is_pinned() -> None:
    """A run continues with the plan with which it began: if this digest changes, VERSION must change."""
    assert VERSION == 2
    lengths = np.arange(1, 2000) * 7919 % 500 + 1
    made = plan_epoch(lengths, capacity=1024, doc_multiple=32, seed=3, epoch=2, shuffle=True)
    digest = hashlib.sha256(made.starts.tobytes() + made.samples.tobytes()).hexdigest()
    assert digest == "d5b18ba1e35c0e3ae0e95523239695281b385c1ff545bd253a902181de1730ab"


def test_batches() -> None:
    made = plan([128] * 10)
    assert made.num_batches(4) == 3
    assert made.batch(2, 4) == [(8,), (9,), (), ()]


def test_a_mixture_repeats_samples_or_leaves_out_all() -> None:
    """Sources of 128 and 64 tokens, each with 128 wanted tokens: the second is repeated."""
    arguments = dict(capacity=128, doc_multiple=32, seed=0, shuffle=False)
    mixture = Mixture(sources=np.array([0, 1]), wanted=(128, 128))
    made = plan_epoch(np.array([128, 64]), epoch=0, mixture=mixture, **arguments)
    assert packs(made) == [(0,), (1, 1)]
    assert (made.fill, made.alignment_waste) == (1.0, 0.0)
    mixture = Mixture(sources=np.array([0]), wanted=(0,))
    with pytest.raises(
        DataError,
        match="epoch 3 has no sample, because data.train asks for less than one sample.  "
        "Raise epochs of data.train.",
    ):
        plan_epoch(np.array([5]), epoch=2, mixture=mixture, **arguments)


EIGHT = np.array([64, 40, 20, 64, 33, 10, 64, 5])
HEADER = {"data": "abc", "data.seq_length": 64, "data.doc_multiple": 8, "train.global_batch_size": 2, "run.seed": 1}


def drawn(seed: int, epoch: int = 0) -> PackingPlan:
    return plan_epoch(EIGHT, capacity=64, doc_multiple=8, seed=seed, epoch=epoch, shuffle=True)


def write(path: Path, *plans: PackingPlan, **header: Any) -> Path:
    write_plans(path, {**HEADER, **header}, plans, 2)
    return path


def rewrite(path: Path, line: int, **changes: Any) -> Path:
    """The file with some values of a line, counted from 0, replaced."""
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    rows[line] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_round_trip(tmp_path: Path) -> None:
    """The plan can also be read into a run with another seed."""
    plans = [drawn(3), drawn(3, epoch=1)]
    read = read_plans(write(tmp_path / "p", *plans), {**HEADER, "run.seed": 9}, EIGHT)
    assert [packs(made) for made in read] == [packs(made) for made in plans]
    assert [(made.fill, made.alignment_waste) for made in read] == [(made.fill, made.alignment_waste) for made in plans]


def test_the_file_in_letters(tmp_path: Path) -> None:
    in_order = plan_epoch(np.array([8, 8, 4]), capacity=16, doc_multiple=4, seed=0, epoch=0, shuffle=False)
    write_plans(tmp_path / "p", {"data": "abc"}, [in_order], 1)
    assert (tmp_path / "p").read_text() == (
        '{"format": "sft plan 1", "data": "abc"}\n'
        '{"epoch": 0, "batch": 0, "packs": [[0, 1]]}\n'
        '{"epoch": 0, "batch": 1, "packs": [[2]]}\n'
    )


def test_other_data_or_sizes_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p", drawn(3))
    with pytest.raises(DataError) as caught:
        read_plans(path, {**HEADER, "data": "xyz", "data.seq_length": 128, "train.global_batch_size": 4}, EIGHT)
    assert str(caught.value) == (
        f"the plan {path} was made for other data or sizes: data was abc, is xyz; data.seq_length was 64, is 128; "
        f"train.global_batch_size was 2, is 4.  Write a new plan: sft data plan RECIPE --write {path}"
    )


@pytest.mark.parametrize(
    "line, changes, words",
    [
        (1, {"packs": [[0], [8]]}, "p:2: expected packs of sample numbers from 0 to 7, none empty."),
        (1, {"packs": [[0], []]}, "p:2: expected packs of sample numbers from 0 to 7, none empty."),
        (1, {"packs": [[4, 2, 5], [2]]}, "p:2: a pack of 80 padded tokens; data.seq_length is 64."),
        (1, {"packs": [[0], [1], [2]]}, "p:2: 3 packs; a global batch must have 2 packs."),
        (
            1,
            {"packs": [[0]]},
            "p:3: the previous global batch is not full; only the last global batch of an epoch "
            "may have fewer packs.",
        ),
        (1, {"epoch": 1}, "p:2: epoch 1 follows 0 epochs; epochs must be in order, from 0."),
        (1, {"packs": [1, 2]}, 'p:2: expected a global batch, as in {"epoch": 0, "batch": 0, "packs": [[0, 1], [2]]}.'),
        (1, {"epoch": -1}, 'p:2: expected a global batch, as in {"epoch": 0, "batch": 0, "packs": [[0, 1], [2]]}.'),
        (0, {"format": "x"}, "p is not a plan: its first line does not name the format sft plan 1."),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, line: int, changes: dict[str, Any], words: str) -> None:
    path = rewrite(write(tmp_path / "p", drawn(3)), line, **changes)
    with pytest.raises(DataError) as caught:
        read_plans(path, HEADER, EIGHT)
    assert str(caught.value) == f"{tmp_path}/{words}"


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("hello\n")
    with pytest.raises(DataError, match="p is not a plan: a line is not a JSON object"):
        read_plans(tmp_path / "p", HEADER, EIGHT)
    with pytest.raises(DataError, match="the plan .*/q cannot be read: No such file or directory."):
        read_plans(tmp_path / "q", HEADER, EIGHT)
    with pytest.raises(ConfigError, match="the plan cannot be written to .*: Is a directory."):
        write_plans(tmp_path, HEADER, [drawn(3)], 2)


def test_what_differs_is_found(tmp_path: Path) -> None:
    """Samples 2 and 5 are exchanged between the second and the third batch of the second file."""
    files = {
        "a": (1, [[[0], [1]], [[2, 3]], [[4], [5]]]),
        "b": (2, [[[0], [1]], [[5], [3]], [[4, 2]]]),
    }
    for name, (seed, batches) in files.items():
        lines = [{"format": "sft plan 1", "run.seed": seed}, *({"epoch": 0, "packs": packs} for packs in batches)]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare_plans(tmp_path / "a", tmp_path / "b") == [
        "first difference: epoch 0, global batch 1, both counted from 0",
        f"2 of 3 batches differ; 2 samples of {tmp_path}/a are in another batch of {tmp_path}/b",
        "made from run.seed 1 and 2",
    ]


def test_what_does_not_count_and_what_does(tmp_path: Path) -> None:
    """The order of packs in a batch does not count; other data do, even with the same numbers of samples."""
    path = write(tmp_path / "a", drawn(3))
    batch = json.loads(path.read_text().splitlines()[1])
    other = rewrite(write(tmp_path / "b", drawn(3), **{"run.seed": 2}), 1, packs=batch["packs"][::-1])
    assert compare_plans(path, other) == []
    rewrite(other, 0, data="xyz")
    assert compare_plans(path, other) == ["made from other data: abc and xyz"]


def source(**shares: float) -> SourceConfig:
    return SourceConfig(files=["a.jsonl"], **shares)


def mixture(sources: list[int], lengths: list[int], *configs: SourceConfig) -> Mixture | None:
    return Mixture.of({f"s{i}": config for i, config in enumerate(configs)}, np.array(sources), np.array(lengths))


def test_wanted_tokens() -> None:
    """Sources of 300 and 100 tokens: no sample is left out, and no epoch is longer than necessary."""
    assert wanted_tokens([300, 100], [0.5, 0.5]) == [300, 300]
    assert wanted_tokens([300, 100], [6, 4]) == [300, 200]
    assert wanted_tokens([300, 100], [0.9, 0.1]) == [900, 100]


def test_weights_and_epochs() -> None:
    sources, lengths = [0, 0, 1], [100, 200, 100]
    by_weight = mixture(sources, lengths, source(weight=0.6), source(weight=0.4))
    by_epochs = mixture(sources, lengths, source(epochs=1.0), source(epochs=2.5))
    assert by_weight and by_weight.wanted == (300, 200)
    assert by_epochs and by_epochs.wanted == (300, 250)
    assert mixture(sources, lengths, source(), source()) is None
    assert Mixture.of({}, np.array(sources), np.array(lengths)) is None


def test_shares_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(DataError, match="data.train.s1 has no samples left, so the epoch cannot contain its share."):
        mixture([0, 0], [5, 5], source(weight=1), source(weight=1))
    with pytest.raises(
        DataError,
        match="asks for less than one sample per epoch, so some epochs would be empty.  " "Raise epochs of data.train.",
    ):
        mixture([0, 0], [422, 27], source(epochs=0.2))
    with pytest.raises(DataError, match="more than 1,000 times the tokens of the files"):
        mixture([0, 1], [50, 50], source(weight=1), source(weight=1e-9))


def test_samples_in_numbers() -> None:
    """Four samples of 10 tokens, with 25 wanted tokens per epoch of 40: two or three samples per epoch, each five times
    in eight epochs."""
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
    """This holds for every source in any epoch; every sample occurs, and those of one source occur exactly once."""
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
    """Over successive epochs, the counts of two samples differ by at most one."""
    of = np.array(lengths)
    made = Mixture(sources=np.zeros(len(of), dtype=int), wanted=(round(epochs * int(of.sum())),))
    seen = np.zeros(len(of), dtype=int)
    for epoch in range(first, first + 12):
        seen += np.bincount(made.samples(of, seed=3, epoch=epoch), minlength=len(of))
        assert seen.max() - seen.min() <= 1
