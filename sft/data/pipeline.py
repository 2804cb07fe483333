"""Provides the data of a run on this rank: prepared samples, their order, and this rank's microbatches."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sft.batch import Microbatch
from sft.config import Config, Input
from sft.console import Console
from sft.data.cache.corpus import Corpus, find_prepared, map_prepared
from sft.data.cache.vocabulary import check_ids
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.loader import Loader, make_loader
from sft.data.packing.cp_grid import Grid
from sft.data.packing.plan_files import follows_from
from sft.errors import DataError
from sft.parallel.collectives import all_gather_objects, all_reduce_max, broadcast_from_rank0
from sft.parallel.layout import Layout, surplus_note, vocab_rows
from sft.parallel.position import Position


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The data of one step."""

    location: tuple[int, int]  # the epoch and the global batch in that epoch, both counted from 0
    samples: list[int]  # numbers of all samples of the step, over all ranks
    microbatches: list[Microbatch]  # microbatches of this rank


def check_agreement(grid: Grid, step: int, group: dist.ProcessGroup) -> None:
    """Raise DataError on every rank if the ranks planned different packs for a step.  Collective over all ranks.

    Ranks with different CP sizes would wait for each other without end.  Costs one all-reduce of two numbers.
    """
    packs = [[slot for slot in slots if rank % slot.cp_size == 0] for rank, slots in enumerate(grid)]
    digest = int.from_bytes(blake2b(repr(packs).encode(), digest_size=7).digest(), "big")
    largest, smallest = all_reduce_max([digest, -digest], group)
    if largest == -smallest:
        return
    digests = all_gather_objects(lambda: digest, group)
    other = [rank for rank in range(len(digests)) if digests[rank] != digests[0]]
    raise DataError(
        f"rank {other[0]} has planned other packs or CP sizes for step {step + 1} than rank 0, as have {len(other)} of "
        f"{len(digests)} ranks.  The plan follows from the lengths of the samples and the recipe alone, so these "
        "processes run other code or read other data.  Install the same versions of sft, numpy and Python on each "
        "node, and give each node the same data and cache_dir."
    )


class HeldOutData:
    """Loaders of the held-out sets by name.  The constructor is collective."""

    def __init__(
        self,
        config: Config,
        tokenizer: ChatTokenizer,
        arguments: str,
        layout: Layout,
        position: Position,
        console: Console,
    ) -> None:
        """arguments: the command-line arguments of this recipe, e.g. `a.yaml parallel.cp=4`, for error messages"""
        self._config, self._layout, self._position, self._console = config, layout, position, console
        self._command = f"sft data prepare {arguments}"
        self.vocab_size = vocab_rows(config.model, tokenizer.vocab_size)
        if (note := surplus_note(config.model, tokenizer.vocab_size)) is not None:
            console.say(note)
        self._held_out = {name: self._prepared(files, tokenizer) for name, files in config.data.eval_sets.items()}
        self.held_out = {
            name: self._loader(corpus, tokenizer, is_held_out=True) for name, corpus in self._held_out.items()
        }

    def held_out_facts(self) -> dict[str, tuple[str, int]]:
        """Digest and number of documents of each held-out set."""
        return {name: (corpus.digest, len(corpus)) for name, corpus in self._held_out.items()}

    def _prepared(self, inputs: list[Input], tokenizer: ChatTokenizer, names: list[str] | None = None) -> Corpus:
        """Rank 0 reads the files once and finds their stores; then every rank maps the stores."""
        data, cache_dir = self._config.data, Path(self._config.cache_dir)
        prepared = broadcast_from_rank0(
            lambda: find_prepared(inputs, data, tokenizer, cache_dir, command=self._command), self._position.control
        )
        corpus = map_prepared(prepared, data, names, command=self._command)
        if tokenizer.vocab_size > self.vocab_size:
            broadcast_from_rank0(lambda: check_ids(self._config, corpus, tokenizer), self._position.control)
        self._console.say(corpus.summary())
        return corpus

    def _loader(self, corpus: Corpus, tokenizer: ChatTokenizer, *, is_held_out: bool = False) -> Loader:
        return make_loader(
            self._config,
            self._layout,
            corpus,
            # Padding tokens count nowhere, but need a row of the embedding.
            pad_id=tokenizer.pad_id if tokenizer.pad_id < self.vocab_size else 0,
            dp_rank=self._position.dp_rank,
            cp_rank=self._position.cp_rank,
            is_held_out=is_held_out,
        )


class DataPipeline(HeldOutData):
    """Loaders of training and held-out data.  The constructor is collective.

    plan         everything that determines the order of the data
    row_reports  numbers of rows and samples: {train or name of a held-out set: row report}
    row_variables  names of variables that training rows give to the chat template
    num_steps    number of steps of the whole run
    num_packs    number of packs of the first epoch
    longest      tokens of the longest sample
    """

    def __init__(
        self,
        config: Config,
        tokenizer: ChatTokenizer,
        arguments: str,
        layout: Layout,
        position: Position,
        console: Console,
    ) -> None:
        super().__init__(config, tokenizer, arguments, layout, position, console)
        data = config.data
        self._corpus = self._prepared(data.train_files, tokenizer, data.train_names)
        self.train = self._loader(self._corpus, tokenizer)
        self.plan: dict[str, Any] = follows_from(config, self._corpus)
        corpora = {"train": self._corpus, **self._held_out}
        self.row_reports = {name: corpus.report() for name, corpus in corpora.items()}
        reports = self._corpus.row_reports.values()
        self.row_variables = sorted({name for report in reports for name in report.variables})
        self._epoch: int | None = None  # the latest epoch whose packing was reported
        self.num_packs, self.longest = len(self.train.plans.plan(0)), int(self._corpus.lengths.max())
        self.num_steps = config.train.num_steps or self.train.plans.total_steps(config.train.num_epochs or 1)
        self.train.plans.check_length(self.num_steps)

    def batch(self, step: int) -> GlobalBatch:
        """The data of step `step`, counted from 0.  With dynamic CP: collective, see `check_agreement`."""
        grid = self.train.grid(step)
        if self._layout.cp_sizes:
            check_agreement(grid, step, self._position.control)
        return GlobalBatch(
            location=self.train.plans.locate(step),
            samples=[sample for pack in self.train.plans.global_batch(step) for sample in pack],
            microbatches=self.train.microbatches_of(grid),
        )

    def new_epoch(self, step: int) -> str | None:
        """A line about the packing of the epoch of step `step`; None if the epoch was already reported."""
        epoch, _ = self.train.plans.locate(step)
        if epoch == self._epoch:
            return None
        self._epoch, plan = epoch, self.train.plans.plan(epoch)
        return f"packed epoch {epoch}: {len(plan):,} packs, {plan.fill:.1%} full"

    def row_name(self, sample: int) -> str:
        """The name of a sample's row, e.g. `chat.jsonl:1841`."""
        return self._corpus.name(sample)
