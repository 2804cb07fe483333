"""Loads the microbatches that a data-parallel rank computes in a step.

The samples of a global batch are assigned anew to the data-parallel ranks, to give all ranks equal amounts of work
(`packing/balance.py`).  No sample is dropped or repeated.  Every rank has the same number of microbatches; a microbatch
without samples holds filler documents.
"""

from collections.abc import Iterator, Sequence

from sft.batch import Microbatch, Sample
from sft.config import Config
from sft.data.cache.corpus import Corpus
from sft.data.packing.balance import Slots, assign
from sft.data.packing.mixture import Mixture
from sft.data.packing.pack import Collator, LocalIndices
from sft.data.packing.plan import EpochPlans, Plan
from sft.data.packing.plan_files import replayed_plans
from sft.flops import AttentionCost
from sft.parallel.layout import Layout


class Loader:
    """The microbatches of one data-parallel rank, by step.

    attention  cost of attention by the length of a document; by default none, so that a cost is a token count
    """

    def __init__(
        self,
        corpus: Corpus,
        plans: EpochPlans,
        collator: Collator,
        layout: Layout,
        *,
        seq_length: int,
        dp_rank: int,
        attention: AttentionCost = AttentionCost(),
    ) -> None:
        assert 0 <= dp_rank < layout.dp
        assert plans.global_batch_size == layout.global_batch_size == layout.dp * layout.num_microbatches
        self.plans = plans
        self._corpus, self._collator, self._dp, self._dp_rank = corpus, collator, layout.dp, dp_rank
        self._seq_length, self._attention = seq_length, attention
        self._eval_plan: Plan | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources; `Sample.source` is an index into them."""
        return self._corpus.sources

    def slots(self, step: int) -> Slots:
        """Sample ids of every microbatch of a step, by data-parallel rank; empty tuples are packs of filler."""
        epoch, batch = self.plans.locate(step)
        return self._slots(self.plans.plan(epoch), batch)

    def microbatches(self, step: int) -> list[Microbatch]:
        """This rank's `num_microbatches` microbatches of a step, counted from 0."""
        epoch, batch = self.plans.locate(step)
        return self._microbatches(self.plans.plan(epoch), batch)

    def samples(self, step: int) -> list[list[Sample]]:
        """The samples of each of this rank's microbatches of a step."""
        epoch, batch = self.plans.locate(step)
        return self._samples(self.plans.plan(epoch), batch)

    def microbatch(self, samples: Sequence[Sample]) -> Microbatch:
        """This rank's part of the pack of these samples."""
        return self._collator.microbatch(samples)

    def eval_batches(self) -> Iterator[list[Microbatch]]:
        """All packs once, unshuffled, `num_microbatches` per rank at a time; packs of filler complete the last one."""
        if self._eval_plan is None:
            self._eval_plan = self.plans.unshuffled()
        for batch in range(self._eval_plan.num_batches(self.plans.global_batch_size)):
            yield self._microbatches(self._eval_plan, batch)

    def _microbatches(self, plan: Plan, batch: int) -> list[Microbatch]:
        return [self.microbatch(samples) for samples in self._samples(plan, batch)]

    def _samples(self, plan: Plan, batch: int) -> list[list[Sample]]:
        slots = self._slots(plan, batch)[self._dp_rank]
        return [[self._corpus.sample(i) for i in sample_ids] for sample_ids in slots]

    def _slots(self, plan: Plan, batch: int) -> Slots:
        return assign(
            plan.batch(batch, self.plans.global_batch_size),
            self._corpus.lengths,
            dp=self._dp,
            seq_length=self._seq_length,
            doc_multiple=self._collator.doc_multiple,
            attention=self._attention,
        )


def make_loader(
    config: Config,
    layout: Layout,
    corpus: Corpus,
    *,
    pad_id: int,
    local_indices: LocalIndices,
    dp_rank: int = 0,
    is_held_out: bool = False,
) -> Loader:
    """The loader of a recipe.  `pad_id` and `local_indices` as in `Collator`.

    The mixture and data.plan apply to data.train only; a held-out set contains every sample once.
    """
    data = config.data
    collator = Collator(
        doc_multiple=data.doc_multiple,
        pack_multiple=layout.pack_multiple,
        pad_id=pad_id,
        pad_to_length=data.seq_length if data.pad_to_seq_length else None,
        reduction=config.loss.reduction,
        local_indices=local_indices,
    )
    plans = EpochPlans(
        corpus.lengths,
        data,
        seed=config.run.seed,
        global_batch_size=layout.global_batch_size,
        mixture=None if is_held_out else Mixture.of(data.sources, corpus.source_ids, corpus.lengths),
        replayed=None if is_held_out else replayed_plans(config, corpus),
    )
    attention = AttentionCost.of(config.model)
    return Loader(corpus, plans, collator, layout, seq_length=data.seq_length, dp_rank=dp_rank, attention=attention)
