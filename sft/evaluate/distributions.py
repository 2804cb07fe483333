"""Writes the most likely tokens of a model at each supervised token of a recipe's data, for the training of a student.

The model computes the packs of its recipe, on any layout, as in an evaluation.  `data/scoring.py` keeps what is done,
so a command that was killed continues.  This module decides in which order sets and global batches are scored.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sft.checkpoint.train_state import installed
from sft.config import Config
from sft.config.keys import values
from sft.console import Console
from sft.data.scoring import ScoredSet, ScoringData, part_dtype
from sft.errors import ConfigError
from sft.evaluate.weights import load_engine
from sft.files.atomic_files import explained
from sft.mcore import process_groups
from sft.mcore.engine import Engine
from sft.mcore.scores import Scores, score
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.parallel.layout import Layout
from sft.recipe.join import join_ranks
from sft.recipe.resolved import Recipe
from sft.recipe.tokenizer import tokenizer_of
from sft.run.signals import leave_with_parent

# Keys of a recipe on which scores depend, by their beginnings.
_CONDITIONS = ("model.", "parallel.", "attention.", "lora.", "run.precision", "data.seq_length", "data.doc_multiple")


def main(recipe: Recipe, layout: Layout, source: str | None, folder: Path, k: int) -> None:
    """Score all sets of the data, as one rank.  Prints results on stdout, progress on stderr.  Collective.

    source  names the weights, as in `held_out.main`
    folder  gets a file for each set
    k       number of tokens at each place
    Raises SftError if the data cannot be scored.
    """
    config = recipe.config
    leave_with_parent()
    groups = join_ranks(config, layout)
    console, out = Console(groups.rank, sys.stderr), Console(groups.rank, sys.stdout)
    tokenizer = tokenizer_of(config)
    data = ScoringData(config, tokenizer, recipe.arguments, layout, groups, console)
    if k > data.vocab_size:
        raise ConfigError(
            f"--top-k {k} is more than the {data.vocab_size:,} tokens of the vocabulary.  Give at most this number; 64 "
            "is usual."
        )
    engine, weights, step = load_engine(config, source, tokenizer, layout, groups, data.vocab_size, console)
    console.say(f"scoring with {weights}")
    for name, loader in data.sets.items():
        facts = {"k": k, "weights": weights, "step": step, "data": loader.corpus.digest}
        conditions = {**facts, **_conditions(config), "layout": layout.sizes, "versions": installed()}
        scored = ScoredSet(folder, name, loader, k, facts)
        if _score_set(engine, scored, name, conditions, tokenizer.ids_digest, console):
            out.say(f"{scored.file}: {len(loader.corpus):,} samples, scored with {weights}")
        else:
            out.say(f"{scored.file}: was finished before")
    process_groups.stop()


def _score_set(
    engine: Engine, scored: ScoredSet, name: str, conditions: dict[str, Any], tokenizer: str, console: Console
) -> bool:
    """Score the global batches of a set that lack parts, then make its file.  Collective.

    conditions, tokenizer: as in `ScoredSet`.  Returns False if the file was there before.
    """
    groups = engine.groups
    missing = broadcast_from_rank0(lambda: scored.begin(conditions), groups.control)
    if missing is None:
        return False
    grid_rank = groups.dp_rank * engine.layout.cp + groups.cp_rank
    num_scored = scored.num_batches - len(missing)
    with console.track(f"scoring {name}", scored.num_batches, "global batches", start=num_scored) as progress:
        for batch in missing:
            scores = score(engine, scored.loader.microbatches(batch), scored.k)

            def write(batch: int = batch, scores: list[Scores] = scores) -> None:
                if groups.reports:
                    with explained():
                        scored.write_part(batch, grid_rank, _part(scores, scored.k))

            all_gather_objects(write, groups.control)  # an error of one rank ends all
            progress.advance(1)

    def assemble() -> None:
        with explained():
            scored.assemble(tokenizer, console)

    broadcast_from_rank0(assemble, groups.control)
    return True


def _part(scores: Sequence[Scores], k: int) -> np.ndarray:
    """The scores of all microbatches of a global batch on this rank, of the type `part_dtype`."""
    part = np.zeros(sum(len(of_one.rows) for of_one in scores), dtype=part_dtype(k))
    start = 0
    for microbatch, of_one in enumerate(scores):
        rows = part[start : start + len(of_one.rows)]
        rows["microbatch"], rows["row"], rows["label"] = (microbatch, of_one.rows, of_one.labels)
        rows["label_logprob"], rows["ids"], rows["logprobs"] = (of_one.label_logprobs, of_one.ids, of_one.logprobs)
        start += len(rows)
    return part


def _conditions(config: Config) -> dict[str, Any]:
    """The values of the keys on which scores depend."""
    return {key: value for key, value in values(config).items() if key.startswith(_CONDITIONS)}
