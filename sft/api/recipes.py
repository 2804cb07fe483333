"""`sft.load`: reads a recipe."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft.config import yaml
from sft.errors import ConfigError, printable
from sft.recipe.load import load_recipe, parse_recipe
from sft.recipe.resolved import Recipe

_MAPPING = "the mapping"  # the name of a recipe that is not in a file


def load(path: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | Sequence[str] = ()) -> Recipe:
    """The validated recipe in the YAML file `path`, with the values of `overrides` in place of its own.

    path: a file, or the groups of a recipe themselves: {"model": {"hf": "Qwen/Qwen3-8B"}, "optim": {"lr": 1e-5}, ...}
    overrides: values by dotted key, {"parallel.cp": 4}, or words as on the command line, ["parallel.cp=4"]

    Relative paths are relative to the current directory.  If model.hf is a name on the hub, only the small files of the
    model are downloaded.  Rank 0 prints a warning on stderr for each key that the recipe gives by an old name.

    Raises ConfigError that lists all mistakes of the file and the overrides, each with its line.
    """
    if isinstance(path, Mapping):
        text = yaml.write({str(name): _plain(str(name), value) for name, value in path.items()})
        recipe = parse_recipe(text, _MAPPING, override_words(overrides))
    else:
        recipe = load_recipe(str(path), override_words(overrides))
    if os.environ.get("RANK", "0") == "0":
        for warning in recipe.warnings:
            print(printable(f"WARNING: {warning}"), file=sys.stderr, flush=True)
    return recipe


def override_words(overrides: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Overrides as words of the command line.  Raises ConfigError for a value that YAML lacks.

    {"data.train": ["a.jsonl"], "optim.lr": 1e-5} -> ["data.train=[a.jsonl]", "optim.lr=1e-05"]
    """
    if isinstance(overrides, str):
        raise ConfigError(f'overrides = "{overrides}" is one text.  Give a list of texts, or values by key.')
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{key}={yaml.write(_plain(key, value))}" for key, value in overrides.items()]


def _plain(key: str, value: Any) -> Any:
    """Converts `value` to the types of YAML.  Raises ConfigError if it has another type."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(key, item) for name, item in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(
        f"{key} has a value of type {type(value).__name__}, which no recipe can hold.  Give a text, a "
        "number, true, false, None, a path, or a list or mapping of these."
    )
