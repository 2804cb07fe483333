"""Provides the data of a run on this rank: loaders of training and held-out data, and the microbatches of each step.

With dynamic CP, checks before each step that all ranks have planned the same packs.
"""

import os
import socket
from dataclasses import InitVar, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sft.batch import Microbatch
from sft.config import Config, Input
from sft.console import Console
from sft.data.cache.corpus import Corpus, fetch_prepared, find_prepared, map_prepared
from sft.data.cache.vocabulary import check_ids
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.loader import Loader, make_loader
from sft.data.packing.cp_grid import Grid
from sft.data.packing.plan_files import follows_from
from sft.errors import DataError
from sft.parallel.collectives import all_gather_objects, all_reduce_max, broadcast_from_rank0, on_every_rank
from sft.parallel.layout import Layout, surplus_note, vocab_rows
from sft.parallel.position import Position


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The data of one step."""

    location: tuple[int, int]  # the epoch and the global batch in that epoch, both counted from 0
    samples: list[int]  # ids of all samples of the step, over all ranks
    microbatches: list[Microbatch]  # microbatches of this rank


def check_agreement(grid: Grid, step: int, group: dist.ProcessGroup) -> None:
    """Raises DataError on every rank if the ranks planned different packs for a step.  Collective over all ranks.

    Without this check, ranks that expect different CP sizes would wait for each other without end.  The check is one
    all-reduce of two integers.
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


@dataclass(eq=False)
class HeldOutData:
    """Loaders of the held-out sets by name.  The constructor is collective.

    arguments  the command-line arguments of this recipe, e.g. `a.yaml parallel.cp=4`, for error messages
    """

    config: Config
    tokenizer: InitVar[ChatTokenizer]
    arguments: str
    layout: Layout
    position: Position
    console: Console

    def __post_init__(self, tokenizer: ChatTokenizer) -> None:
        config = self.config
        self._command = f"sft data prepare {self.arguments}"
        self.vocab_size = vocab_rows(config.model, tokenizer.vocab_size)
        # Padding tokens count nowhere, but need a row of the embedding.
        self.pad_id = tokenizer.pad_id if tokenizer.pad_id < self.vocab_size else 0
        if (note := surplus_note(config.model, tokenizer.vocab_size)) is not None:
            self.console.say(note)
        sets = config.data.eval_sets.items()
        self.held_out = {name: self._loader(files, tokenizer, is_held_out=True) for name, files in sets}

    def held_out_facts(self) -> dict[str, tuple[str, int]]:
        """The digest of the corpus and the number of samples of each held-out set, by name."""
        return {name: (loader.corpus.digest, len(loader.corpus)) for name, loader in self.held_out.items()}

    def _loader(
        self, inputs: list[Input], tokenizer: ChatTokenizer, names: list[str] | None = None, is_held_out: bool = False
    ) -> Loader:
        """The loader of some files.  Rank 0 reads the files once and finds their stores; every rank maps the stores.

        A node with its own disk first fetches the stores from data.cache_remote.
        """
        data, cache_dir, control = self.config.data, Path(self.config.cache_dir), self.position.control
        command, console = self._command, self.console
        prepared = broadcast_from_rank0(
            lambda: find_prepared(inputs, data, tokenizer, cache_dir, command=command, console=console), control
        )

        def open_stores() -> Corpus:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                fetch_prepared(prepared, data, console)
            try:
                return map_prepared(prepared, data, names, command=command)
            except DataError as error:  # rank 0 has opened these stores
                raise DataError(
                    f"on rank {self.position.rank} ({socket.gethostname()}): {error}  Rank 0 has them.  If this node "
                    "has its own disk, set data.cache_remote, from which it then fetches them."
                ) from error

        corpus = on_every_rank(open_stores, control)
        if tokenizer.vocab_size > self.vocab_size or data.teacher.k is not None:
            broadcast_from_rank0(lambda: check_ids(self.config, corpus, tokenizer), self.position.control)
        self.console.say(corpus.summary())
        return make_loader(
            self.config,
            self.layout,
            corpus,
            pad_id=self.pad_id,
            dp_rank=self.position.dp_rank,
            cp_rank=self.position.cp_rank,
            is_held_out=is_held_out,
        )


@dataclass(eq=False)
class DataPipeline(HeldOutData):
    """Loaders of training and held-out data.  The constructor is collective.

    train          the loader of the training data
    plan           settings and digests that determine the order of the training data
    row_reports    counts of rows, samples and tokens: {train or name of a held-out set: `Corpus.report`}
    row_variables  names of variables that training rows give to the chat template
    num_steps      number of steps of the whole run
    num_packs      number of packs of the first epoch
    longest        length of the longest training sample, in tokens
    """

    def __post_init__(self, tokenizer: ChatTokenizer) -> None:
        super().__post_init__(tokenizer)
        config = self.config
        self.train = self._loader(config.data.train_files, tokenizer, config.data.train_names)
        corpus = self.train.corpus
        self.plan: dict[str, Any] = follows_from(config, corpus)
        loaders = {"train": self.train, **self.held_out}
        self.row_reports = {name: loader.corpus.report() for name, loader in loaders.items()}
        self.row_variables = sorted({name for report in corpus.row_reports.values() for name in report.variables})
        self._epoch: int | None = None  # the latest epoch whose packing was reported
        self.num_packs, self.longest = len(self.train.plans.plan(0)), corpus.longest
        self.num_steps = config.train.num_steps or self.train.plans.total_steps(config.train.num_epochs or 1)
        self.train.plans.check_length(self.num_steps)

    def batch(self, step: int) -> GlobalBatch:
        """The data of step `step`, counted from 0.  With dynamic CP: collective, see `check_agreement`."""
        grid = self.train.grid(step)
        if self.layout.cp_sizes:
            check_agreement(grid, step, self.position.control)
        return GlobalBatch(
            location=self.train.plans.locate(step),
            samples=[sample for pack in self.train.plans.global_batch(step) for sample in pack],
            microbatches=self.train.microbatches_of(grid),
        )

    def new_epoch(self, step: int) -> str | None:
        """A line about the packing of the epoch of step `step`; None if the previous call was in the same epoch."""
        epoch, _ = self.train.plans.locate(step)
        if epoch == self._epoch:
            return None
        self._epoch, plan = epoch, self.train.plans.plan(epoch)
        return f"packed epoch {epoch}: {len(plan):,} packs, {plan.fill:.1%} full"

    def row_name(self, sample: int) -> str:
        """The name of a sample for messages (`Corpus.name`), e.g. `chat.jsonl:1841`."""
        return self.train.corpus.name(sample)
