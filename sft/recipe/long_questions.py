"""Makes the long-context questions of a run, and opens them when the run begins."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from sft.config import Config
from sft.console import Console
from sft.data.cache.corpus import Corpus
from sft.data.cache.prepare import num_processes
from sft.data.cache.vocabulary import check_ids
from sft.data.chat.tokenizer import ChatTokenizer
from sft.data.loader import make_loader
from sft.data.long.suite import Suite, SuiteSettings, fetch_suites, made_lengths, make_suites, open_suites
from sft.data.pipeline import DataPipeline
from sft.errors import ConfigError, DataError
from sft.estimate.communicators import nccl_bytes
from sft.estimate.gpus import Gpu, gpu_of_machine, usable_memory
from sft.estimate.lengths import Lengths
from sft.parallel.alignment import smallest_world
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0, on_every_rank
from sft.parallel.layout import Layout, vocab_rows
from sft.recipe.layout import resolve_layout
from sft.recipe.long_in_run import InRun, asked_in_run, may_ask
from sft.recipe.resolved import Recipe


def make_in_run(
    recipe: Recipe,
    layout: Layout,
    tokenizer: ChatTokenizer,
    corpus: Corpus,
    console: Console,
    num_steps: Callable[[], int],
    usable_bytes: float | None = None,
) -> InRun:
    """Makes the questions of the run that the cache lacks, and says what the run asks.

    corpus: of the training data; num_steps: computes the number of steps, and is called only if this is needed
    Raises DataError or ConfigError if data.long.in_run is true, and the questions cannot be asked.
    """
    config = recipe.config
    steps = num_steps() if may_ask(config) else None
    lengths = Lengths.of_corpus(corpus.shapes)
    rows = vocab_rows(config.model, tokenizer.vocab_size)
    asked = asked_in_run(recipe, layout, rows, lengths, steps, usable_bytes)
    if asked.settings is None:
        return asked
    try:
        data, cache_dir = config.data, Path(config.cache_dir)
        suites = make_suites(asked.settings, tokenizer, cache_dir, console, num_processes(data), data.cache_remote)
        for suite in suites:
            check_ids(config, suite.corpus, tokenizer)
    except DataError as error:
        if config.data.long.in_run is True:
            raise
        return InRun(settings=None, lines=(f"not in this run: {error}",), is_failure=True)
    return asked


def open_in_run(
    recipe: Recipe, layout: Layout, tokenizer: ChatTokenizer, data: DataPipeline, console: Console
) -> list[Suite]:
    """The suites that the run asks, which `make_in_run` has made; [] if it asks none.  Collective.

    Raises DataError or ConfigError if data.long.in_run is true, and the questions cannot be asked.
    """
    config, control = recipe.config, data.position.control
    if not may_ask(config):
        return []
    cache_dir, must = Path(config.cache_dir), config.data.long.in_run is True
    lengths = Lengths.of_corpus(data.train.corpus.shapes)
    usable = usable_bytes(config, layout, gpu_of_machine())
    asked = asked_in_run(recipe, layout, data.vocab_size, lengths, data.num_steps, usable)
    settings = asked.settings
    if settings is None:
        return []
    for line in asked.lines:
        console.say(f"long-context questions: {line}")
    command = f"`sft data prepare {recipe.arguments}`"

    def made() -> list[int]:
        fetch_suites(settings, tokenizer, cache_dir, console, config.data.cache_remote)
        lengths = made_lengths(settings, tokenizer, cache_dir)
        if missing := [f"{length:,}" for length in settings.lengths if length not in lengths]:
            absent = f"the questions of {', '.join(missing)} tokens are not in data.cache_dir {cache_dir}"
            if must:
                raise DataError(f"{absent}.  Run {command} first.")
            console.say(
                f"long-context questions: {absent}, so they are not asked; {command} makes them, or says why not"
            )
        if lengths:
            open_suites(replace(settings, lengths=tuple(lengths)), tokenizer, cache_dir)
        return lengths

    try:
        chosen = broadcast_from_rank0(made, control)
        if not chosen:
            return []
        return open_on_ranks(replace(settings, lengths=tuple(chosen)), tokenizer, config, control, console)
    except DataError as error:  # on all ranks
        if must:
            raise
        console.say(f"long-context questions are not asked: {error}")
        return []


def open_on_ranks(
    settings: SuiteSettings, tokenizer: ChatTokenizer, config: Config, group: dist.ProcessGroup, console: Console
) -> list[Suite]:
    """The suites of `open_suites`, on every rank.  A node with its own disk fetches them first.  Collective."""
    cache_dir, remote = Path(config.cache_dir), config.data.cache_remote
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    fetch = partial(fetch_suites, settings, tokenizer, cache_dir, console, remote)
    all_gather_objects(lambda: fetch() if is_first else None, group)
    return on_every_rank(lambda: open_suites(settings, tokenizer, cache_dir), group)


def prepare_questions(recipe: Recipe, tokenizer: ChatTokenizer, corpus: Corpus, console: Console) -> None:
    """Makes the questions of the run before its number of ranks is known.  Says what they are, or why they cannot be
    made.

    Raises the errors of `make_in_run`.
    """
    if not may_ask(recipe.config):
        return
    layout, train = smallest_layout(recipe), recipe.config.train

    def num_steps() -> int:
        return train.num_steps or make_loader(recipe.config, layout, corpus, pad_id=0).plans.total_steps(
            train.num_epochs or 1
        )

    asked = make_in_run(recipe, layout, tokenizer, corpus, console, num_steps)
    for line in asked.lines if asked.settings is not None or asked.is_failure else ():
        console.say(f"long-context questions: {line}")


def usable_bytes(config: Config, layout: Layout, gpu: Gpu | None) -> float | None:
    """The memory of the GPU that a rank can use; None on a CPU, or if the GPU is unknown."""
    return None if gpu is None or config.run.device == "cpu" else usable_memory(gpu, nccl_bytes(config, layout)).bytes


def smallest_layout(recipe: Recipe) -> Layout:
    """A layout with few copies of the model, on which questions take the smallest share of a run.

    A run on more ranks asks no other questions, and fewer if data-parallel ranks outnumber the questions.
    """
    smallest = smallest_world(recipe.config)
    for copies in (1, 2, 4, 8, 16, 32, 64):
        try:
            return Layout.resolve(recipe.config, smallest * copies)
        except ConfigError:
            continue
    return resolve_layout(recipe, smallest)
