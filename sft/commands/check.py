"""`sft check`: prints what `sft.check` finds."""

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from sft.commands.arguments import read_recipe, recipe_command
from sft.commands.output import print_group, show

if TYPE_CHECKING:
    from sft.recipe.resolved import Recipe


def add(commands: Any) -> None:
    command = recipe_command(commands, "check", check, "resolve and validate a recipe on any machine, without a GPU")
    command.add_argument("--world-size", metavar="N", type=int, help="number of processes of the run")
    about = "show where the value of KEY came from, and what KEY does; may be given several times"
    command.add_argument("--explain", metavar="KEY", action="append", default=[], help=about)
    about = "refuse a recipe that does not fit this type of GPU, such as h100 (default: the GPU of this machine; "
    about += "without one, a warning says which common GPUs hold the recipe)"
    command.add_argument("--gpu", metavar="NAME", help=about)
    command.add_argument("--no-data", action="store_true", help="do not read data files or tokenizer")


def check(arguments: Namespace) -> None:
    recipe = read_recipe(arguments)
    if arguments.explain:
        _explain(recipe, arguments)
        return

    from sft.api.checks import topics

    for name, lines in topics(recipe, world_size=arguments.world_size, gpu=arguments.gpu, data=not arguments.no_data):
        print_group(name, lines)


def _explain(recipe: "Recipe", arguments: Namespace) -> None:
    """Show the keys of --explain."""
    from sft.recipe.explain import explain
    from sft.recipe.layout import launched_world_size, resolve_layout

    world_size = launched_world_size() if arguments.world_size is None else arguments.world_size
    for key in arguments.explain:
        show(explain(recipe, key, lambda: resolve_layout(recipe, world_size)))
