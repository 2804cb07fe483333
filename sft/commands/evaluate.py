"""`sft eval`: scores weights on held-out sets."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft.commands.arguments import read_recipe, recipe_command
from sft.commands.output import progress
from sft.errors import ConfigError

if TYPE_CHECKING:
    from sft.recipe.resolved import Recipe


def add(commands: Any) -> None:
    about = "score any weights on data.eval; start it alone, or with torchrun as train"
    command = recipe_command(commands, "eval", evaluate, about)
    add_source(command)
    command.add_argument("--json", metavar="FILE", type=Path, help="write the records into FILE (docs/how-to/eval.md)")


def add_source(command: ArgumentParser) -> None:
    """Add the option that names weights."""
    about = (
        "checkpoint, run, Hugging Face model or PEFT folder (default: the newest checkpoint of run.dir, or the start)"
    )
    command.add_argument("--from", metavar="WEIGHTS", dest="source", help=about)


def evaluate(arguments: Namespace) -> None:
    """Run `sft eval`.  Each process of torchrun calls this function."""
    from sft.recipe.layout import launched_world_size, resolve_layout
    from sft.recipe.needs import check_paths

    recipe = read_recipe(arguments)
    if not recipe.config.data.eval_sets:
        raise ConfigError(
            f"data.eval ({recipe.origins['data.eval']}) names no held-out set, so there is nothing to score.  Give "
            "data.eval=FILE, or data.eval={NAME: FILE, ...} for several sets."
        )
    layout = resolve_layout(recipe, launched_world_size() or 1)
    check_paths(recipe, trains=False)
    file: Path | None = arguments.json
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ConfigError(f"--json {file} cannot be written: it is a folder, or its folder does not exist.")
    if os.environ.get("RANK", "0") == "0":  # the other ranks wait for this rank when they join the process group
        from sft.data.cache.prepare import prepare_held_out
        from sft.recipe.tokenizer import tokenizer_of

        prepare_held_out(recipe.config, tokenizer_of(recipe.config), progress())

    source: str | None = arguments.source
    download(recipe, source)

    from sft.run import environment

    environment.prepare(recipe.config, layout)  # before the next import, which may start CUDA

    from sft.evaluate.held_out import main

    main(recipe, layout, source, file)


def download(recipe: "Recipe", source: str | None) -> None:
    """Download the weights that the recipe or `source` names, where they are on the hub."""
    from sft.hf import hub, hub_weights
    from sft.recipe.run_dir import download_weights

    if source is None:
        download_weights(recipe)
    elif hub.is_hub_name(source):
        hub_weights.model_folder(source)
    elif (Path(source) / "adapter_config.json").is_file():
        download_weights(recipe, has_adapters=True)
    elif recipe.config.lora.is_used and not (Path(source) / hub.CONFIG).is_file():  # a checkpoint of adapters
        download_weights(recipe)
