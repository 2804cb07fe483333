"""Builds the part of a training run that a probe examines: process groups, data, and the model with its weights.

Nothing is written into the run's folder, and no checkpoint is renamed or removed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from sft.checkpoint import folders
from sft.config import Config
from sft.console import Console
from sft.data.pipeline import DataPipeline
from sft.mcore import process_groups
from sft.mcore.engine import Engine, release
from sft.parallel.collectives import broadcast_from_rank0
from sft.parallel.layout import Layout
from sft.recipe.join import join_ranks
from sft.recipe.resolved import Recipe
from sft.recipe.tokenizer import tokenizer_of
from sft.weights.run_weights import load_for_reading
from sft.weights.trained import trained_weights


@dataclass(frozen=True, kw_only=True)
class Session:
    """This process as a rank of the layout, with the data of the recipe."""

    config: Config
    layout: Layout
    groups: process_groups.ProcessGroups
    console: Console
    data: DataPipeline


@contextmanager
def session(recipe: Recipe, layout: Layout, store: dist.Store | None = None) -> Iterator[Session]:
    """A context in which this process has joined the others with the layout `layout`.  Progress is printed on stderr.

    store: as in `process_groups.start`; each of two sessions in one process needs its own
    """
    config = recipe.config
    groups = join_ranks(config, layout, store)
    console = Console(groups.rank, sys.stderr)
    data = DataPipeline(config, tokenizer_of(config), recipe.arguments, layout, groups, console)
    yield Session(config=config, layout=layout, groups=groups, console=console, data=data)
    process_groups.stop()  # not after an error: another rank may wait in a collective


@contextmanager
def model(session: Session) -> Iterator[tuple[Engine, str]]:
    """A context with an engine, whose memory is freed at the end, and a text that names the source of its weights.

    The source is a checkpoint, or the weights from which a new run starts.
    """
    config, data = session.config, session.data
    engine = Engine(
        config,
        session.layout,
        session.groups,
        vocab_size=data.vocab_size,
        num_steps=data.num_steps,
        trained=trained_weights(config, data.vocab_size),
    )
    source = broadcast_from_rank0(lambda: _checkpoint(config), session.groups.control)
    yield engine, load_for_reading(engine, config, source, session.console)
    release(engine)
    if session.groups.device.type == "cuda":
        torch.cuda.empty_cache()


def _checkpoint(config: Config) -> Path | None:
    """The checkpoint that checkpoint.resume names, or the run's newest; None: the run has none.

    Raises CheckpointError if a named path has no checkpoint.
    """
    own, resume_from = Path(config.run.dir) / "checkpoints", config.checkpoint.resume
    if resume_from not in ("auto", "must", "never"):
        return folders.find([Path(resume_from)], f"checkpoint.resume = {resume_from}")
    if resume_from == "must" or (resume_from == "auto" and folders.candidates(own)):
        return folders.find([own], f"checkpoint.resume = {resume_from}: {own}")
    return None
