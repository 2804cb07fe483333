"""`sft explain`: the meaning of keys of a recipe."""

from argparse import Namespace
from typing import Any

from sft.commands.output import show


def add(commands: Any) -> None:
    about = "say what a key of a recipe means, and which values it takes"
    command = commands.add_parser("explain", help=about)
    command.set_defaults(action=explain, parser=command)
    command.add_argument("keys", metavar="KEY", nargs="+", help="a key, such as optim.lr, or a group, such as optim")


def explain(arguments: Namespace) -> None:
    from sft.recipe.explain import meaning

    for key in arguments.keys:
        show(meaning(key))
