"""`sft probe leak | parity | data`: answers a question about a recipe, its data and its weights."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from sft.commands.arguments import read_recipe, recipe_command
from sft.errors import ConfigError


def add(commands: Any) -> None:
    group = commands.add_parser("probe", help="answer a question about a recipe, its data and its weights")
    probes = group.add_subparsers(dest="probe", required=True, metavar="QUESTION")
    leak = recipe_command(probes, "leak", probe, "does one document of a pack change anything in the others?")
    about = "do two layouts or backends compute the same loss and gradients?"
    parity = recipe_command(probes, "parity", probe, about)
    about = "show what every rank receives as text, and check it against the samples"
    data = recipe_command(probes, "data", probe, about)
    for command in (leak, parity, data):
        command.add_argument("--step", metavar="N", type=int, default=1, help="the step whose data is used (default 1)")
        command.add_argument(
            "--json", metavar="FILE", type=Path, help="write the result into FILE (docs/how-to/probes.md)"
        )
    leak.add_argument(
        "--document",
        metavar="N",
        type=int,
        help="number of the document to change, counted from 0 (default: the middle document of the pack)",
    )
    parity.add_argument(
        "--against",
        metavar="KEY=VALUE,...",
        required=True,
        help="settings of the second layout, for example parallel.cp=1,parallel.tp=2",
    )
    data.add_argument("--full", action="store_true", help="do not shorten long documents")


def probe(arguments: Namespace) -> int:
    """Run `sft probe`.  Returns 1 if the probe found a fault, else 0."""
    from sft.recipe.layout import launched_world_size, resolve_layout
    from sft.recipe.needs import check_paths
    from sft.recipe.run_dir import download_weights

    recipe = read_recipe(arguments)
    layout = resolve_layout(recipe, launched_world_size() or 1, f"probe {arguments.probe}")
    check_paths(recipe)
    if arguments.probe != "data":  # the other probes build the model
        download_weights(recipe)

    from sft.run import environment

    environment.prepare(recipe.config, layout)  # before the next import, which may start CUDA

    from sft.parallel.layout import Layout
    from sft.probe import data, leak, parity, report
    from sft.recipe.load import load_recipe
    from sft.run.signals import leave_with_parent

    step, document = arguments.step, getattr(arguments, "document", None)
    if step < 1 or (document or 0) < 0:
        raise ConfigError(f"--step {step} counts from 1, and --document {document} from 0.  Give other numbers.")
    report.check_path(arguments.json)
    leave_with_parent()
    if arguments.probe == "leak":
        result = leak.run(recipe, layout, step=step, document=document)
    elif arguments.probe == "data":
        result = data.run(recipe, layout, step=step, full=arguments.full)
    else:
        against = load_recipe(recipe.path, [*arguments.overrides, *overrides_of(arguments.against)])
        result = parity.run(recipe, layout, against, Layout.resolve(against.config, layout.world_size), step=step)
    return report.publish(result, arguments.json)


def overrides_of(against: str) -> list[str]:
    """The overrides in the value of --against.

    "parallel.cp=1,data.train=[a, b]" -> ["parallel.cp=1", "data.train=[a, b]"]
    """
    return re.split(r",(?=\s*[a-z_]+(?:\.\w+)+=)", against)
