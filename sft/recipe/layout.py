"""Finds the layout of a recipe on a number of processes."""

import os

from sft.config.keys import leaves
from sft.errors import ConfigError
from sft.parallel.alignment import smallest_world
from sft.parallel.layout import Layout
from sft.recipe.resolved import Recipe


def resolve_layout(recipe: Recipe, world_size: int | None, command: str = "train") -> Layout:
    """The layout on `world_size` processes.  None means the smallest number of processes that holds the model.

    command: the command of sft that needs the layout, for the advice how to start several processes

    Raises ConfigError with the problems of the layout, and the origins of the settings that cause these problems.
    """
    if world_size is None:
        world_size = smallest_world(recipe.config)
    if world_size < 1:
        raise ConfigError(f"{world_size} processes cannot hold a model.  The world size must be at least 1.")
    try:
        return Layout.resolve(recipe.config, world_size)
    except ConfigError as error:
        named = [key for key in leaves() if f"{key} = " in str(error)]
        origins = ", ".join(f"{key} ({recipe.origins[key]})" for key in named)
        lines = [str(error), *([f"  Set in: {origins}."] if named else [])]
        if world_size == 1 and (least := smallest_world(recipe.config)) > 1:
            start = train_command(recipe)
            if command != "train":
                start = f"torchrun --nproc-per-node {least} -m sft {command} {recipe.arguments}, with the same options"
            lines.append(
                f"  This is one process, and the recipe needs {least}, or a multiple.  On one machine: {start}; on "
                "several, start torchrun on each (docs/how-to/launch.md)."
            )
        raise ConfigError("\n".join(lines)) from None


def train_command(recipe: Recipe) -> str:
    """The command that trains on one machine: `sft train a.yaml parallel.cp=2 --processes 2`"""
    count = launched_world_size() or smallest_world(recipe.config)
    return f"sft train {recipe.arguments}{f' --processes {count}' if count > 1 else ''}"


def launched_world_size() -> int | None:
    """The world size that torchrun has set in WORLD_SIZE; None without torchrun.  Raises ConfigError for other text."""
    text = os.environ.get("WORLD_SIZE")
    if text is not None and not text.isdecimal():
        raise ConfigError(f'environment variable WORLD_SIZE = "{text}" is not a number of processes.  Unset it.')
    return None if text is None else int(text)
