"""`sft train`: trains a recipe."""

import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

from sft.commands.arguments import add_quiet, read_recipe, recipe_command
from sft.commands.output import show_next
from sft.commands.status import status as report_status
from sft.errors import ConfigError

_MOST = 4096  # processes that `--processes` starts


def add(commands: Any) -> None:
    command = recipe_command(commands, "train", train, "train a recipe, with one process per GPU")
    command.add_argument(
        "--processes", metavar="N", help="start N processes on this machine; auto: one for each GPU.  Default: no more"
    )
    command.add_argument(
        "--log-dir", metavar="DIR", type=Path, help="with --processes: write the output of each rank into this folder"
    )
    add_quiet(command)


def train(arguments: Namespace) -> int:
    """Run `sft train`.  Returns 75 if the run was asked to stop before its end and saved a checkpoint, else 0.

    With --processes, returns the exit code of the rank that failed first, or 0.
    """
    if arguments.processes is not None:
        return _train_ranks(arguments)
    if arguments.log_dir is not None:
        raise ConfigError("--log-dir has an effect only with --processes.  torchrun has an option --log-dir, too.")
    recipe = read_recipe(arguments)

    from sft.api.training import train as train_recipe

    outcome = train_recipe(recipe, quiet=arguments.quiet)
    if outcome.is_done and not arguments.quiet:
        folder = shlex.quote(str(outcome.folder))
        answers = [f"sft generate {folder} --prompt TEXT"] if recipe.config.model.hf else []
        show_next(f"sft export {folder} FOLDER", *answers, f"sft plot {folder}")
    return outcome.exit_code


def _train_ranks(arguments: Namespace) -> int:
    """Start the ranks of the run and wait for them.  Returns the exit code of the rank that failed first, or 0.

    Raises ConfigError for mistakes of the recipe and of the layout.  So they are reported once, and not by each rank.
    """
    from sft.run.processes import refuse_nested, run_ranks

    refuse_nested()
    recipe = read_recipe(arguments)

    from sft.recipe.layout import resolve_layout
    from sft.run.refused_start import recorded

    number = _number(arguments.processes, recipe.config.run.device)
    with recorded(Path(recipe.config.run.dir)):
        resolve_layout(recipe, number)
    words = ["train", arguments.recipe, *(["--quiet"] if arguments.quiet else []), *arguments.overrides]
    code = run_ranks(words, number, grace_s=recipe.config.run.grace_s, log_dir=arguments.log_dir)
    if code not in (0, 2):
        report_status(arguments)  # why the run ended, and whether to start it again
    return code


def _number(text: str, device: str) -> int:
    """The number of processes: `auto` means one for each GPU that torch sees."""
    if text != "auto":
        if text.isdecimal() and int(text) > _MOST:
            raise ConfigError(
                f"--processes {text} starts all processes on this machine, where at most {_MOST:,} are started.  Give "
                "one for each GPU of this machine, or auto; for several machines, start torchrun on each "
                "(docs/how-to/launch.md)."
            )
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"--processes {text} is no number of processes.  Give a number such as 8, or auto.")
        return int(text)

    import torch

    number = torch.cuda.device_count() if device != "cpu" else 0
    if number == 0:
        reason = "run.device is cpu" if device == "cpu" else "torch sees no GPU on this machine"
        raise ConfigError(f"--processes auto counts GPUs, but {reason}.  Give a number, such as --processes 2.")
    return number
