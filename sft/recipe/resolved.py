"""Defines a validated recipe: its config, the origin of each value, and its text as YAML."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sft.config import Config, yaml
from sft.config.keys import values
from sft.errors import in_one_line


@dataclass(frozen=True)
class Origin:
    """The origin of a value.  As text: `a.yaml, line 12`, `command line: parallel.cp=4`, `default`."""

    kind: Literal["file", "command line", "default", "derived"]
    file: str | None = None
    line: int | None = None
    text: str | None = None  # the override as the user wrote it, or what the value is derived from

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.file}, line {self.line}"
        return self.kind if self.text is None else f"{self.kind}: {self.text}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """A validated recipe, and the origin of the value of every dotted key."""

    config: Config
    origins: Mapping[str, Origin]
    path: str
    warnings: tuple[str, ...] = ()  # one line for each key that is given by its old name

    def __repr__(self) -> str:
        """The keys that the user set: `Recipe(a.yaml: run.dir=runs/a, optim.lr=1e-05)`"""
        own = (f"{key}={yaml.write(value)}" for key, value in values(self.config).items() if self.is_from_user(key))
        return f"Recipe({self.path}: {', '.join(own)})"

    def is_from_user(self, key: str) -> bool:
        """Whether the user gave the value of `key`, in the file or on the command line."""
        return self.origins[key].kind in ("file", "command line")

    @property
    def arguments(self) -> str:
        """The command-line arguments that reproduce this recipe, quoted for a shell: `a.yaml parallel.cp=4`."""
        overrides = [origin.text for origin in self.origins.values() if origin.kind == "command line" and origin.text]
        return shlex.join([self.path, *dict.fromkeys(overrides)])


def derived(config: Config) -> dict[str, tuple[Any, str]]:
    """For each key that is null and has a derived value: {"model.head_dim": (128, "hidden_size / ..."), ...}."""
    model, data = config.model, config.data
    substitutes = {
        "model.num_query_groups": (model.num_query_groups, model.resolved_query_groups, "num_attention_heads"),
        "model.head_dim": (model.head_dim, model.resolved_head_dim, "hidden_size / num_attention_heads"),
        "data.tokenizer": (data.tokenizer, config.tokenizer, "model.hf" if model.hf else "no model.hf"),
        "data.cache_dir": (data.cache_dir, config.cache_dir, "run.dir/cache"),
    }
    return {key: (value, source) for key, (written, value, source) in substitutes.items() if written is None}


def dump(recipe: Recipe) -> str:
    """The whole recipe with defaults as YAML, from which an equal Config can be loaded.  Comments give the origins.

    parallel:
      tp: 1  # default
      cp: 4  # command line: parallel.cp=4
    """
    return _yaml(recipe, f"Resolved from {recipe.path}.", lambda key: True)


def summary(recipe: Recipe) -> str:
    """The keys that the file and the command line set, as `dump` writes them.  A start prints this summary.

    All other keys have their defaults, or values from the config.json of model.hf.
    """
    header = f"Set in {recipe.path} or on the command line; all keys: {recipe.config.run.dir}/recipe.yaml"
    return _yaml(recipe, header, recipe.is_from_user)


def _yaml(recipe: Recipe, header: str, has_key: Callable[[str], bool]) -> str:
    """The keys of the recipe for which `has_key` is true, as YAML after a comment with the header."""
    lines = [f"# {in_one_line(header)}"]
    headed: set[str] = set()
    for key, value in values(recipe.config).items():
        if not has_key(key):
            continue
        *groups, name = key.split(".")
        for depth, group in enumerate(groups):
            path = ".".join(groups[: depth + 1])
            if path not in headed:
                headed.add(path)
                lines.append("  " * depth + f"{group}:")
        lines.append("  " * len(groups) + f"{name}: {yaml.write(value)}  # {in_one_line(str(recipe.origins[key]))}")
    return "\n".join(lines) + "\n"
