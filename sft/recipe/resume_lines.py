"""Makes the lines of `sft check` and `sft status` about the checkpoint from which a run would continue."""

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from sft.checkpoint import continuation, folders, rates, resume_setting
from sft.checkpoint.continuation import Continuation
from sft.checkpoint.remote_folder import RemoteFolder
from sft.checkpoint.train_state import BASE, Conditions, recipe_values
from sft.config import Config
from sft.data.packing import plan_files
from sft.parallel.layout import Layout
from sft.recipe.resolved import Recipe

if TYPE_CHECKING:
    from sft.data.cache.corpus import Corpus
    from sft.data.loader import Loader

Lines = tuple[list[str], list[str]]  # lines about the checkpoint and the changes since its save; warnings


def with_data(recipe: Recipe, layout: Layout, corpus: "Corpus", loader: "Loader", rows: int) -> Lines:
    """The lines if the data are read.  All conditions are compared, except base weights whose digest is unknown.

    rows: rows of the embedding, without padding
    Raises the error that training would raise: ConfigError or CheckpointError.
    """
    from sft.recipe.start import check_resumed

    config = recipe.config
    base, not_compared = _base(config)
    conditions = Conditions.of(config, layout, plan_files.follows_from(config, corpus), base)
    resumed = _checked(config, conditions, not_compared)
    if resumed is not None and isinstance(resumed.path, Path):
        check_resumed(config, resumed, rows)
    steps_of = loader.plans.total_steps
    num_steps = config.train.num_steps or steps_of(config.train.num_epochs or 1)
    return _lines(config, resumed, num_steps, steps_of, not_compared)


def without_data(recipe: Recipe, layout: Layout) -> Lines:
    """The lines if no data are read.  All other conditions are compared with the run's files on this machine.

    Raises ConfigError or CheckpointError as `with_data`.
    """
    config, folder = recipe.config, Path(recipe.config.run.dir) / "checkpoints"
    resume = config.checkpoint.resume
    is_named = resume not in resume_setting.WORDS and Path(resume).exists()
    if not folders.candidates(folder) and not is_named and config.checkpoint.remote is None:
        return ["not compared: this machine has no checkpoint of the run (--no-data)"], []
    base, not_compared = _base(config)
    not_compared |= {*plan_files.READ}
    conditions = Conditions.of(config, layout, plan_files.settings(config), base)
    resumed = _checked(config, conditions, not_compared)
    return _lines(config, resumed, config.train.num_steps, None, not_compared)


def next_start(config: Config) -> str | None:
    """A line about the checkpoint from which the next start continues; None if a new run starts.  Data, base weights
    and the layout are not compared.

    Raises the error that training would raise: ConfigError or CheckpointError.
    """
    plan, base = plan_files.settings(config), "" if config.lora.is_used else None
    conditions = Conditions(plan=plan, recipe=recipe_values(config), layout={}, versions={}, base=base)
    resumed = _checked(config, conditions, {*plan_files.READ, BASE})
    return None if resumed is None else f"the next start continues after step {resumed.step}, from {resumed.path}"


def _checked(config: Config, conditions: Conditions, not_compared: Collection[str]) -> Continuation | None:
    """The result of `continuation.check`, also for a newer checkpoint in checkpoint.remote.  Reads only its manifest.

    Raises ConfigError or StorageError if the store cannot be read.
    """
    folder = Path(config.run.dir) / "checkpoints"
    if config.checkpoint.remote is not None:
        remote = RemoteFolder(config.checkpoint.remote)
        remote.refuse_never(config.checkpoint)
        if (step := remote.newer(folder)) is not None:
            with tempfile.TemporaryDirectory() as manifest:
                remote.read_manifest(step, Path(manifest))
                facts = continuation.facts_of(Path(manifest))
            path, settings = remote.path(step), config.checkpoint
            reported = continuation.compare(
                path, facts, conditions, settings, is_named=False, not_compared=not_compared
            )
            return Continuation(path=path, is_named=False, facts=facts, reported=tuple(reported))
    return continuation.check(config, folder, conditions, not_compared)


def _base(config: Config) -> tuple[str | None, set[str]]:
    """The digest of the base weights, and the names of conditions that cannot be compared.

    Without LoRA: None, set().  With LoRA: the remembered digest, set(); if no digest is remembered: "", {BASE}.
    """
    if not config.lora.is_used:
        return None, set()
    from sft.weights.lora.base_digest import remembered_digest

    run, resume = Path(config.run.dir), config.checkpoint.resume
    others = [] if resume in resume_setting.WORDS else [Path(resume).parent.parent, Path(resume).parent]
    digest = remembered_digest(config, run, others)
    return digest or "", set() if digest else {BASE}


def _lines(
    config: Config,
    resumed: Continuation | None,
    num_steps: int | None,
    steps_of: Callable[[int], int] | None,
    not_compared: Collection[str],
) -> Lines:
    """steps_of: returns the steps of a number of epochs; None if the data are not read"""
    lines = continuation.lines(resumed, num_steps)
    warnings: list[str] = []
    if resumed is None:
        return lines, []
    if BASE in not_compared:
        lines.append("base weights not compared: they were not hashed on this machine")
    if not {*plan_files.READ}.isdisjoint(not_compared):
        lines.append("data not compared (--no-data)")
    if changed := rates.change(resumed, config, num_steps, steps_of):
        (warnings if changed[1] else lines).append(changed[0])
    return lines, warnings
