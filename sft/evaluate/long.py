"""Scores weights on the questions of long-context suites.  It changes nothing but the cache, as `held_out.py`."""

import json
import sys
from pathlib import Path

from sft.checkpoint.train_state import installed
from sft.console import Console
from sft.data.long.suite import SuiteSettings, open_suites
from sft.data.pipeline import HeldOutData
from sft.evaluate.held_out import FORMAT, write
from sft.evaluate.weights import load_engine
from sft.mcore import process_groups
from sft.metrics.long import LongScores, falls, table
from sft.parallel.collectives import broadcast_from_rank0
from sft.parallel.layout import Layout
from sft.recipe.join import join_ranks
from sft.recipe.resolved import Recipe
from sft.recipe.tokenizer import tokenizer_of
from sft.run.long_evaluation import score_suites
from sft.run.signals import leave_with_parent


def main(
    recipe: Recipe,
    layout: Layout,
    source: str | None,
    json_file: Path | None,
    settings: SuiteSettings,
    before: LongScores | None,
) -> LongScores:
    """Score weights on questions, as one rank.  Prints tables on stdout, progress on stderr.  Collective.

    recipe    as returned by `sft.recipe.long.asking`
    settings  the questions, which rank 0 has made
    before    earlier scores of the same questions, for comparison; None: no comparison
    The other arguments and the errors are those of `held_out.main`.
    """
    config = recipe.config
    leave_with_parent()
    groups = join_ranks(config, layout)
    console, out = Console(groups.rank, sys.stderr), Console(groups.rank, sys.stdout)
    tokenizer = tokenizer_of(config)
    data = HeldOutData(config, tokenizer, recipe.arguments, layout, groups, console)
    engine, weights, step = load_engine(config, source, tokenizer, layout, groups, data.vocab_size, console)
    console.say(f"scoring {weights}")
    scores = score_suites(engine, open_suites(settings, tokenizer, Path(config.cache_dir)), data.pad_id)
    out.say("\n".join([f"long-context questions after step {step}", *table(scores, before)]))
    for fall in falls(before, scores) if before is not None else ():
        out.say(f"WARNING: {fall}")
    content = {
        "format": FORMAT,
        "recipe": recipe.arguments,
        "weights": weights,
        "step": step,
        "layout": layout.sizes,
        "versions": installed(),
        "sets": {},
        "long": scores.to_json(),
    }
    if json_file is not None:
        broadcast_from_rank0(lambda: write(json_file, json.dumps(content, indent=1) + "\n"), groups.control)
    process_groups.stop()
    return scores
