"""Writes the most likely tokens of a model at each supervised token of a recipe's data, for the training of a student.

The model computes the packs of its recipe, on any layout, as in an evaluation.  `data/scoring.py` keeps what is done,
so a command that was killed continues.  This module decides in which order sets and global batches are scored.
"""

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
from sft.evaluation.opened import opened
from sft.files.atomic_files import explained
from sft.mcore.engine import Engine
from sft.mcore.scores import Scores, score
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.parallel.layout import Layout
from sft.recipe.resolved import Recipe

# Keys of a recipe on which scores depend, by their beginnings.
_CONDITIONS = ("model.", "parallel.", "attention.", "lora.", "run.precision", "data.seq_length", "data.doc_multiple")


def main(recipe: Recipe, layout: Layout, source: str | None, folder: Path, k: int) -> None:
    """Score all sets of the data, as one rank.  Prints results on stdout, progress on stderr.  Collective.

    source  names the weights, as in `held_out.main`
    folder  gets a file for each set
    k       number of tokens at each place
    Raises SftError if the data cannot be scored.
    """

    def check(data: ScoringData) -> None:
        if k > data.vocab_size:
            raise ConfigError(
                f"--top-k {k} is more than the {data.vocab_size:,} tokens of the vocabulary.  Give at most this "
                "number; 64 is usual."
            )

    with opened(recipe, layout, source, ScoringData, check=check) as run:
        for name, loader in run.data.sets.items():
            facts = {"k": k, "weights": run.weights, "step": run.step, "data": loader.corpus.digest}
            conditions = {**facts, **_conditions(recipe.config), "layout": layout.sizes, "versions": installed()}
            scored = ScoredSet(folder, name, loader, k, facts)
            if _score_set(run.engine, scored, name, conditions, run.tokenizer.ids_digest, run.console):
                run.out.say(f"{scored.file}: {len(loader.corpus):,} samples, scored with {run.weights}")
            else:
                run.out.say(f"{scored.file}: was finished before")


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
