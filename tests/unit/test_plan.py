"""Plans that place every sample within capacity, the same in every process."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.data.packing.mixture import Mixture
from sft.data.packing.plan import VERSION, Plan, plan_epoch
from sft.data.packing.shuffle import mix
from sft.errors import DataError

LENGTHS = st.lists(st.integers(1, 256), min_size=1, max_size=200).map(np.array)


def plan(lengths: list[int] | np.ndarray, *, shuffle: bool = False, epoch: int = 0, capacity: int = 128) -> Plan:
    return plan_epoch(np.array(lengths), capacity=capacity, doc_multiple=32, seed=1234, epoch=epoch, shuffle=shuffle)


def packs(plan: Plan) -> list[tuple[int, ...]]:
    return [plan.pack(index) for index in range(len(plan))]


def test_plan_in_numbers() -> None:
    made = plan([40, 70, 20, 60, 10])
    assert packs(made) == [(0, 3), (1, 2), (4,)]
    assert made.fill == 288 / 384
    assert made.alignment_waste == 1 - 200 / 288


def test_capacity_is_counted_in_padded_lengths() -> None:
    """P07: 992 documents of 33 tokens are 32,736 tokens, but 63,488 once padded."""
    made = plan_epoch(np.full(992, 33), capacity=32768, doc_multiple=64, seed=0, epoch=0, shuffle=False)
    assert [len(pack) for pack in packs(made)] == [512, 480]


def test_packs_of_many_short_samples_leave_a_200th_free() -> None:
    """A pack is 400 units of 32 tokens, of which 2 are spared while another pack has room: the 60 samples of one unit
    go beside the second, though the first has room for two of them."""
    units = [398, 300, *[1] * 60]
    assert packs(plan([32 * n for n in units], capacity=12_800)) == [(0,), tuple(range(1, 62))]
    assert packs(plan([32 * n for n in [398, 400, 2]], capacity=12_800)) == [(0, 2), (1,)]  # long ones: none is spared


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
    assert mix(np.array([0, 1234567], dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF, 6457827717110365317]


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
    assert packs(made) == packs(plan_epoch(lengths, epoch=epoch, **arguments))


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
        "import numpy as np; from sft.data.packing.plan import plan_epoch;"
        "lengths = np.arange(1, 2000) * 7919 % 500 + 1;"
        "made = plan_epoch(lengths, capacity=1024, doc_multiple=32, seed=3, epoch=2, shuffle=True);"
        "print(made.starts.tolist(), made.samples.tolist())"
    )
    root = Path(__file__).parents[2]
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True,
        env={"PYTHONHASHSEED": "77"},
    )  # fmt: skip
    lengths = np.arange(1, 2000) * 7919 % 500 + 1
    here = plan_epoch(lengths, capacity=1024, doc_multiple=32, seed=3, epoch=2, shuffle=True)
    assert answer.stdout.strip() == f"{here.starts.tolist()} {here.samples.tolist()}"


def test_the_plan_is_pinned() -> None:
    """A run goes on with the plan it began with: where this digest changes, VERSION has to."""
    assert VERSION == 2
    lengths = np.arange(1, 2000) * 7919 % 500 + 1
    made = plan_epoch(lengths, capacity=1024, doc_multiple=32, seed=3, epoch=2, shuffle=True)
    digest = hashlib.sha256(made.starts.tobytes() + made.samples.tobytes()).hexdigest()
    assert digest == "d5b18ba1e35c0e3ae0e95523239695281b385c1ff545bd253a902181de1730ab"


def test_batches() -> None:
    made = plan([128] * 10)
    assert made.num_batches(4) == 3
    assert made.batch(2, 4) == [(8,), (9,), (), ()]


def test_a_mixture_repeats_samples() -> None:
    """Sources of 128 and 64 tokens, 128 wanted of each: the second twice."""
    mixture = Mixture(sources=np.array([0, 1]), wanted=(128, 128))
    made = plan_epoch(
        np.array([128, 64]), capacity=128, doc_multiple=32, seed=0, epoch=0, shuffle=False, mixture=mixture
    )
    assert packs(made) == [(0,), (1, 1)]
    assert (made.fill, made.alignment_waste) == (1.0, 0.0)


def test_an_epoch_without_a_sample_is_refused() -> None:
    mixture = Mixture(sources=np.array([0]), wanted=(0,))
    with pytest.raises(DataError, match="epoch 3 has no sample: data.train asks for less than one.  Raise its epochs."):
        plan_epoch(np.array([5]), capacity=32, doc_multiple=32, seed=0, epoch=2, shuffle=True, mixture=mixture)
