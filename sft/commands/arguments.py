"""The arguments of commands that take a recipe."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sft.recipe.resolved import Recipe

_OVERRIDES = "settings that replace those of the recipe, for example parallel.cp=4 data.train=my.jsonl"


def recipe_command(
    commands: Any, name: str, action: Callable[[Namespace], int | None], help: str, *, is_required: bool = True
) -> ArgumentParser:
    """The parser of a command that takes a recipe and overrides.  `action` returns the exit code, or None for 0.

    commands  what `add_subparsers` returned
    """
    command: ArgumentParser = commands.add_parser(name, help=help)
    command.set_defaults(action=action, parser=command)
    number = None if is_required else "?"
    command.add_argument("recipe", metavar="RECIPE", nargs=number, help="YAML file, e.g. recipes/qwen3_8b_64k.yaml")
    command.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help=_OVERRIDES)
    return command


def add_quiet(command: ArgumentParser) -> None:
    """Add the option with which a command prints no progress."""
    command.add_argument("--quiet", action="store_true", help="print only warnings, results and errors")


def count(text: str) -> int:
    """A number of an option, with an optional unit: 65536, 64K, 1M."""
    from sft.config.keys import in_units

    value = in_units("data.seq_length", text)
    if not str(value).isdecimal():
        raise ArgumentTypeError(f"must be a whole number, such as 65536 or 64K, got {text!r}")
    return int(value)


def read_recipe(arguments: Namespace) -> "Recipe":
    """The recipe of the command line."""
    from sft.api.recipes import load

    return load(arguments.recipe, arguments.overrides)
