"""`sft status`: prints how a run ended, and whether to start it again."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from sft.commands.arguments import read_recipe, recipe_command
from sft.commands.output import show
from sft.errors import ConfigError


def add(commands: Any) -> None:
    about = "show how a run ended, and whether to start the run again (exit code 0, 75 or 2)"
    command = recipe_command(commands, "status", status, about)
    command.description = f"{about[:1].upper()}{about[1:]}.  RECIPE may also be the folder of a run."


def status(arguments: Namespace) -> int:
    """Run `sft status`.  Returns 0 if the run is done, 75 if it should be started again, else 2.

    Raises the error with which the next start would end, if it can be found without data and a GPU.
    """
    from sft.config import yaml
    from sft.recipe.resume_lines import next_start
    from sft.run.lock import is_gone
    from sft.run.remote_lock import RemoteLock
    from sft.run.remote_status import newest
    from sft.run.status import describe, verdict

    run = Path(arguments.recipe)
    if run.is_dir():  # a run folder, which has the recipe of its newest start
        arguments.recipe = str(run / "recipe.yaml")
        arguments.overrides = [*arguments.overrides, f"run.dir={yaml.write(str(run))}"]
        if not Path(arguments.recipe).is_file():
            raise ConfigError(f"{run} has no recipe.yaml, so it is not the folder of a run.  Give one, or a recipe.")
    config = read_recipe(arguments).config
    folder = Path(config.run.dir)
    state = newest(folder, config.checkpoint.remote)
    job = os.environ.get("SLURM_JOB_ID")
    is_running = state is not None and state.status == "running"
    if state is not None and is_running and None not in (job, state.job) and state.job != job:
        show(f"{folder}: {describe(state)}\nthe newest start belongs to another job, not to the current job ({job})")
        return 2
    remote = config.checkpoint.remote
    may_be_alive = is_running and not (is_gone(folder) and (remote is None or RemoteLock.is_gone(remote)))
    if may_be_alive:
        show("run.lock exists, so the run may still be alive; a second start is refused while the run is alive")
    elif is_running:
        show("the process of the run has ended without a word: it was killed, or its disk failed")
    show(f"{folder}: the run was never started" if state is None else f"{folder}: {describe(state)}")
    advice, code = {
        "done": ("done", 0),
        "go on": ("start the run again", 75),
        "stop": ("find the cause before you start the run again", 2),
    }[verdict(state)]
    is_elsewhere = state is None and remote is not None  # this node may be new
    if (code == 75 or is_elsewhere) and not may_be_alive and (line := next_start(config)) is not None:
        show(line)
        advice, code = "start the run again", 75
    elif state is None:
        advice = "start the run"
    show(advice)
    return code
