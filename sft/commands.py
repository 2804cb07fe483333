"""Implements the commands of the command line.

Heavy modules are imported where they are first used, so that help and error messages appear at once.
"""

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sft.console import Console, size
from sft.errors import ConfigError

if TYPE_CHECKING:
    from sft.data.chat.tokenizer import ChatTokenizer
    from sft.parallel.layout import Layout
    from sft.recipe.resolved import Recipe


def train(arguments: Namespace) -> int:
    """Run `sft train`.  Returns 75 if the run was asked to stop before its end and saved a checkpoint, else 0."""
    recipe = _recipe(arguments)
    layout = _layout(recipe, _launched_world_size() or 1)
    _check_wandb(recipe)
    _check_paths(recipe)

    from sft.run import environment

    from_user = environment.prepare(recipe.config, layout)  # before the next import, which may start CUDA

    from sft.trainer import main

    return main(recipe, layout, from_user)


def status(arguments: Namespace) -> int:
    """Run `sft status`.  Returns 0 if the run is done, 75 if it should be started again, else 2."""
    from sft.run.status import describe, read, verdict

    folder = Path(_recipe(arguments).config.run.dir)
    state = read(folder)
    job = os.environ.get("SLURM_JOB_ID")
    is_running = state is not None and state.status == "running"
    if state is not None and is_running and None not in (job, state.job) and state.job != job:
        print(f"{folder}: {describe(state)}\nthe newest start belongs to another job, not to the current job ({job})")
        return 2
    if is_running and (folder / "run.lock").exists():
        print("run.lock exists, so the run may still be alive; a second start is refused while the run is alive")
    print(f"{folder}: the run was never started" if state is None else f"{folder}: {describe(state)}")
    advice, code = {
        "done": ("done", 0),
        "go on": ("start the run again", 75),
        "stop": ("find the cause before you start the run again", 2),
    }[verdict(state)]
    print(advice)
    return code


def check(arguments: Namespace) -> None:
    recipe = _recipe(arguments)
    if arguments.explain is not None:
        from sft.recipe.explain import explain

        print(explain(recipe, arguments.explain))
        return
    launched = _launched_world_size()
    layout = _layout(recipe, launched if arguments.world_size is None else arguments.world_size)
    _check_wandb(recipe)
    _print_group("layout", layout.equations(recipe.config.data.seq_length))
    _print_rotary(recipe)
    if arguments.no_data:
        built_in = recipe.config.data.tokenizer == "byte"
        vocab_size = _tokenizer(recipe).vocab_size if built_in else None
        _print_model(recipe, layout, vocab_size)
        _print_time(recipe, layout, vocab_size, recipe.config.data.seq_length)
        _print_group("data", ["not read (--no-data)"])
    else:
        _check_paths(recipe)
        _check_data(recipe, layout)


def _print_rotary(recipe: "Recipe") -> None:
    """Print whether packs are too long for the fused rotary kernel of a backend that the run may use."""
    from sft.mcore.attention.fused_rotary import why_not

    config = recipe.config
    if config.attention.may_fuse_rotary(config.run.device) and (problem := why_not(config)):
        _print_group("rotary", [f"with te: {problem}"])


def _check_data(recipe: "Recipe", layout: "Layout") -> None:
    from sft.data.cache.prepare import prepare_recipe
    from sft.data.inspect.forecast import length_lines, loader_of

    length = recipe.config.train
    tokenizer = _tokenizer(recipe)
    _print_model(recipe, layout, tokenizer.vocab_size)
    corpora = prepare_recipe(recipe.config, tokenizer, _progress())
    corpus = corpora.pop("train")
    loader = loader_of(recipe.config, layout, corpus)
    loader.plans.locate((length.num_steps or loader.plans.total_steps(length.num_epochs or 1)) - 1)
    plan = loader.plans.plan(0)
    lines = [
        *corpus.summary().splitlines(),
        f"{len(plan):,} packs of at most {recipe.config.data.seq_length:,} tokens, {plan.fill:.1%} full, "
        f"of which {plan.alignment_waste:.1%} is padding inside documents",
        *length_lines(recipe.config, plan),
    ]
    _print_group("data", lines)
    _print_time(recipe, layout, tokenizer.vocab_size, int(corpus.lengths.max()))
    for name, held_out in corpora.items():
        _print_group(name, held_out.summary().splitlines())


def prepare(arguments: Namespace) -> None:
    if arguments.workers is not None:
        arguments.overrides.append(f"data.num_workers={arguments.workers}")
    recipe = _recipe(arguments)
    _check_paths(recipe)

    from sft.data.cache.prepare import prepare_recipe, sweep_recipe

    tokenizer = _tokenizer(recipe)
    prepare_recipe(recipe.config, tokenizer, Console(0, sys.stdout), verify=arguments.verify)
    if arguments.sweep:
        stale = sweep_recipe(recipe.config, tokenizer)
        freed = sum(folder.num_bytes for folder in stale)
        lines = [f"removed {folder.folder} ({size(folder.num_bytes)})" for folder in stale]
        _print_group("sweep", [*lines, f"{Path(recipe.config.cache_dir)}: {size(freed)} freed"])


def inspect(arguments: Namespace) -> None:
    picture: Path | None = arguments.png
    recipe = _recipe(arguments)
    _check_paths(recipe)
    if arguments.samples < 0:
        raise ConfigError(f"--samples {arguments.samples} is not a number of samples.  Give 0 or more.")
    if picture is not None:
        if picture.suffix != ".png":
            raise ConfigError(f"--png {picture} does not end in .png.  The picture is written as PNG.")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ConfigError("--png needs matplotlib, which is not installed: pip install matplotlib") from None

    from sft.data.inspect.report import survey_lines
    from sft.data.inspect.survey import take_survey

    data, cache_dir, console = recipe.config.data, Path(recipe.config.cache_dir), _progress()
    survey = take_survey(recipe.path, data, _tokenizer(recipe), cache_dir, arguments.samples, console)
    if picture is not None:
        from sft.data.inspect.picture import draw

        try:
            draw(survey, picture)
        except OSError as error:
            raise ConfigError(f"--png {picture} cannot be written: {error.strerror}.") from error
        console.say(f"picture {picture}")
    if arguments.json:
        text = json.dumps(asdict(survey), indent=1)
    else:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        text = "\n".join(survey_lines(survey, color=color)).rstrip()
    print(text, flush=True)  # the text is ASCII, which every terminal can show


def plan(arguments: Namespace) -> int:
    """Run `sft data plan`.  Returns 1 if the two plans of --diff differ, else 0."""
    from sft.data.packing.plan_files import compare_plans

    if arguments.diff is not None:
        lines = compare_plans(*map(Path, arguments.diff))
        print("\n".join(lines) or "the plans are equal")
        return 1 if lines else 0

    from sft.data.cache.prepare import prepare_train
    from sft.data.inspect.forecast import forecast, write_run

    recipe = _recipe(arguments)
    layout = _layout(recipe, arguments.world_size)
    _check_paths(recipe)
    corpus = prepare_train(recipe.config, _tokenizer(recipe), _progress())
    for name, lines in forecast(recipe.config, layout, corpus).items():
        _print_group(name, lines)
    if arguments.write is not None:
        _print_group("written", [write_run(Path(arguments.write), recipe.config, layout, corpus)])
    return 0


def probe(arguments: Namespace) -> int:
    """Run `sft probe`.  Returns 1 if the probe found a fault, else 0."""
    recipe = _recipe(arguments)
    layout = _layout(recipe, _launched_world_size() or 1)
    _check_paths(recipe)

    from sft.run import environment

    environment.prepare(recipe.config, layout)  # before the next import, which may start CUDA

    from sft.probe.answer import answer

    return answer(arguments, recipe, layout)


def _recipe(arguments: Namespace) -> "Recipe":
    """The recipe of the command line.  Rank 0 warns of keys that have been renamed."""
    from sft.recipe.load import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if os.environ.get("RANK", "0") == "0":
        for warning in recipe.warnings:
            print(f"WARNING: {warning}", file=sys.stderr, flush=True)
    return recipe


def _layout(recipe: "Recipe", world_size: int | None) -> "Layout":
    """The layout on `world_size` processes.  None means the smallest number of processes that holds the model.

    Raises ConfigError with the problems of the layout, and the origins of the settings that cause these problems.
    """
    from sft.config.keys import leaves
    from sft.parallel.alignment import smallest_world
    from sft.parallel.layout import Layout

    if world_size is None:
        world_size = smallest_world(recipe.config)
    if world_size < 1:
        raise ConfigError(f"{world_size} processes cannot hold a model.  The world size must be at least 1.")
    try:
        return Layout.resolve(recipe.config, world_size)
    except ConfigError as error:
        named = [key for key in leaves() if f"{key} = " in str(error)]
        origins = ", ".join(f"{key} ({recipe.origins[key]})" for key in named)
        raise ConfigError(f"{error}\n  Set in: {origins}." if named else str(error)) from None


def _check_paths(recipe: "Recipe") -> None:
    """Raise ConfigError if a path in the recipe does not exist.  Called before heavy modules are imported."""
    data = recipe.config.data
    paths = [(key, path) for key, files in data.train_keys.items() for path in files]
    paths += [("data.eval", path) for files in data.eval_sets.values() for path in files]
    paths += [] if data.tokenizer == "byte" else [("data.tokenizer", data.tokenizer)]
    paths += [] if data.chat_template is None else [("data.chat_template", data.chat_template)]
    paths += [] if data.plan is None else [("data.plan", data.plan)]
    missing = [
        f"{key} = {path} ({recipe.origins[key]}) does not exist in {Path.cwd()}; give {key}=PATH."
        for key, path in paths
        if not Path(path).exists()
    ]
    if missing:
        from sft.config import listed

        raise ConfigError(listed(missing))


def _check_wandb(recipe: "Recipe") -> None:
    """Raise ConfigError if a recipe logs to W&B, but the package wandb is not installed."""
    project = recipe.config.log.wandb
    package = None if project is None else find_spec("wandb")
    if project is not None and (package is None or package.origin is None):  # origin None: a folder named wandb
        raise ConfigError(
            f"log.wandb = {project} ({recipe.origins['log.wandb']}) needs the package wandb, which is not installed "
            "here: pip install wandb; or train without it: log.wandb=null."
        )


def _launched_world_size() -> int | None:
    """The world size that torchrun set; None without torchrun."""
    text = os.environ.get("WORLD_SIZE")
    if text is not None and not text.isdecimal():
        raise ConfigError(f'environment variable WORLD_SIZE = "{text}" is not a number of processes.  Unset it.')
    return None if text is None else int(text)


def _tokenizer(recipe: "Recipe") -> "ChatTokenizer":
    from sft.data.chat.tokenizer import load_tokenizer

    return load_tokenizer(recipe.config.data)


def _print_model(recipe: "Recipe", layout: "Layout", tokenizer_size: int | None) -> None:
    """Print the number of parameters and the estimated memory, which both need the size of the vocabulary."""
    from sft.estimate.memory import describe
    from sft.flops import describe_parameters
    from sft.parallel.layout import vocab_rows

    model = recipe.config.model
    if model.vocab_size is None and tokenizer_size is None:
        _print_group(
            "model", ["number of parameters unknown: model.vocab_size comes from the tokenizer, which was not read"]
        )
        return
    rows = vocab_rows(model, tokenizer_size or 0)
    _print_group("model", [f"parameters {describe_parameters(model, rows)} with a vocabulary of {rows:,}"])
    _print_group("memory", describe(recipe.config, layout, rows))


def _print_time(recipe: "Recipe", layout: "Layout", tokenizer_size: int | None, longest: int) -> None:
    """Print the estimated time of a step, without the loss head if the size of the vocabulary is unknown."""
    from sft.estimate.time import describe

    vocab_size = recipe.config.model.vocab_size or tokenizer_size or 0
    _print_group("time", describe(recipe.config, layout, vocab_size, longest, os.environ, time.time()))


def _progress() -> "Console":
    """A console on stderr for progress: stdout is for results."""
    return Console(0, sys.stderr)


def _print_group(name: str, lines: Sequence[str]) -> None:
    for label, line in zip([name, *[""] * len(lines)], lines, strict=False):
        print(f"{label:7} {line}", flush=True)
