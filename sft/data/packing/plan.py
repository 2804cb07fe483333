"""Which samples share a pack, which packs a global batch, and which batch of which epoch a step trains on.

Decides the plan of an epoch: a pure function of lengths, mixture, seed, epoch, seq_length, doc_multiple and
global_batch_size.  Every process computes the same one, and no layout changes it.  There is no state to save: the
number of a step says everything.
Does not read samples, or know which rank computes which of them (`balance.py`).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sft.config import DataConfig
from sft.data.packing.mixture import Mixture
from sft.data.packing.shuffle import shuffled
from sft.errors import ConfigError, DataError
from sft.parallel.alignment import aligned

# Of what lengths become here, in mixture.py and in shuffle.py.  Raise it whenever the same data give another plan: a
# run must not go on with other batches than it began with.
VERSION = 2
OPEN_PACKS = 64
# Where a pack holds 16 samples or more on average, a 200th of it stays free as long as another pack has room: enough
# for ranks to be levelled (`balance.py`).  Longer samples leave as much anyway.
MANY_SAMPLES, FREE_SHARE = 16, 200
_NUM_CACHED = 2  # plans kept in memory: one of a million samples takes 16 MB


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An epoch's packs: pack k holds samples[starts[k]:starts[k + 1]], in that order."""

    samples: np.ndarray  # int64 [n]
    starts: np.ndarray  # int64 [num_packs + 1]
    fill: float  # share of the packs' capacity that padded documents take (the rest is tail)
    alignment_waste: float  # share of those padded tokens that is padding

    def __len__(self) -> int:
        return len(self.starts) - 1

    def pack(self, index: int) -> tuple[int, ...]:
        """Sample ids of one pack."""
        return tuple(self.samples[self.starts[index] : self.starts[index + 1]].tolist())

    def num_batches(self, global_batch_size: int) -> int:
        """10 packs, global_batch_size 4 -> 3; the last has 2 packs."""
        return -(-len(self) // global_batch_size)

    def batch(self, index: int, global_batch_size: int) -> list[tuple[int, ...]]:
        """Sample ids of each pack of a global batch; empty tuples stand for packs that a short last one lacks."""
        packs = range(index * global_batch_size, (index + 1) * global_batch_size)
        return [self.pack(k) if k < len(self) else () for k in packs]


def plan_epoch(
    lengths: np.ndarray,
    *,
    capacity: int,
    doc_multiple: int,
    seed: int,
    epoch: int,
    shuffle: bool,
    mixture: Mixture | None = None,
) -> Plan:
    """Packs every sample once, or as often as `mixture` says: into the fullest open pack that still takes it, padded.

        lengths [40, 70, 20, 60, 10], capacity 128, doc_multiple 32, in order (padded: 64 96 32 64 32)
        -> packs (0, 3), (1, 2), (4)

    At most 64 packs are open; then the fullest is closed.  Packs come in the order of their first samples,
    so the shuffle's order is kept up to the packs' width.  Best fit with a bounded number of open packs fills
    them to 99.4% and more, where packing in order leaves 5-15% empty.

    Raises DataError where the mixture leaves an epoch without a sample.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    order = np.arange(len(lengths)) if mixture is None else mixture.samples(lengths, seed=seed, epoch=epoch)
    if len(order) == 0:
        raise DataError(f"epoch {epoch + 1} has no sample: data.train asks for less than one.  Raise its epochs.")
    if shuffle:
        order = order[shuffled(len(order), seed, epoch)]
    sizes = aligned(lengths[order], doc_multiple) // doc_multiple
    limit = capacity // doc_multiple
    assert sizes.min() > 0 and sizes.max() <= limit, "samples that do not fit are dealt with before"
    free = limit // FREE_SHARE if int(sizes.sum()) * MANY_SAMPLES <= limit * len(sizes) else 0
    pack_of = np.array(_best_fit(sizes.tolist(), limit, free), dtype=np.int64)
    counts = np.bincount(pack_of)
    return plan_of(order[np.argsort(pack_of, kind="stable")], counts, lengths, capacity, doc_multiple)


def plan_of(samples: np.ndarray, counts: np.ndarray, lengths: np.ndarray, capacity: int, doc_multiple: int) -> Plan:
    """The plan whose packs hold, one after the other, counts[0], counts[1], ... of the samples."""
    padded = int(aligned(lengths[samples], doc_multiple).sum())
    return Plan(
        samples=samples,
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        fill=padded / (len(counts) * capacity),
        alignment_waste=1 - int(lengths[samples].sum()) / padded,
    )


def _best_fit(sizes: list[int], limit: int, free: int) -> list[int]:
    """Pack number of each size in turn; packs are numbered in the order they are opened.  `free` tokens are left in a
    pack as long as some open pack has that much more room than is needed."""
    smallest = min(sizes)
    # An open pack is one integer, left << shift | number: sorted by what is left, then by age.
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


class EpochPlans:
    """The plans of one run, of samples of these real lengths, int64 [n].

    mixture   how often an epoch sees each source; None: once
    replayed  plans that were written before, in place of new ones
    """

    def __init__(
        self,
        lengths: np.ndarray,
        data: DataConfig,
        *,
        seed: int,
        global_batch_size: int,
        mixture: Mixture | None = None,
        replayed: Sequence[Plan] | None = None,
    ) -> None:
        self._lengths, self._data, self._seed = lengths, data, seed
        self._mixture, self._replayed = mixture, replayed
        self.global_batch_size = global_batch_size
        self._num_steps: list[int] = []  # of epoch 0, 1, ... as far as planned
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        """The packs of an epoch, counted from 0.  Raises ConfigError where a replayed plan ends before it."""
        if self._replayed is not None:
            if epoch >= len(self._replayed):
                raise ConfigError(
                    f"data.plan = {self._data.plan} ends after epoch {len(self._replayed)}, and the run goes on.  "
                    f"Write a longer plan, or train less."
                )
            return self._replayed[epoch]
        if epoch not in self._plans:
            cached = list(self._plans.items())[-(_NUM_CACHED - 1) :]
            self._plans = {**dict(cached), epoch: self._make(epoch, self._data.shuffle, self._mixture)}
        return self._plans[epoch]

    def unshuffled(self) -> Plan:
        """Every sample once, in the order of the files: for held-out data."""
        return self._make(0, shuffle=False, mixture=None)

    def steps_per_epoch(self, epoch: int) -> int:
        """Optimizer steps of an epoch; its last may hold fewer packs.

        10 packs, global_batch_size 4 -> 3
        """
        while len(self._num_steps) <= epoch:
            self._num_steps.append(self.plan(len(self._num_steps)).num_batches(self.global_batch_size))
        return self._num_steps[epoch]

    def total_steps(self, num_epochs: int) -> int:
        """Steps of the first `num_epochs` epochs.  Their numbers differ as shuffles pack differently."""
        return sum(self.steps_per_epoch(epoch) for epoch in range(num_epochs))

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the global batch within that epoch; step, epoch and batch count from 0.

        3 steps per epoch: step 2 -> (0, 2)        step 3 -> (1, 0)
        """
        assert step >= 0
        epoch = 0
        while step >= self.steps_per_epoch(epoch):
            step -= self.steps_per_epoch(epoch)
            epoch += 1
        return epoch, step

    def global_batch(self, step: int) -> list[tuple[int, ...]]:
        """Sample ids of every pack of a step as planned, over all ranks; empty tuples are filler."""
        epoch, batch = self.locate(step)
        return self.plan(epoch).batch(batch, self.global_batch_size)

    def _make(self, epoch: int, shuffle: bool, mixture: Mixture | None) -> Plan:
        return plan_epoch(
            self._lengths,
            capacity=self._data.seq_length,
            doc_multiple=self._data.doc_multiple,
            seed=self._seed,
            epoch=epoch,
            shuffle=shuffle,
            mixture=mixture,
        )
