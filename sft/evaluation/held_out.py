"""Scores weights on held-out sets with the code of a run's evaluations.

It changes nothing in the run's folder except the cache of tokenised data, and takes no lock, so that the checkpoints of
a running run can be scored.
"""

import math
import time
from pathlib import Path

from sft.console import Console
from sft.data.pipeline import HeldOutData
from sft.errors import TrainingError
from sft.evaluation.opened import opened
from sft.mcore.engine import Engine
from sft.metrics.log import MetricsLog
from sft.metrics.records import Record
from sft.metrics.run_facts import RunFacts
from sft.parallel.layout import Layout
from sft.recipe.resolved import Recipe
from sft.run.evaluation import evaluate


def main(
    recipe: Recipe, layout: Layout, source: str | None, json_file: Path | None, *, is_quiet: bool = False
) -> tuple[str, int, dict[str, Record]]:
    """Score weights on all sets of data.eval, as one rank.  Prints results on stdout, progress on stderr.  Collective.

    source     names the weights: a checkpoint, run, Hugging Face model or PEFT folder; None: the newest checkpoint of
               the run, or the weights from which the run would start
    json_file  a file for the records; None: no file is written
    is_quiet   print no progress
    Returns the name of the weights, their step, and the record of each set.  Raises SftError if the weights cannot be
    scored.
    """
    with opened(recipe, layout, source, HeldOutData, is_quiet=is_quiet) as run:
        records = score(run.engine, run.data, run.out, run.step)
        run.write(json_file, sets=records)
    return run.weights, run.step, records


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
