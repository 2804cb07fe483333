"""Plans an epoch: assigns samples to packs and packs to global batches, and finds the global batch of a step.

The plan of an epoch depends only on lengths, mixture, seed, epoch, data.shuffle, seq_length, doc_multiple and
global_batch_size.  Every process computes the same plan, and no layout changes it.  There is no state to save: the
number of a step determines its samples.

This module does not read samples.  `balance.py` and `dynamic_cp.py` decide which rank computes which sample.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sft.config import DataConfig
from sft.data.packing.mixture import Mixture
from sft.data.packing.shuffle import shuffled
from sft.errors import ConfigError, DataError
from sft.parallel.shapes import SampleSizes, padded

# Version of the plans that this module, mixture.py and shuffle.py make.  Raise it whenever a change gives the same data
# another plan: a resumed run must not train on other batches than the plan that it began with.
VERSION = 2
OPEN_PACKS = 64
# If packs hold 16 samples or more on average, 1/200 of a pack stays free as long as another pack has room.  Free tokens
# let `balance.py` exchange samples between packs.  With fewer samples per pack, more than 1/200 stays free anyway.
MANY_SAMPLES, FREE_SHARE = 16, 200
# At most so many epochs, and samples of all epochs, are planned before a run starts.  These take about 20 s, and 20
# minutes.
MOST_EPOCHS, MOST_SAMPLES = 100_000, 10**9
_NUM_CACHED = 2  # number of plans kept in memory; the plan of a million samples takes 16 MB


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """The packs of an epoch: pack k holds samples[starts[k]:starts[k + 1]] in this order."""

    samples: np.ndarray  # int64 [n], sample ids
    starts: np.ndarray  # int64 [num_packs + 1]
    fill: float  # share of the packs' capacity that padded documents take
    alignment_waste: float  # share of the padded documents' tokens that is padding

    def __len__(self) -> int:
        return len(self.starts) - 1

    def pack(self, index: int) -> tuple[int, ...]:
        """Sample ids of one pack."""
        return tuple(self.samples[self.starts[index] : self.starts[index + 1]].tolist())

    def num_batches(self, global_batch_size: int) -> int:
        """The number of global batches; the last may have fewer packs.  10 packs, global_batch_size 4 -> 3"""
        return -(-len(self) // global_batch_size)

    def batch(self, index: int, global_batch_size: int) -> list[tuple[int, ...]]:
        """Sample ids of each pack of a global batch; empty tuples complete a last batch with too few packs."""
        packs = range(index * global_batch_size, (index + 1) * global_batch_size)
        return [self.pack(k) if k < len(self) else () for k in packs]


def plan_epoch(
    lengths: SampleSizes,
    *,
    capacity: int,
    doc_multiple: int,
    seed: int,
    epoch: int,
    shuffle: bool,
    mixture: Mixture | None = None,
) -> PackingPlan:
    """The plan of an epoch.  Each sample goes into the fullest open pack that has room for its padded length.

        lengths [40, 70, 20, 60, 10], capacity 128, doc_multiple 32, not shuffled (padded lengths: 64 96 32 64 32)
        -> packs (0, 3), (1, 2), (4)

    lengths   sizes of all samples, by sample id
    capacity  data.seq_length
    shuffle   whether samples are packed in random order instead of the order of their ids
    mixture   decides how often an epoch has each sample; None: once

    At most 64 packs are open; to open another pack, the fullest is closed.  If packs hold 16 samples or more on
    average, a 200th of each pack stays free while another open pack has room (`_best_fit`).  Packs are numbered by
    their first samples, so they follow the order of the shuffle.  Best fit with a limited number of open packs fills
    packs to 99.4% or more; packing in order leaves 5-15% empty.

    Raises DataError if the mixture leaves an epoch without a sample.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    order = np.arange(len(tokens)) if mixture is None else mixture.samples(tokens, seed=seed, epoch=epoch)
    if len(order) == 0:
        raise DataError(
            f"epoch {epoch + 1} has no sample, because data.train asks for less than one sample.  Raise epochs of "
            "data.train."
        )
    if shuffle:
        order = order[shuffled(len(order), seed, epoch)]
    sizes = padded(lengths[order], doc_multiple) // doc_multiple
    limit = capacity // doc_multiple
    assert sizes.min() > 0 and sizes.max() <= limit, "samples that do not fit are dealt with before"
    free = limit // FREE_SHARE if int(sizes.sum()) * MANY_SAMPLES <= limit * len(sizes) else 0
    pack_of = np.array(_best_fit(sizes.tolist(), limit, free), dtype=np.int64)
    counts = np.bincount(pack_of)
    return plan_of(order[np.argsort(pack_of, kind="stable")], counts, lengths, capacity, doc_multiple)


def plan_of(
    samples: np.ndarray, counts: np.ndarray, lengths: SampleSizes, capacity: int, doc_multiple: int
) -> PackingPlan:
    """The plan whose first pack holds the first counts[0] of `samples`, the second pack the next counts[1], and so
    on."""
    chosen = lengths[samples]
    total = int(padded(chosen, doc_multiple).sum())
    return PackingPlan(
        samples=samples,
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        fill=total / (len(counts) * capacity),
        alignment_waste=1 - int(np.asarray(chosen).sum()) / total,
    )


def _best_fit(sizes: list[int], limit: int, free: int) -> list[int]:
    """The number of each sample's pack.  Packs are numbered in the order in which they are opened.

    sizes, limit, free  lengths, capacity of a pack, and room that packs should keep, in units of doc_multiple tokens

    A sample goes into the fullest open pack that has `free` units of room left with the sample.  If there is no such
    pack, it goes into the fullest open pack with room.  If there is none either, it goes into a new pack.
    """
    smallest = min(sizes)
    # An open pack is one integer, (room left << shift) | number, so that packs are sorted by room left, then by age.
    shift = len(sizes).bit_length()
    number_bits = (1 << shift) - 1
    open_packs: list[int] = []
    pack_of = []
    opened = 0
    for size in sizes:
        index = bisect_left(open_packs, (size + free) << shift)
        if free and index == len(open_packs):
            index = bisect_left(open_packs, size << shift)
        if index < len(open_packs):
            left, number = open_packs[index] >> shift, open_packs.pop(index) & number_bits
        else:
            left, number = limit, opened
            opened += 1
            if len(open_packs) == OPEN_PACKS:
                del open_packs[0]
        pack_of.append(number)
        if left - size >= smallest:
            insort(open_packs, (left - size) << shift | number)
    return pack_of


@dataclass(eq=False)
class EpochPlans:
    """The plans of the epochs of one run.

    lengths   int64 [n], length of each sample in tokens, without padding; `Shapes` if samples have trees
    mixture   decides how often an epoch contains the samples of each source; None: every sample once
    replayed  plans from a file, which are used instead of newly made plans
    """

    lengths: SampleSizes
    data: DataConfig
    seed: int
    global_batch_size: int
    mixture: Mixture | None = None
    replayed: Sequence[PackingPlan] | None = None

    def __post_init__(self) -> None:
        self._ends = [0]  # ends[e]: number of steps of the first e epochs, for epochs that have been planned
        self._plans: dict[int, PackingPlan] = {}

    def plan(self, epoch: int) -> PackingPlan:
        """The plan of an epoch, counted from 0.  Raises ConfigError if the replayed plans end before the epoch."""
        if self.replayed is not None:
            if epoch >= len(self.replayed):
                raise ConfigError(
                    f"data.plan = {self.data.plan} ends after epoch {len(self.replayed)}, but the run needs more "
                    "epochs.  Write a longer plan, or lower train.num_steps or num_epochs."
                )
            return self.replayed[epoch]
        if epoch not in self._plans:
            cached = list(self._plans.items())[-(_NUM_CACHED - 1) :]
            self._plans = {**dict(cached), epoch: self._make(epoch, self.data.shuffle, self.mixture)}
        return self._plans[epoch]

    @cached_property
    def unshuffled(self) -> PackingPlan:
        """A plan for held-out data: every sample once, in the order of the files."""
        return self._make(0, shuffle=False, mixture=None)

    def steps_per_epoch(self, epoch: int) -> int:
        """The number of steps of an epoch; the last step may have fewer packs.  10 packs, global_batch_size 4 -> 3"""
        return self._steps_until(epoch + 1) - self._steps_until(epoch)

    def total_steps(self, num_epochs: int) -> int:
        """The number of steps of the first `num_epochs` epochs.  Epochs may have different numbers of packs.

        Makes the plans of all these epochs.  Raises ConfigError if they are too many.
        """
        self.check_work(num_epochs)
        return self._steps_until(num_epochs)

    def check_work(self, num_epochs: int) -> None:
        """Raises ConfigError if planning this many epochs before a run starts would take too long."""
        samples = num_epochs * len(self.plan(0).samples)
        if num_epochs > MOST_EPOCHS or samples > MOST_SAMPLES:
            raise ConfigError(
                f"the run has {num_epochs:,} epochs with {samples:,} samples; at most {MOST_EPOCHS:,} epochs with "
                f"{MOST_SAMPLES:,} samples are planned in advance.  Lower train.num_epochs or train.num_steps."
            )

    def check_length(self, num_steps: int) -> None:
        """Raises ConfigError if replayed plans end before the run.  Plans that are not replayed never end."""
        if self.replayed is not None:
            self.locate(num_steps - 1)

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and its global batch within the epoch.  Step, epoch and batch are counted from 0.

        3 steps per epoch: step 2 -> (0, 2)        step 3 -> (1, 0)
        """
        assert step >= 0
        while step >= self._ends[-1]:
            self._steps_until(len(self._ends))
        epoch = bisect_right(self._ends, step) - 1
        return epoch, step - self._ends[epoch]

    def global_batch(self, step: int) -> list[tuple[int, ...]]:
        """Sample ids of every pack of a step, over all ranks; an empty tuple is a pack of filler documents."""
        epoch, batch = self.locate(step)
        return self.plan(epoch).batch(batch, self.global_batch_size)

    def _steps_until(self, epoch: int) -> int:
        """The number of steps before an epoch."""
        while len(self._ends) <= epoch:
            steps = self.plan(len(self._ends) - 1).num_batches(self.global_batch_size)
            self._ends.append(self._ends[-1] + steps)
        return self._ends[epoch]

    def _make(self, epoch: int, shuffle: bool, mixture: Mixture | None) -> PackingPlan:
        return plan_epoch(
            self.lengths,
            capacity=self.data.seq_length,
            doc_multiple=self.data.doc_multiple,
            seed=self.seed,
            epoch=epoch,
            shuffle=shuffle,
            mixture=mixture,
        )
