"""Which samples a step trains on, and this rank's part of them.

Decides that global batch b of an epoch is packs b*G to b*G + G - 1 of the plan (`plan.py`), that its samples are
shared out anew so that all data-parallel ranks have equally much to compute (`balance.py`), and that slots without
a sample hold filler: no sample is dropped or repeated, and every rank has equally many microbatches.  Membership of
a global batch follows from the lengths, mixture, seed, epoch, seq_length, doc_multiple and global_batch_size alone.
Does not know which tokens of a pack this context-parallel rank holds: it is told (`cp.py`).

The loader has no state to save: a step's number says everything.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from sft.batch import Microbatch, Pack
from sft.config import DataConfig
from sft.data.cache.corpus import Corpus
from sft.data.packing.balance import Slots, assign
from sft.data.packing.mixture import Mixture
from sft.data.packing.pack import add_filler, filler_pack, make_pack, pad_to
from sft.data.packing.plan import Plan, plan_epoch
from sft.errors import ConfigError
from sft.parallel.alignment import aligned
from sft.parallel.layout import Layout

LocalIndices = Callable[[np.ndarray], np.ndarray]


class Loader:
    """The microbatches of one rank, by step.

    reduction is loss.reduction: what a token of a sample weighs.
    crossover is the length at which attention takes as long as all else; inf: only tokens count (`balance.py`).
    mixture says how often an epoch sees each source; None: once.  replayed gives the plans in their place.
    local_indices maps a pack's cu_seqlens (int32 numpy) to the positions in the pack that this rank holds.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        data: DataConfig,
        layout: Layout,
        seed: int,
        dp_rank: int,
        pad_id: int,
        local_indices: LocalIndices,
        reduction: str = "token",
        crossover: float = math.inf,
        mixture: Mixture | None = None,
        replayed: Sequence[Plan] | None = None,
    ) -> None:
        assert 0 <= dp_rank < layout.dp
        assert layout.global_batch_size == layout.dp * layout.num_microbatches
        self._corpus = corpus
        self._data = data
        self._layout = layout
        self._seed = seed
        self._dp_rank = dp_rank
        self._pad_id = pad_id
        self._local_indices = local_indices
        self._reduction = reduction
        self._crossover = crossover
        self._mixture = mixture
        self._replayed = replayed
        self._steps: list[int] = []  # steps of epoch 0, 1, ... as far as planned
        self._eval_plan: Plan | None = None
        self._plans: dict[int, Plan] = {}  # at most two: a million samples are 16 MB

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the data files, as `Sample.source` counts them."""
        return self._corpus.sources

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
            plan = self._plan(epoch, shuffle=self._data.shuffle, mixture=self._mixture)
            self._plans = {**dict(list(self._plans.items())[-1:]), epoch: plan}
        return self._plans[epoch]

    def steps_per_epoch(self, epoch: int) -> int:
        """Optimizer steps of an epoch; its last may hold fewer packs.

        10 packs, global_batch_size 4 -> 3
        """
        while len(self._steps) <= epoch:
            self._steps.append(self.plan(len(self._steps)).num_batches(self._layout.global_batch_size))
        return self._steps[epoch]

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
        return self.plan(epoch).batch(batch, self._layout.global_batch_size)

    def slots(self, step: int) -> Slots:
        """Sample ids of every microbatch of a step, by data-parallel rank; empty tuples are filler."""
        epoch, batch = self.locate(step)
        return self._slots(self.plan(epoch), batch)

    def microbatches(self, step: int) -> list[Microbatch]:
        """This rank's `num_microbatches` microbatches of a step, counted from 0."""
        epoch, batch = self.locate(step)
        return self._microbatches(self.plan(epoch), batch)

    def eval_batches(self) -> Iterator[list[Microbatch]]:
        """All packs once, unshuffled, `num_microbatches` per rank at a time; the last batch is filled up."""
        if self._eval_plan is None:
            self._eval_plan = self._plan(0, shuffle=False, mixture=None)
        plan = self._eval_plan
        for batch in range(plan.num_batches(self._layout.global_batch_size)):
            yield self._microbatches(plan, batch)

    def _plan(self, epoch: int, *, shuffle: bool, mixture: Mixture | None) -> Plan:
        return plan_epoch(
            self._corpus.lengths,
            capacity=self._data.seq_length,
            doc_multiple=self._data.doc_multiple,
            seed=self._seed,
            epoch=epoch,
            shuffle=shuffle,
            mixture=mixture,
        )

    def _microbatches(self, plan: Plan, batch: int) -> list[Microbatch]:
        return [self._microbatch(sample_ids) for sample_ids in self._slots(plan, batch)[self._dp_rank]]

    def _slots(self, plan: Plan, batch: int) -> Slots:
        return assign(
            plan.batch(batch, self._layout.global_batch_size),
            self._corpus.lengths,
            dp=self._layout.dp,
            seq_length=self._data.seq_length,
            doc_multiple=self._data.doc_multiple,
            crossover=self._crossover,
        )

    def _microbatch(self, sample_ids: tuple[int, ...]) -> Microbatch:
        doc_multiple = self._data.doc_multiple
        samples = [self._corpus.sample(sample_id) for sample_id in sample_ids]
        if samples:
            pack = make_pack(samples, doc_multiple=doc_multiple, pad_id=self._pad_id, reduction=self._reduction)
        else:
            pack = filler_pack(doc_multiple=doc_multiple, pad_id=self._pad_id)
        if self._data.pad_to_seq_length:
            pack = pad_to(pack, length=self._data.seq_length, doc_multiple=doc_multiple, pad_id=self._pad_id)
        pack = add_filler(pack, multiple=self._layout.pack_multiple, doc_multiple=doc_multiple, pad_id=self._pad_id)
        return local_part(pack, self._local_indices(pack.cu_seqlens), doc_multiple=doc_multiple)


def local_part(pack: Pack, indices: np.ndarray, *, doc_multiple: int) -> Microbatch:
    """The microbatch of the rank that holds positions `indices` of the pack; counts are of the whole pack."""

    def rows(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array[indices]).to(dtype).unsqueeze(0)  # [1, t]

    return Microbatch(
        tokens=rows(pack.tokens, torch.int64),
        labels=rows(pack.labels, torch.int64),
        position_ids=rows(pack.position_ids, torch.int64),
        loss_weights=rows(pack.loss_weights, torch.float32),
        documents=rows(pack.documents, torch.int32),
        cu_seqlens=torch.from_numpy(pack.cu_seqlens),
        max_seqlen=pack.max_seqlen,
        lengths=pack.lengths,
        supervised=np.bincount(pack.documents[pack.loss_mask], minlength=len(pack.lengths)).astype(np.int32),
        sources=pack.sources,
        num_documents=int((pack.lengths > 0).sum()),
        num_real_tokens=int(pack.lengths.sum()),
        num_aligned_tokens=int(aligned(pack.lengths, doc_multiple).sum()),
        num_tokens=int(pack.loss_mask.sum()),
        sample_ids=pack.sample_ids,
    )
