"""`sft train`: trains a recipe."""

from argparse import Namespace
from typing import Any

from sft.commands.arguments import read_recipe, recipe_command


def add(commands: Any) -> None:
    recipe_command(commands, "train", train, "train a recipe; start one process per GPU with torchrun")


def train(arguments: Namespace) -> int:
    """Run `sft train`.  Returns 75 if the run was asked to stop before its end and saved a checkpoint, else 0."""
    recipe = read_recipe(arguments)

    from sft.api.training import train as train_recipe

    return train_recipe(recipe).exit_code
