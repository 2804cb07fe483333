"""`sft score`: writes a teacher's distributions for the data of a recipe."""

import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from sft.commands.arguments import read_recipe, recipe_command
from sft.commands.evaluate import add_source
from sft.commands.output import progress
from sft.errors import ConfigError
from sft.files.atomic_files import why_no_folder


def add(commands: Any) -> None:
    about = "write a teacher's most likely tokens for the data; start it alone, or with torchrun as train"
    command = recipe_command(commands, "score", score, about)
    add_source(command)
    about = "folder for train.parquet and a file for each held-out set; the same command continues in it"
    command.add_argument("--out", metavar="FOLDER", type=Path, required=True, help=about)
    about = "most likely tokens for each supervised token (default: %(default)s)"
    command.add_argument("--top-k", metavar="K", type=int, default=64, help=about)


def score(arguments: Namespace) -> None:
    """Run `sft score`.  Each process of torchrun calls this function."""
    from sft.api.evaluation import download
    from sft.config.teacher import TeacherConfig
    from sft.recipe.layout import launched_world_size, resolve_layout
    from sft.recipe.needs import check_paths
    from sft.recipe.run_dir import check_source

    recipe = read_recipe(arguments)
    folder, k, source = arguments.out, arguments.top_k, arguments.source
    if k < 1:
        raise ConfigError(f"--top-k {k} is no number of tokens; give 1 or more, such as 64.")
    if (why := why_no_folder(folder)) is not None:
        raise ConfigError(f"--out {folder} {why}.")
    # A recipe of a student may be scored, too.  The store then has no distributions.
    data = recipe.config.data.model_copy(update={"teacher": TeacherConfig()})
    recipe = replace(recipe, config=recipe.config.model_copy(update={"data": data}))
    layout = resolve_layout(recipe, launched_world_size() or 1, "score")
    check_paths(recipe)
    check_source(source)
    if os.environ.get("RANK", "0") == "0":  # the other ranks wait for this rank when they join the process group
        from sft.data.cache.prepare import prepare_recipe
        from sft.recipe.tokenizer import tokenizer_of

        prepare_recipe(recipe.config, tokenizer_of(recipe.config), progress())
    download(recipe, source)

    from sft.run import environment

    environment.prepare(recipe.config, layout)  # before the next import, which may start CUDA

    from sft.evaluation.distributions import main

    main(recipe, layout, source, folder, k)
