"""Chooses the probe that the command line names, and publishes its report."""

import re
from argparse import Namespace

from sft.errors import ConfigError
from sft.parallel.layout import Layout
from sft.probe import data, leak, parity, report
from sft.recipe.load import load_recipe
from sft.recipe.resolved import Recipe
from sft.run.signals import leave_with_parent


def answer(arguments: Namespace, recipe: Recipe, layout: Layout) -> int:
    """Run the probe.  Returns the exit code: 0 after PASS, 1 after FAIL."""
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
        settings = overrides_of(arguments.against)
        against = load_recipe(recipe.path, [*arguments.overrides, *settings])
        result = parity.run(recipe, layout, against, Layout.resolve(against.config, layout.world_size), step=step)
    return report.publish(result, arguments.json)


def overrides_of(against: str) -> list[str]:
    """ "parallel.cp=1,data.train=[a, b]" -> ["parallel.cp=1", "data.train=[a, b]"]"""
    return re.split(r",(?=\s*[a-z_]+(?:\.\w+)+=)", against)
