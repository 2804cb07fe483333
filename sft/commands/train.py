"""`sft train`: trains a recipe."""

from argparse import Namespace
from typing import Any

from sft.commands.arguments import (
    check_packages,
    check_paths,
    download_weights,
    launched_world_size,
    read_recipe,
    recipe_command,
    resolve_layout,
)


def add(commands: Any) -> None:
    recipe_command(commands, "train", train, "train a recipe; start one process per GPU with torchrun")


def train(arguments: Namespace) -> int:
    """Run `sft train`.  Returns 75 if the run was asked to stop before its end and saved a checkpoint, else 0."""
    recipe = read_recipe(arguments)
    layout = resolve_layout(recipe, launched_world_size() or 1)
    check_packages(recipe)
    check_paths(recipe)
    download_weights(recipe)

    from sft.run import environment

    from_user = environment.prepare(recipe.config, layout)  # before the next import, which may start CUDA

    from sft.trainer import main

    return main(recipe, layout, from_user)
