"""`sft eval`: scores weights on held-out sets, or on the questions of long-context suites."""

import os
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft.commands.arguments import add_quiet, read_recipe, recipe_command
from sft.commands.output import need_matplotlib, picture_file, progress, show_next
from sft.console import Console
from sft.errors import ConfigError

if TYPE_CHECKING:
    from sft.data.long.suite import SuiteSettings
    from sft.metrics.long import LongScores
    from sft.recipe.resolved import Recipe

_PICTURES = (".png", ".svg", ".pdf")


def add(commands: Any) -> None:
    about = "score any weights on data.eval; start it alone, or with torchrun as train"
    command = recipe_command(commands, "eval", evaluate, about)
    add_source(command)
    command.add_argument("--json", metavar="FILE", type=Path, help="write the records into FILE (docs/how-to/eval.md)")
    add_quiet(command)
    about = "ask questions about long texts, instead of scoring data.eval (data.long)"
    command.add_argument("--long", action="store_true", help=about)
    about = "compare documents of data.eval with their last quarter: does far context help?"
    command.add_argument("--context", action="store_true", help=about)
    about = "with --long: a file of an earlier --json, to compare with"
    command.add_argument("--before", metavar="FILE", type=Path, help=about)
    about = "with --long: draw task, length and depth into FILE, .png, .svg or .pdf"
    command.add_argument("--picture", metavar="FILE", type=Path, help=about)


def add_source(command: ArgumentParser) -> None:
    """Add the option that names weights."""
    about = (
        "checkpoint, run, Hugging Face model or PEFT folder (default: the newest checkpoint of run.dir, or the start)"
    )
    command.add_argument("--from", metavar="WEIGHTS", dest="source", help=about)


def evaluate(arguments: Namespace) -> None:
    """Run `sft eval`.  Each process of torchrun calls this function."""
    recipe = read_recipe(arguments)
    _check_arguments(arguments)
    if arguments.long:
        _evaluate_long(recipe, arguments)
        return

    from sft.api import evaluation

    if not arguments.context:
        evaluated = evaluation.evaluate(recipe, arguments.source, file=arguments.json, quiet=arguments.quiet)
        if not arguments.quiet:
            _show_next(recipe, arguments, is_trained=evaluated.step > 0)
        return
    layout = evaluation.ready(recipe, arguments.source, quiet=arguments.quiet)

    from sft.evaluation import context

    context.main(recipe, layout, arguments.source, arguments.json, is_quiet=arguments.quiet)


def _show_next(recipe: "Recipe", arguments: Namespace, *, is_trained: bool) -> None:
    from sft.recipe.layout import train_command

    if arguments.source is None and not is_trained:  # the weights from which the run starts
        show_next(train_command(recipe))
    elif recipe.config.model.hf is not None:
        show_next(f"sft generate {shlex.quote(arguments.source or recipe.config.run.dir)} --prompt TEXT")


def _check_arguments(arguments: Namespace) -> None:
    """Raise ConfigError if a file cannot be written, or if an option needs --long."""
    for option in ("json", "picture"):
        file: Path | None = getattr(arguments, option)
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise ConfigError(f"--{option} {file} cannot be written: it is a folder, or its folder does not exist.")
    for option in ("before", "picture"):
        if getattr(arguments, option) is not None and not arguments.long:
            raise ConfigError(f"--{option} {getattr(arguments, option)} has an effect only with --long; add --long.")
    if arguments.context and arguments.long:
        raise ConfigError("--context compares documents of data.eval, and --long asks questions; give one of them.")
    if arguments.picture is not None:
        if arguments.picture.suffix.lower() not in _PICTURES:
            raise ConfigError(f"--picture {arguments.picture} does not end in {', '.join(_PICTURES)}.")
        need_matplotlib("--picture")


def _evaluate_long(recipe: "Recipe", arguments: Namespace) -> None:
    """Run `sft eval --long`."""
    from sft.api.evaluation import download
    from sft.metrics.long import read_scores
    from sft.recipe.layout import launched_world_size, resolve_layout
    from sft.recipe.long import asking, suite_settings
    from sft.recipe.needs import check_paths
    from sft.recipe.run_dir import check_source

    settings = suite_settings(recipe)
    before = None if arguments.before is None else read_scores("--before", arguments.before)
    recipe = asking(recipe, settings)
    layout = resolve_layout(recipe, launched_world_size() or 1, "eval")
    check_paths(recipe, trains=False)
    check_source(arguments.source)
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:  # the other ranks wait for this rank when they join the process group
        _make_questions(recipe, settings, before, progress(is_quiet=arguments.quiet))
    download(recipe, arguments.source)

    from sft.run import environment

    environment.prepare(recipe.config, layout)  # before the next import, which may start CUDA

    from sft.evaluation.long import main

    scores = main(recipe, layout, arguments.source, arguments.json, settings, before, is_quiet=arguments.quiet)
    if is_first and arguments.picture is not None:
        from sft.metrics.results.long_plot import draw

        with picture_file("--picture", arguments.picture) as temporary:
            draw(scores, temporary)


def _make_questions(recipe: "Recipe", settings: "SuiteSettings", before: "LongScores | None", console: Console) -> None:
    """Make the questions that the cache lacks.  Raises ConfigError if `before` has the scores of other questions."""
    from sft.data.cache.prepare import num_processes
    from sft.data.cache.vocabulary import check_ids
    from sft.data.long.suite import digest_of, make_suites
    from sft.recipe.tokenizer import tokenizer_of

    config = recipe.config
    tokenizer = tokenizer_of(config)
    data, cache_dir = config.data, Path(config.cache_dir)
    suites = make_suites(settings, tokenizer, cache_dir, console, num_processes(data), data.cache_remote)
    for suite in suites:
        check_ids(config, suite.corpus, tokenizer)
    if before is not None and before.digest != digest_of(suites):
        raise ConfigError(
            "--before has the scores of other questions than this recipe asks, so they cannot be compared.  Score both "
            "weights with the same data.long, data.seq_length, tokenizer and chat template, and the same positions."
        )
