"""Checks whether this machine has the files and packages that a recipe names, before heavy modules are imported."""

import glob
import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

from sft.config import listed
from sft.config.keys import show
from sft.errors import ConfigError
from sft.files.object_store import is_url
from sft.hf import hub
from sft.recipe.resolved import Recipe


def check_paths(recipe: Recipe, *, trains: bool = True) -> None:
    """Raise ConfigError if a data file, the tokenizer, the chat template, a file of a teacher or the plan of the recipe
    does not exist.

    A tokenizer on the hub is looked up.  Called before heavy modules are imported.
    trains: whether the command uses the training data
    """
    check_names(recipe)
    data = recipe.config.data
    paths = [(key, path) for key, files in data.train_keys.items() for path in files] if trains else []
    paths += [("data.eval", path) for files in data.eval_sets.values() for path in files if isinstance(path, str)]
    tokenizer = None if data.tokenizer == "byte" else data.tokenizer
    paths += [] if tokenizer is None else [("data.tokenizer", tokenizer)]
    paths += [] if data.chat_template is None else [("data.chat_template", data.chat_template)]
    paths += [("data.teacher.files", path) for path in data.teacher.files or ()]
    paths += [] if data.plan is None or not trains else [("data.plan", data.plan)]
    missing = {
        (key, path): f"{key} = {path} ({recipe.origins[key]}) {problem}"
        for key, path in paths
        if (problem := _problem(key, path)) is not None
    }
    if tokenizer is not None and hub.is_hub_name(tokenizer):
        del missing["data.tokenizer", tokenizer]
        try:
            hub.snapshot(tokenizer)
        except ConfigError as error:
            missing["data.tokenizer", tokenizer] = (
                f"data.tokenizer = {tokenizer} ({recipe.origins['data.tokenizer']}): {error}"
            )
    if missing:
        raise ConfigError(listed(list(missing.values())))


def _problem(key: str, path: str) -> str | None:
    """Why this path of a recipe cannot be used; None if it exists, or is a URL whose form is right."""
    if not is_url(path):
        missing = (
            f"does not exist in {Path.cwd()}; give {key}=PATH.{_dataset_hint(key, path)}{_pattern_hint(key, path)}"
        )
        return None if os.path.exists(path) else missing  # false for a name that is too long
    if not key.startswith(("data.train", "data.eval")):
        return "is a URL, which only data.train and data.eval may name.  Give a file on this machine."
    from sft.data.read import remote_files

    if (reason := remote_files.refusal(path)) is not None:
        return f"{reason}."
    return "holds a pattern, and patterns are not expanded.  Name the files." if set("*[") & set(path) else None


def check_names(recipe: Recipe) -> None:
    """Raise ConfigError if data.chat_template is the name of a format, such as chatml, or a template, and not a path.

    This is known even on a machine without the files of the recipe.
    """
    template = recipe.config.data.chat_template
    if template is None:
        return
    is_code = "{{" in template or "{%" in template
    if not is_code and not Path(template).is_dir() and ({"/", "."} & set(template) or Path(template).exists()):
        return
    raise ConfigError(
        f"data.chat_template = {show(template)} ({recipe.origins['data.chat_template']}) is no file; expected a file "
        "with a Jinja template, such as chat_template.jinja of a chat model.  Names of formats, such as chatml, are "
        "not known; without the key, the tokenizer's own template is used: data.chat_template=null."
    )


def _pattern_hint(key: str, path: str) -> str:
    """Advice for a shell pattern such as data/*.jsonl.  Patterns are refused, because new files could match
    unnoticed."""
    if not set("*?[") & set(path):
        return ""
    files = sorted(glob.glob(path, recursive=True))
    if not files:
        return "  Patterns are not expanded, and this pattern matches no file."
    setting = shlex.quote(f"{key}=[{', '.join(files)}]")
    return f"  Patterns are not expanded.  Name the files, of which {len(files)} match: {setting}"


def _dataset_hint(key: str, path: str) -> str:
    """Advice for a missing data file whose name looks like a dataset on the hub: OWNER/NAME without an ending."""
    if not key.startswith(("data.train", "data.eval")) or not re.fullmatch(r"[A-Za-z0-9_-]+/[A-Za-z0-9_-]+", path):
        return ""
    return f"  A dataset of the Hugging Face hub is named so: {key[:10].rstrip('.')}={{chat: {{dataset: {path}}}}}."


def check_packages(recipe: Recipe) -> None:
    """Raise ConfigError if a recipe logs to a service whose package is not installed."""
    log = recipe.config.log
    keys = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "prometheus_port": "prometheus_client"}
    for key, package in keys.items():
        value = getattr(log, key)
        spec = None if value is None else find_spec(package)
        if value is not None and (spec is None or spec.origin is None):  # origin None: a folder of that name
            raise ConfigError(
                f"log.{key} = {value} ({recipe.origins[f'log.{key}']}) needs the package {package}, which is not "
                f"installed here: pip install {package}; or train without it: log.{key}=null."
            )
