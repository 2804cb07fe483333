"""The plans of a run's epochs, and which global batch of which epoch a step trains on.

The membership of a global batch follows from the lengths, mixture, seed, epoch, seq_length, doc_multiple and
global_batch_size alone: not from the layout.  There is no state to save: the number of a step says everything.
"""

from collections.abc import Sequence

import numpy as np

from sft.config import DataConfig
from sft.data.packing.mixture import Mixture
from sft.data.packing.plan import Plan, plan_epoch
from sft.errors import ConfigError

_NUM_CACHED = 2  # plans kept in memory: one of a million samples takes 16 MB


class EpochPlans:
    """The plans of one run.

    lengths            int64 [n], real length of each sample
    global_batch_size  packs of a step
    mixture            how often an epoch sees each source; None: once
    replayed           plans that were written before, in place of new ones
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
        """Epoch and global batch within it of a step, all counted from 0.

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
