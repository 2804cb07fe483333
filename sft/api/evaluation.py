"""`sft.evaluate`: scores weights on the held-out sets of a recipe."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.api.process import check_process, joins
from sft.console import Console
from sft.errors import ConfigError
from sft.files.atomic_files import explained
from sft.parallel.layout import Layout
from sft.recipe.layout import launched_world_size, resolve_layout
from sft.recipe.needs import check_paths
from sft.recipe.resolved import Recipe
from sft.recipe.run_dir import check_source, download_weights


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluated:
    """The result of `evaluate`.  The results of all ranks are equal, except for times.

    weights  a text that names the weights that were scored
    step     step of their checkpoint; 0 if they are not a checkpoint
    records  for each set of data.eval its record, with the names and units of metrics.jsonl, such as
             records["eval"]["lm loss"] (docs/reference/metrics.md); a set without a name is called `eval`
    """

    weights: str
    step: int
    records: Mapping[str, Mapping[str, Any]]

    def __repr__(self) -> str:
        """`Evaluated(runs/a/checkpoints/iter_0000010: eval 2.1234)`"""
        losses = {name: record["lm loss"] for name, record in self.records.items()}
        texts = [f"{name} {'no supervised token' if loss is None else f'{loss:.4f}'}" for name, loss in losses.items()]
        return f"Evaluated({self.weights}: {', '.join(texts)})"


def evaluate(
    recipe: Recipe, weights: str | Path | None = None, *, file: str | Path | None = None, quiet: bool = False
) -> Evaluated:
    """Score weights on the sets of data.eval, with the code of a run's evaluations.

    weights: a checkpoint, run, Hugging Face model or PEFT folder; None: the newest checkpoint of run.dir, or the
    weights from which the run would start
    file: write the result into this file, as JSON (docs/how-to/eval.md)
    quiet: print only results and warnings

    In a program that torchrun started, each process calls `evaluate` once.  In any other program, this process is all
    ranks.  Data that are not prepared are tokenised.  Nothing in the folder of the run changes except the token cache.

    Raises ConfigError if there is no held-out set, or if the weights are of another model; CheckpointError if there
    are no such weights, or if they are damaged; DataError if a row cannot be used; and TrainingError if a loss is not
    finite.
    """
    source = None if weights is None else str(weights)
    layout = ready(recipe, source, quiet=quiet)

    from sft.evaluation.held_out import main

    joins()
    with explained():
        name, step, records = main(recipe, layout, source, None if file is None else Path(file), is_quiet=quiet)
    return Evaluated(weights=name, step=step, records=records)


def ready(recipe: Recipe, source: str | None, *, quiet: bool = False) -> Layout:
    """The layout on which the held-out sets are scored.  Prepares data, weights of the hub, and the environment.

    To be called before the import of a module that imports torch.  Raises the errors of `evaluate`.
    """
    check_process("evaluate")
    if not recipe.config.data.eval_sets:
        raise ConfigError(
            f"data.eval ({recipe.origins['data.eval']}) names no held-out set, so there is nothing to score.  Give "
            "data.eval=FILE, or data.eval={NAME: FILE, ...} for several sets."
        )
    layout = resolve_layout(recipe, launched_world_size() or 1, "eval")
    check_paths(recipe, trains=False)
    check_source(source)
    if os.environ.get("RANK", "0") == "0":  # the other ranks wait for this rank when they join the process group
        from sft.data.cache.prepare import prepare_held_out
        from sft.recipe.tokenizer import tokenizer_of

        console = Console(0, sys.stderr, is_quiet=quiet)
        prepare_held_out(recipe.config, tokenizer_of(recipe.config), console)
    download(recipe, source)

    from sft.run import environment

    environment.prepare(recipe.config, layout)
    return layout


def download(recipe: Recipe, source: str | None) -> None:
    """Download the weights that the recipe or `source` names, where they are on the hub."""
    from sft.hf import hub, hub_weights

    if source is None:
        download_weights(recipe)
    elif hub.is_hub_name(source):
        hub_weights.model_folder(source)
    elif (Path(source) / hub.ADAPTERS).is_file():
        download_weights(recipe, has_adapters=True)
    elif recipe.config.lora.is_used and not (Path(source) / hub.CONFIG).is_file():  # a checkpoint of adapters
        download_weights(recipe)
