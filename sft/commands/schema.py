"""`sft schema`: prints the JSON Schema of a recipe."""

import json
from argparse import Namespace
from typing import Any


def add(commands: Any) -> None:
    command = commands.add_parser("schema", help="print the JSON Schema of a recipe, for editors and programs")
    command.set_defaults(action=schema, parser=command)


def schema(arguments: Namespace) -> None:
    from sft.config.json_schema import json_schema

    print(json.dumps(json_schema(), indent=1))
