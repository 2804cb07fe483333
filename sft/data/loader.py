"""Loads the microbatches that one rank of the dp x cp grid computes in a step.

`packing/balance.py` assigns the samples of a global batch to the data-parallel ranks, so that all ranks have about
equal work.  With dynamic CP, `packing/dynamic_cp.py` assigns them to the ranks of the dp x cp grid instead, and chooses
a CP size for each pack.  No sample is dropped or repeated.  Every rank has the same number of microbatches; a
microbatch without samples holds filler documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sft.batch import Microbatch, Sample
from sft.config import Config
from sft.data.cache.corpus import Corpus
from sft.data.packing import dynamic_cp
from sft.data.packing.balance import Slots, assign
from sft.data.packing.cp_cost import CpCost
from sft.data.packing.cp_grid import Grid, Slot, fixed
from sft.data.packing.mixture import Mixture
from sft.data.packing.pack import Collator
from sft.data.packing.plan import EpochPlans, PackingPlan
from sft.data.packing.plan_files import replayed_plans
from sft.layers.flops import AttentionCost
from sft.parallel.alignment import pack_multiple
from sft.parallel.layout import Layout
from sft.parallel.meetings import domain, meeting_ranks


@dataclass(eq=False)
class Loader:
    """The microbatches of one rank of the dp x cp grid, by step.

    collators  a collator for each CP size that a pack may have: {cp size: collator}
    attention  computes the cost of attention from the length of a document
    cp_cost    computes the time of a document from its CP size, for dynamic CP; None: fixed CP
    meets      whether all ranks wait for each other in every microbatch
    """

    corpus: Corpus
    plans: EpochPlans
    collators: Mapping[int, Collator]
    layout: Layout
    seq_length: int
    dp_rank: int
    attention: AttentionCost
    cp_cost: CpCost | None = None
    meets: bool = False

    def __post_init__(self) -> None:
        layout = self.layout
        assert 0 <= self.dp_rank < layout.dp
        assert self.plans.global_batch_size == layout.global_batch_size == layout.dp * layout.num_microbatches
        self._grid_rank = self.dp_rank * layout.cp + self.collators[layout.cp].cp_rank

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources; `Sample.source` is an index into them."""
        return self.corpus.sources

    def grid(self, step: int) -> Grid:
        """The packs of a step, counted from 0, and their CP sizes: by rank of the dp x cp grid, then microbatch."""
        return self._grid(*self._located(step))

    def slots(self, step: int) -> Slots:
        """Sample ids of a step with fixed CP: by data-parallel rank, then microbatch; an empty tuple is filler."""
        return self._slots(*self._located(step))

    def microbatches(self, step: int) -> list[Microbatch]:
        """This rank's microbatches of step `step`, counted from 0."""
        return self.microbatches_of(self.grid(step))

    def microbatches_of(self, grid: Grid) -> list[Microbatch]:
        """This rank's microbatches of the packs of a step."""
        return [self.microbatch(self.samples_of(slot), slot.cp_size) for slot in grid[self._grid_rank]]

    def samples(self, step: int) -> list[list[Sample]]:
        """The samples of step `step`, counted from 0, by microbatch of this rank."""
        return [self.samples_of(slot) for slot in self.grid(step)[self._grid_rank]]

    def microbatch(self, samples: Sequence[Sample], cp_size: int) -> Microbatch:
        """This rank's part of the pack of these samples.  cp_size: number of ranks that share the pack"""
        return self.collators[cp_size].microbatch(samples)

    def eval_batches(self) -> Iterator[list[Microbatch]]:
        """Yields this rank's microbatches of each global batch.  Every sample occurs once, in the order of the files.

        Packs of filler documents complete the last global batch.
        """
        plan = self.plans.unshuffled
        for batch in range(plan.num_batches(self.plans.global_batch_size)):
            yield self.microbatches_of(self._grid(plan, batch))

    def _located(self, step: int) -> tuple[PackingPlan, int]:
        epoch, batch = self.plans.locate(step)
        return self.plans.plan(epoch), batch

    def samples_of(self, slot: Slot) -> list[Sample]:
        """The samples of a pack, in order."""
        return [self.corpus.sample(i) for i in slot.samples]

    def _grid(self, plan: PackingPlan, batch: int) -> Grid:
        layout, cost, lengths = self.layout, self.cp_cost, self.corpus.shapes

        def fixed_cp() -> Grid:
            return fixed(self._slots(plan, batch), layout.cp)

        if cost is None:
            return fixed_cp()
        samples = np.array([i for ids in plan.batch(batch, self.plans.global_batch_size) for i in ids], dtype=np.int64)
        rank_tokens = self.seq_length // layout.cp
        grid = dynamic_cp.assign(
            samples,
            lengths,
            dp=layout.dp,
            cp=layout.cp,
            rank_tokens=rank_tokens,
            cost=cost,
            microbatch_multiple=layout.pp if layout.virtual_stages > 1 else 1,
        )
        return dynamic_cp.unless_longer(
            grid, samples, lengths, fixed_cp, cp=layout.cp, rank_tokens=rank_tokens, cost=cost
        )

    def _slots(self, plan: PackingPlan, batch: int) -> Slots:
        return assign(
            plan.batch(batch, self.plans.global_batch_size),
            self.corpus.shapes,
            dp=self.layout.dp,
            seq_length=self.seq_length,
            doc_multiple=self.layout.doc_multiple,
            attention=self.attention,
            meets=self.meets,
        )


def make_loader(
    config: Config,
    layout: Layout,
    corpus: Corpus,
    *,
    pad_id: int,
    dp_rank: int = 0,
    cp_rank: int = 0,
    is_held_out: bool = False,
) -> Loader:
    """The loader of a recipe for one rank of the dp x cp grid.

    pad_id       id of padding tokens
    is_held_out  whether the corpus is a held-out set.  Then an epoch contains every sample once, because the mixture
                 and data.plan apply to data.train only
    Raises DataError or ConfigError if the samples cannot be packed as the recipe says.
    """
    data, num_ranks = config.data, layout.dp * layout.cp
    rank_tokens = data.seq_length // layout.cp
    collators = {
        cp_size: Collator(
            doc_multiple=data.doc_multiple,
            pack_multiple=pack_multiple(config, cp_size),
            pad_id=pad_id,
            pad_to_length=cp_size * rank_tokens if data.pad_to_seq_length else 0,
            reduction=config.loss.reduction,
            shared=config.loss.shared,
            cp_size=cp_size,
            cp_rank=cp_rank % cp_size,
        )
        for cp_size in layout.cp_sizes or (layout.cp,)
    }
    plans = EpochPlans(
        corpus.shapes,
        data,
        seed=config.run.seed,
        global_batch_size=layout.global_batch_size,
        mixture=None if is_held_out else Mixture.of(data.sources, corpus.source_ids, corpus.lengths),
        replayed=None if is_held_out else replayed_plans(config, corpus),
    )
    return Loader(
        corpus,
        plans,
        collators,
        layout,
        seq_length=data.seq_length,
        dp_rank=dp_rank,
        attention=AttentionCost.of(config.model),
        cp_cost=CpCost.of(config) if layout.cp_sizes else None,
        meets=domain(meeting_ranks(config), num_ranks) == num_ranks,
    )
