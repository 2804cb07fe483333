"""Scores weights on held-out sets with the code of a run's evaluations.

It changes nothing in the run's folder except the cache of tokenised data, and takes no lock, so that the checkpoints of
a running run can be scored.
"""

import json
import math
import sys
import time
from pathlib import Path

from sft.checkpoint.train_state import installed
from sft.console import Console
from sft.data.pipeline import HeldOutData
from sft.errors import StorageError, TrainingError
from sft.evaluate.weights import load_engine
from sft.files.atomic_files import replace_text
from sft.mcore import process_groups
from sft.mcore.engine import Engine
from sft.metrics.log import MetricsLog
from sft.metrics.records import Record
from sft.metrics.run_facts import RunFacts
from sft.parallel.collectives import broadcast_from_rank0
from sft.parallel.layout import Layout
from sft.recipe.join import join_ranks
from sft.recipe.resolved import Recipe
from sft.recipe.tokenizer import tokenizer_of
from sft.run.evaluation import evaluate
from sft.run.signals import leave_with_parent

FORMAT = "sft eval 1"


def main(recipe: Recipe, layout: Layout, source: str | None, json_file: Path | None) -> None:
    """Score weights on all sets of data.eval, as one rank.  Prints results on stdout, progress on stderr.  Collective.

    source     names the weights: a checkpoint, run, Hugging Face model or PEFT folder; None: the newest checkpoint of
               the run, or the weights from which the run would start
    json_file  a file for the records; None: no file is written
    Raises SftError if the weights cannot be scored.
    """
    config = recipe.config
    leave_with_parent()
    groups = join_ranks(config, layout)
    console = Console(groups.rank, sys.stderr)
    tokenizer = tokenizer_of(config)
    data = HeldOutData(config, tokenizer, recipe.arguments, layout, groups, console)
    engine, weights, step = load_engine(config, source, tokenizer, layout, groups, data.vocab_size, console)
    console.say(f"scoring {weights}")
    records = score(engine, data, Console(groups.rank, sys.stdout), step)
    content = {
        "format": FORMAT,
        "recipe": recipe.arguments,
        "weights": weights,
        "step": step,
        "layout": layout.sizes,
        "versions": installed(),
        "sets": records,
    }
    if json_file is not None:
        broadcast_from_rank0(lambda: write(json_file, json.dumps(content, indent=1) + "\n"), groups.control)
    process_groups.stop()


def score(engine: Engine, data: HeldOutData, console: Console, step: int) -> dict[str, Record]:
    """Evaluates each held-out set, and prints a line about it on `console`.  Returns the records by name.  Collective.

    Raises TrainingError if a loss is not finite.
    """
    run = RunFacts.of(engine.config, engine.layout, engine.vocab_size)
    log = MetricsLog(Path(engine.config.run.dir), [], console, run, step=step, num_steps=step)
    records = {}
    for name, loader in data.held_out.items():
        started = time.monotonic()
        totals = evaluate(engine, loader)
        assert totals is not None
        if not math.isfinite(totals.objective):
            raise TrainingError(f"the held-out loss of {name} after step {step} is {totals.objective}.")
        records[name] = log.evaluation(step, name, totals, seconds=time.monotonic() - started)
    return records


def write(file: Path, text: str) -> None:
    """Write the file of --json.  Raises StorageError."""
    try:
        replace_text(file, text)
    except OSError as error:
        raise StorageError(f"--json {file} cannot be written: {error}.") from error
